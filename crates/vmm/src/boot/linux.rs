//! The zero page of the Linux boot protocol (Linux Documentation/arch/x86/zero-page.rst).

use std::ops::Range;

use ebb_guest_ram::GuestMemory;
use linux_loader::loader::bootparam;
use vm_memory::{ByteValued, GuestAddress};

use super::{BootError, write};
use crate::layout;

const E820_RAM: u32 = 1;
const E820_RESERVED: u32 = 2;
/// Boot loader identifier for loaders without an assigned one.
const LOADER_UNDEFINED: u8 = 0xff;

/// A setup header for an ELF kernel, which has none of its own.
pub(super) fn header_for_elf() -> bootparam::setup_header {
    bootparam::setup_header {
        boot_flag: 0xaa55,
        header: 0x5372_6448,
        kernel_alignment: 0x0100_0000,
        ..Default::default()
    }
}

/// Length of a bzImage in bytes according to its header: setup sectors, then the kernel in units of
/// 16 bytes (Linux Documentation/arch/x86/boot.rst, `setup_sects` and `syssize`). `head` is the
/// start of the file; missing bytes count as zeros.
pub(super) fn image_bytes(head: &[u8]) -> u64 {
    const SETUP_SECTORS: usize = 0x1f1;
    const KERNEL_SIZE: usize = 0x1f4;
    let sectors = match head.get(SETUP_SECTORS).copied().unwrap_or(0) {
        0 => 4,
        sectors => u64::from(sectors),
    };
    let units = head
        .get(KERNEL_SIZE..)
        .and_then(|rest| rest.first_chunk())
        .map_or(0, |bytes| u32::from_le_bytes(*bytes));
    (sectors + 1) * 512 + u64::from(units) * 16
}

/// Writes the zero page: the kernel's own setup header, command line, initrd, memory map, ACPI root
/// pointer.
pub(super) fn write_zero_page(
    memory: &GuestMemory,
    ram_bytes: u64,
    header: bootparam::setup_header,
    cmdline_bytes: usize,
    initrd: &Range<u64>,
    rsdp: GuestAddress,
) -> Result<(), BootError> {
    let mut params = bootparam::boot_params { hdr: header, ..Default::default() };
    params.hdr.type_of_loader = LOADER_UNDEFINED;
    params.hdr.cmd_line_ptr = layout::CMDLINE_START as u32;
    params.hdr.cmdline_size = cmdline_bytes as u32;
    params.hdr.ramdisk_image = initrd.start as u32;
    params.hdr.ramdisk_size = (initrd.end - initrd.start) as u32;
    params.acpi_rsdp_addr = rsdp.0;
    let mut entries = 0;
    let mut add = |range: Range<u64>, kind: u32| {
        params.e820_table[entries] = bootparam::boot_e820_entry {
            addr: range.start,
            size: range.end - range.start,
            r#type: kind,
        };
        entries += 1;
    };
    for range in layout::usable_ram(ram_bytes) {
        add(range, E820_RAM);
    }
    add(layout::ACPI_START..layout::ACPI_END, E820_RESERVED);
    params.e820_entries = entries as u8;
    write(memory, "the zero page", layout::ZERO_PAGE, params.as_slice())
}
