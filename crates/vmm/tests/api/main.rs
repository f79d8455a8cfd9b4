//! The API server over its real socket, with a test double of the machine.

#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

mod clients;
mod descriptors;
mod double;
mod limits;
mod openapi;
mod socket;
mod wire;
