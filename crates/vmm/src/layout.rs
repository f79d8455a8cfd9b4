//! The guest-physical address map.
//!
//! ```text
//!          0 ..  9 fc00   RAM: boot structures from 0x500 to 0x30000, see the constants
//!     9 fc00 ..  f ffff   not RAM; ACPI tables from 0xe0000
//!    10 0000 .. c000 0000  RAM: kernel, initrd at the end
//!  c000 0000 .. 1 0000 0000  the hole below 4 GiB: virtio-mmio at 0xd0000000, IOAPIC, local APIC,
//!                            KVM's own pages
//!  1 0000 0000 ..          RAM beyond the first 3 GiB
//! ```

use std::ops::Range;

/// End of the RAM below 1 MiB, where PCs keep the extended BIOS data area.
pub const LOW_RAM_END: u64 = 0x9_fc00;
/// First byte of the ACPI tables: inside the window that firmware uses for them, which no kernel
/// treats as RAM.
pub const ACPI_START: u64 = 0xe_0000;
/// End of the window for ACPI tables.
pub const ACPI_END: u64 = 0x10_0000;
/// Page with the VM generation id, after the ACPI tables.
pub const GENERATION_ID: u64 = 0xf_e000;
/// Address at which a processor starts after a reset, and to which kernels jump that restart
/// through the firmware; the last bytes of that window.
pub const RESET_VECTOR: u64 = 0xf_fff0;
/// Start of the RAM above 1 MiB.
pub const HIGH_RAM_START: u64 = 0x10_0000;
/// Start of the hole below 4 GiB.
pub const HOLE_START: u64 = 0xc000_0000;
/// End of the hole below 4 GiB.
pub const HOLE_END: u64 = 0x1_0000_0000;

/// Global descriptor table of the boot vCPU.
pub const GDT_START: u64 = 0x500;
/// PVH start information (Xen's `hvm_start_info`).
pub const PVH_START_INFO: u64 = 0x6000;
/// PVH module list.
pub const PVH_MODULES: u64 = 0x6040;
/// PVH memory map.
pub const PVH_MEMORY_MAP: u64 = 0x6100;
/// The "zero page" (`struct boot_params`) of the Linux boot protocol.
pub const ZERO_PAGE: u64 = 0x7000;
/// Initial stack of the boot vCPU.
pub const BOOT_STACK: u64 = 0x8ff0;
/// Page tables that map the first 4 GiB one to one: one PML4, one PDPT, four page directories.
pub const PAGE_TABLES: u64 = 0x9000;
/// Kernel command line.
pub const CMDLINE_START: u64 = 0x2_0000;
/// Longest kernel command line that fits, with its terminating NUL, in bytes.
pub const CMDLINE_MAX_BYTES: usize = 0x1_0000;

/// First page of the first virtio-mmio device.
pub const VIRTIO_MMIO_START: u64 = 0xd000_0000;
/// A device's register window starts here in its first page, where only registers are, which the
/// guest reads without an exit; its configuration space is all of its second page.
pub const VIRTIO_MMIO_OFFSET: u64 = 0xf00;
/// Size of such a page.
pub const VIRTIO_MMIO_PAGE_BYTES: u64 = 0x1000;
/// Distance between virtio-mmio devices, in bytes.
pub const VIRTIO_MMIO_STRIDE: u64 = 2 * VIRTIO_MMIO_PAGE_BYTES;
/// Size of a register window with its configuration space, in bytes.
pub const VIRTIO_MMIO_WINDOW_BYTES: u64 = VIRTIO_MMIO_STRIDE - VIRTIO_MMIO_OFFSET;
/// First interrupt line of virtio devices; 0-4 belong to PC devices.
pub const VIRTIO_FIRST_GSI: u32 = 5;
/// Last interrupt line of virtio devices: the IOAPIC has 24 pins, the last is the ACPI event
/// device's.
pub const VIRTIO_LAST_GSI: u32 = 22;
/// Interrupt line of the ACPI generic event device (power button).
pub const EVENT_DEVICE_GSI: u32 = 23;
/// I/O APIC registers.
pub const IOAPIC_START: u32 = 0xfec0_0000;
/// Local APIC registers.
pub const LOCAL_APIC_START: u32 = 0xfee0_0000;
/// Page that KVM uses for the identity map of real mode (Intel).
pub const KVM_IDENTITY_MAP: u64 = 0xfffb_c000;
/// Three pages that KVM uses for the task state segment (Intel).
pub const KVM_TSS: u64 = 0xfffb_d000;

/// First port of the serial line COM1.
pub const SERIAL_PORT: u16 = 0x3f8;
/// Interrupt line of COM1.
pub const SERIAL_GSI: u32 = 4;
/// Ports of the ACPI sleep and reset registers: sleep control, sleep status, reset, event status.
pub const ACPI_PORT: u16 = 0x600;
/// Port of the panic notification device (QEMU's pvpanic interface).
pub const PANIC_PORT: u16 = 0x505;

/// Guest-physical RAM ranges of a guest with `size_bytes` of RAM, in ascending order.
pub fn ram_ranges(size_bytes: u64) -> Vec<Range<u64>> {
    if size_bytes <= HOLE_START {
        vec![0..size_bytes]
    } else {
        vec![0..HOLE_START, HOLE_END..HOLE_END + (size_bytes - HOLE_START)]
    }
}

/// Splits guest RAM into pieces for nodes of the given sizes, in order: `(node, range)`. A node
/// that spans the hole has two pieces.
pub fn node_ranges(node_sizes_bytes: &[u64]) -> Vec<(usize, Range<u64>)> {
    let mut ram = ram_ranges(node_sizes_bytes.iter().sum()).into_iter();
    let mut current = ram.next().unwrap_or(0..0);
    let mut pieces = Vec::new();
    for (node, &size) in node_sizes_bytes.iter().enumerate() {
        let mut left = size;
        while left > 0 {
            if current.is_empty() {
                match ram.next() {
                    Some(next) => current = next,
                    None => return pieces,
                }
            }
            let taken = left.min(current.end - current.start);
            pieces.push((node, current.start..current.start + taken));
            current.start += taken;
            left -= taken;
        }
    }
    pieces
}

/// The memory map given to the guest: RAM without the legacy area below 1 MiB.
pub fn usable_ram(size_bytes: u64) -> Vec<Range<u64>> {
    let mut usable = vec![0..LOW_RAM_END];
    for range in ram_ranges(size_bytes) {
        let start = range.start.max(if range.start == 0 { HIGH_RAM_START } else { range.start });
        if start < range.end {
            usable.push(start..range.end);
        }
    }
    usable
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn small_and_large_guests() {
        assert_eq!(ram_ranges(1 << 30), vec![0..1 << 30]);
        assert_eq!(ram_ranges(5 << 30), vec![0..HOLE_START, HOLE_END..HOLE_END + (2 << 30)]);
        assert_eq!(usable_ram(64 << 20), vec![0..LOW_RAM_END, HIGH_RAM_START..64 << 20]);
    }

    #[test]
    fn a_node_that_spans_the_hole_has_two_pieces() {
        let pieces = node_ranges(&[2 << 30, 2 << 30]);
        assert_eq!(
            pieces,
            vec![(0, 0..2 << 30), (1, 2 << 30..HOLE_START), (1, HOLE_END..HOLE_END + (1 << 30))]
        );
    }

    proptest! {
        #[test]
        fn nodes_cover_all_ram_once(sizes in prop::collection::vec(1u64..4096, 1..8)) {
            let sizes: Vec<u64> = sizes.into_iter().map(|units| units * (2 << 20)).collect();
            let pieces = node_ranges(&sizes);
            for (node, &size) in sizes.iter().enumerate() {
                let own = pieces.iter().filter(|(n, _)| *n == node);
                let sum: u64 = own.map(|(_, r)| r.end - r.start).sum();
                prop_assert_eq!(sum, size);
            }
            for pair in pieces.windows(2) {
                prop_assert!(pair[0].1.end <= pair[1].1.start);
            }
            for (_, range) in &pieces {
                prop_assert!(range.end <= HOLE_START || range.start >= HOLE_END);
            }
        }
    }
}
