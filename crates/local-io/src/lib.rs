//! Sockets between processes: names in the file system, and log lines at a limited rate.
//!
//! [`SocketFile::listen`] binds a stream socket to a name in the file system with the requested
//! permissions. It takes over the name of a process that has died, but not that of a live one, and
//! removes its own name at the end. [`LogLimit`] limits the log lines that peers can cause.

mod listener;
mod lock;
mod log_limit;

pub use listener::{ListenError, SocketEntry, SocketFile, stream_socket};
pub use log_limit::LogLimit;
