//! What two monitors tell each other of a machine that is moved between them, and whether one can
//! take what the other has.
//!
//! How they talk, and how memory gets across, is the crate `ebb-migration`. A [`Description`] goes
//! ahead of the memory: whatever the destination cannot provide is found before the first byte of
//! memory is sent. The state that goes behind the memory is that of a snapshot, a
//! [`MachineState`](crate::snapshot::MachineState) without RAM.

mod description;

pub use description::{
    Description, DeviceDescription, Here, Incompatible, KVM_CAPABILITIES, MemoryRegion,
    capabilities,
};
