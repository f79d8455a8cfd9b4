//! The guest agent is the init of test guests. It loads modules, runs workloads and reports over
//! the serial console.
//!
//! This library contains the protocol, which the host's side also uses, and the parts that do not
//! require process 1.

pub mod child;
pub mod churn;
pub mod clock;
pub mod clock_watch;
pub mod command_line;
pub mod count;
pub mod disk_load;
pub mod input;
pub mod kernel_log;
pub mod meminfo;
pub mod memory;
pub mod page_faults;
pub mod protocol;
pub mod random;
pub mod random_numbers;
pub mod tcp_echo;
pub mod text;
pub mod timed_reads;
pub mod trace_load;
pub mod vsock;
