//! Unix sockets between processes of one host.
//!
//! [`SocketFile::listen`] binds a stream socket to a name in the file system with the permissions
//! asked for, takes over the name of a process that has died, leaves that of a live one alone, and
//! removes its own at the end.

mod listener;
mod lock;

pub use listener::{ListenError, SocketFile, stream_socket};
