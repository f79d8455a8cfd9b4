//! The API server over its real socket, on a stand-in for the machine behind it.

#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

mod clients;
mod double;
mod limits;
mod openapi;
mod socket;
mod wire;
