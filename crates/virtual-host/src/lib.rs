//! A complete KVM host for machines whose KVM cannot run Linux: QEMU's emulator with nested SVM,
//! Debian's cloud kernel, and an init that takes commands.
//!
//! [`VirtualHost::start`] boots one from a [`HostConfig`] in a few seconds; [`VirtualHost::run`]
//! runs programs in it with live output. No file is left on disk: the root file system is an
//! in-memory file, a swap disk is an unnamed file, and the control channel is a socket pair. QEMU
//! dies with the process that started it, for whatever reason that ends.
//!
//! The root file system contains `/init` (the program that started the host), `/bin/ebb`, busybox,
//! the modules of KVM, and for guests `/ebb/vmlinuz`, `/ebb/vmlinux`, `/ebb/guest.cpio` and
//! `/ebb/ebb-agent`. Guests also have Ebb's balloon driver if it was built ([`balloon_module`]).

pub mod balloon_module;
pub mod cache;
pub mod channel;
mod clock;
mod command;
mod config;
mod console;
mod contents;
pub mod debian;
mod elf;
mod error;
pub mod guest_image;
mod host;
pub mod initramfs;
pub mod inside;
mod keeper;
pub mod kernel;
pub mod libraries;
pub mod memory;
pub mod modules;
pub mod programs;
mod qemu;
mod translations;

pub use channel::{ExitStatus, Hello, MemorySample};
pub use command::{Captured, Command, Output};
pub use config::{
    HostConfig, HostFile, Inclusion, MINIMUM_MEMORY_MIB, NodeConfig, TransparentHugePages,
    parse_duration, parse_size_mib,
};
pub use contents::vmlinux;
pub use error::HostError;
pub use host::VirtualHost;
pub use kernel::HostKernel;
pub use libraries::program_with_libraries;
