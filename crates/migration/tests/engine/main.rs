//! Migrations of a simulated guest over real sockets: whatever the guest does meanwhile, its used
//! pages arrive, or it continues at the source.

#![allow(clippy::unwrap_used, reason = "a failing helper is a failing test")]

mod broken;
mod faults;
mod handed_over;
mod move_it;
mod moved;
mod policy;
mod real_memory;
