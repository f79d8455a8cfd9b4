//! The control API: HTTP/1.1 and JSON on a unix socket, described by `docs/openapi.json`.
//!
//! The server is hand-written over `httparse`. An asynchronous HTTP stack (hyper on tokio) would
//! take more memory than the whole monitor may use (5 to 8 MiB resident), and a socket for one
//! operator's tools needs one thread and `poll`.
//!
//! | module | what |
//! | --- | --- |
//! | [`control`] | operations of a [`Machine`], and their results |
//! | [`vm`], [`balloon`], [`disks`], [`free_pages`], [`lease`], [`limits`] | documents |
//! | [`merge`], [`migration`], [`net`], [`park`] | documents |
//! | [`metrics`], [`prometheus`] | counters, and their text format |
//! | [`http`] | bytes -> [`http::Request`], pure |
//! | [`route`], [`fields`] | [`http::Request`] -> [`Operation`], pure |
//! | [`statistics`] | waits for the guest's statistics |
//! | [`reply`] | statuses, errors and documents -> bytes, pure |
//! | `door` | what a connection asks: a request in, a reply out |
//! | [`server`] | socket, thread, connections, time limits |
//! | [`client`] | the other end of the socket |
//! | `descriptors` | file descriptors that come with a request |
//!
//! The types of the documents are their only declaration: [`fields`], the test that writes
//! `docs/openapi.json`, and the command line derive fields, defaults, bounds and words from their
//! schemas.

pub mod balloon;
pub mod client;
pub mod control;
pub mod disks;
pub mod fields;
pub mod free_pages;
pub mod http;
pub mod lease;
pub mod limits;
pub mod merge;
pub mod metrics;
pub mod migration;
pub mod net;
pub mod park;

pub mod prometheus;
pub mod reply;
pub mod route;
pub mod server;
pub mod statistics;
pub mod vm;
pub mod working_set;

mod connection;
mod descriptors;
pub(crate) mod door;
#[cfg(any(test, feature = "testing"))]
mod fuzzing;

pub use balloon::*;
pub use client::{Client, ClientError};
pub use control::*;
pub use descriptors::MAX_DESCRIPTORS;
pub use disks::{DiskFormat, DiskInfo, DiskRequests, DiskResize, DisksInfo};
pub use free_pages::*;
pub use lease::*;
pub use limits::*;
pub use merge::*;
pub use metrics::*;
pub use migration::*;
pub use net::*;
pub use park::*;
pub use reply::OPENAPI_JSON;
pub use server::{ApiError, ApiServer, ApiSocket};
pub use statistics::*;
pub use vm::*;
pub use working_set::*;

#[cfg(any(test, feature = "testing"))]
pub(crate) use fuzzing::fuzz_client;

/// Parses one request and routes it to an operation, without any I/O: entry point for fuzzing.
///
/// Returns the operation, or the status of the refusal, or `None` if more bytes are needed.
pub fn parse_and_route(bytes: &[u8]) -> Option<Result<Operation, reply::Status>> {
    match http::parse(bytes) {
        Ok(http::Parsed::Incomplete { .. }) => None,
        Ok(http::Parsed::Complete { request, .. }) => {
            Some(route::route(&request).map_err(|p| p.status))
        }
        Err(problem) => Some(Err(problem.status)),
    }
}
