//! The control API: HTTP/1.1 and JSON on a unix socket, described by `docs/openapi.json`.
//!
//! It is written by hand over `httparse`. An asynchronous HTTP stack (hyper on tokio) would cost
//! more memory than the whole monitor may use (5 to 8 MiB resident), and a socket for one
//! operator's tools needs one thread and `poll`.
//!
//! | module | what |
//! | --- | --- |
//! | [`control`] | the [`VmControl`] trait and the documents |
//! | [`free_pages`] | a question to the guest that takes a while, and its document |
//! | [`merge`] | same-page merging: documents |
//! | [`migration`] | moving the machine to another monitor: documents |
//! | [`metrics`] | counters |
//! | [`http`] | bytes -> [`http::Request`], pure |
//! | [`route`] | [`http::Request`] -> [`route::Operation`], pure |
//! | [`reply`] | statuses, errors and replies -> bytes, pure |
//! | [`prometheus`] | counters -> text, pure |
//! | [`execute`] | [`route::Operation`] + [`VmControl`] -> reply |
//! | [`server`] | socket, thread, connections, time limits |
//! | [`client`] | the other end of the socket |

pub mod client;
pub mod control;
pub mod execute;
pub mod free_pages;
pub mod http;
pub mod merge;
pub mod metrics;
pub mod migration;
pub mod prometheus;
pub mod reply;
pub mod route;
pub mod server;

mod connection;

pub use client::{Client, ClientError};
pub use control::*;
pub use free_pages::*;
pub use merge::*;
pub use migration::*;
pub use server::{ApiError, ApiServer};

/// The OpenAPI 3.1 description of everything this module serves; also at `GET /openapi.json`.
pub const OPENAPI_JSON: &str = include_str!("../../../../docs/openapi.json");

/// The way of one request from bytes to operation without any I/O, as an entry for fuzzing.
///
/// Returns what would be executed, or the status of the refusal, or `None` when more bytes are
/// needed.
pub fn parse_and_route(bytes: &[u8]) -> Option<Result<route::Operation, reply::Status>> {
    match http::parse(bytes) {
        Ok(http::Parsed::Incomplete { .. }) => None,
        Ok(http::Parsed::Complete { request, .. }) => {
            Some(route::route(&request).map_err(|p| p.status))
        }
        Err(problem) => Some(Err(problem.status)),
    }
}
