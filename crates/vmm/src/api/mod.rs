//! The control API: HTTP/1.1 and JSON on a unix socket.

mod control;

pub use control::*;
