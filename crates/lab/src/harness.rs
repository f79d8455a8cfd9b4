//! The environment of experiments: guests and their monitors, the host, and the virtual host.

pub mod all;
pub mod assets;
pub mod balloon;
pub mod console;
pub mod counters;
pub mod direct;
pub mod driver;
pub mod experiment;
pub mod guest;
pub mod guest_process;
pub mod host;
pub mod in_virtual_host;
pub mod link;
pub mod maps;
pub mod merging;
pub mod monitor;
pub mod proc;
pub mod qmp;
pub mod run;
pub mod sampler;
pub mod size;
pub mod survey;
pub mod target;
pub mod testbed;
pub mod watch;
