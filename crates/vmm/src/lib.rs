//! The Ebb virtual machine monitor for x86_64 on KVM.
//!
//! [`vm::run`] takes a [`config::VmConfig`] and runs a guest until it ends. The modules, from the
//! guest outwards:
//!
//! | module | contents |
//! | --- | --- |
//! | [`layout`] | the guest-physical address map |
//! | [`boot`] | kernel, initrd, command line, entry protocols |
//! | [`acpi`] | the tables that announce devices, vCPUs, NUMA nodes |
//! | [`cpu`] | CPUID, registers, vCPU threads |
//! | [`devices`] | buses, serial line, platform registers, virtio over memory-mapped registers |
//! | [`clock`] | the guest's clocks over pause, snapshot and restore |
//! | [`snapshot`] | a virtual machine in a file |
//! | [`checkpoint`] | a virtual machine in memory, and machines that are forked from it |
//! | [`vm`] | the whole machine: built, run, paused, reset, saved, restored, moved |
//! | [`api`] | the control socket |
//! | [`firecracker`] | Firecracker's API to the same machine |
//! | [`token_bucket`] | how much may pass in a time |
//! | [`words`] | names of enum values, from their serde declarations |
//! | [`log`] | log lines, which never delay a running machine |
//! | [`seccomp`] | system call filters |
//! | [`isolation`] | the user, namespaces and limits of a running monitor, and its companion |
//! | [`probe`] | whether this machine's KVM can run guests |

pub mod acpi;
pub mod api;
pub mod boot;
pub mod checkpoint;
pub mod clock;
pub mod config;
pub mod cpu;
pub mod devices;
mod ending;
pub mod exit;
mod file;
pub mod firecracker;
mod forked;
#[cfg(any(test, feature = "testing"))]
#[doc(hidden)]
pub mod fuzzing;
pub mod isolation;
pub mod layout;
pub mod log;
pub mod mmds;
mod own_pages;
mod packet;
pub mod probe;
pub mod seccomp;
pub mod size;
pub mod snapshot;
pub mod token_bucket;
pub mod vm;
pub mod words;
