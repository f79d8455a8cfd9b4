//! Sessions over real sockets on this host.

mod certificates;
mod cuts;
mod drive;
mod encrypted;
mod local;
mod proxy;
mod reasons;
mod strangers;
