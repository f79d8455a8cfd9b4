//! What processes need that talk to each other over sockets.
//!
//! [`SocketFile::listen`] binds a stream socket to a name in the file system with the permissions
//! asked for, takes over the name of a process that has died, leaves that of a live one alone, and
//! removes its own at the end. [`LogLimit`] bounds what strangers can bring about in the log.

mod listener;
mod lock;
mod log_limit;

pub use listener::{ListenError, SocketFile, stream_socket};
pub use log_limit::LogLimit;
