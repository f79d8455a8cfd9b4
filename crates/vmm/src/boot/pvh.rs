//! The start information of the PVH entry (Xen `xen/include/public/arch-x86/hvm/start_info.h`).

use std::ops::Range;

use ebb_guest_ram::GuestMemory;
use linux_loader::start_info::{
    XEN_HVM_MEMMAP_TYPE_RAM, XEN_HVM_MEMMAP_TYPE_RESERVED, XEN_HVM_START_MAGIC_VALUE,
};
use vm_memory::GuestAddress;

use super::{BootError, write};
use crate::layout;

/// Collects little-endian fields.
#[derive(Default)]
struct Fields(Vec<u8>);

impl Fields {
    fn u32(mut self, value: u32) -> Self {
        self.0.extend_from_slice(&value.to_le_bytes());
        self
    }

    fn u64(mut self, value: u64) -> Self {
        self.0.extend_from_slice(&value.to_le_bytes());
        self
    }
}

/// Writes `hvm_start_info` (version 1), the module list with the initrd, and the memory map.
pub(super) fn write_start_info(
    memory: &GuestMemory,
    ram_bytes: u64,
    initrd: &Range<u64>,
    rsdp: GuestAddress,
) -> Result<(), BootError> {
    let mut map: Vec<(Range<u64>, u32)> = layout::usable_ram(ram_bytes)
        .into_iter()
        .map(|range| (range, XEN_HVM_MEMMAP_TYPE_RAM))
        .collect();
    map.push((layout::ACPI_START..layout::ACPI_END, XEN_HVM_MEMMAP_TYPE_RESERVED));
    let map_bytes = map.iter().fold(Fields::default(), |fields, (range, kind)| {
        fields.u64(range.start).u64(range.end - range.start).u32(*kind).u32(0)
    });
    let modules = u32::from(!initrd.is_empty());
    let start_info = Fields::default()
        .u32(XEN_HVM_START_MAGIC_VALUE)
        .u32(1)
        .u32(0)
        .u32(modules)
        .u64(if modules > 0 { layout::PVH_MODULES } else { 0 })
        .u64(layout::CMDLINE_START)
        .u64(rsdp.0)
        .u64(layout::PVH_MEMORY_MAP)
        .u32(map.len() as u32)
        .u32(0);
    let module = Fields::default().u64(initrd.start).u64(initrd.end - initrd.start).u64(0).u64(0);
    write(memory, "the PVH memory map", layout::PVH_MEMORY_MAP, &map_bytes.0)?;
    write(memory, "the PVH module list", layout::PVH_MODULES, &module.0)?;
    write(memory, "the PVH start information", layout::PVH_START_INFO, &start_info.0)
}
