//! Sessions over real sockets on this host.

mod certificates;
mod drive;
mod encrypted;
mod local;
