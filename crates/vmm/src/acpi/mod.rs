//! ACPI tables (ACPI specification 6.5): the only way in which a stock Debian kernel discovers
//! virtio-mmio devices, more than one vCPU, and NUMA nodes.
//!
//! The platform is "hardware-reduced" (section 4.1): no PM timer, no system control interrupt;
//! power-off and reset are two I/O ports, the power button comes through a generic event device.

mod dsdt;
mod numa;

use acpi_tables::fadt::{FADTBuilder, Flags};
use acpi_tables::gas::{AccessSize, AddressSpace, GAS};
use acpi_tables::madt::{
    EnabledStatus, IoApic, LocalInterruptController, MADT, ProcessorLocalApic,
};
use acpi_tables::rsdp::Rsdp;
use acpi_tables::xsdt::XSDT;
use acpi_tables::{Aml, sdt::Sdt};
use ebb_guest_ram::GuestMemory;
use thiserror::Error;
use vm_memory::{Bytes, GuestAddress};

use crate::layout;

pub use numa::NumaNode;

const OEM_ID: [u8; 6] = *b"EBB   ";
const TABLE_ID: [u8; 8] = *b"EBBVMM  ";
const REVISION: u32 = 1;

/// Offset of the sleep control register from [`layout::ACPI_PORT`].
pub const SLEEP_CONTROL: u16 = 0;
/// Offset of the sleep status register.
pub const SLEEP_STATUS: u16 = 1;
/// Offset of the reset register.
pub const RESET: u16 = 2;
/// Offset of the event status register: read by the event device's handler.
pub const EVENT_STATUS: u16 = 3;
/// Value of the reset register that triggers a reset.
pub const RESET_VALUE: u8 = 1;
/// Sleep type of S5, "soft off", in bits 4:2 of the sleep control register.
pub const SLEEP_TYPE_S5: u8 = 5;
/// Bit of the sleep control register that starts the transition.
pub const SLEEP_ENABLE: u8 = 1 << 5;
/// Event status bit: the power button was pressed.
pub const EVENT_POWER_BUTTON: u8 = 1;
/// Event status bit: the VM generation id has changed.
pub const EVENT_GENERATION: u8 = 2;

/// The tables do not fit into their window.
#[derive(Debug, Error)]
#[error(
    "the ACPI tables need {needed_bytes} bytes, there is room for {room_bytes}; \
     use fewer vCPUs, nodes or devices"
)]
pub struct AcpiError {
    /// Bytes needed.
    pub needed_bytes: u64,
    /// Bytes available.
    pub room_bytes: u64,
}

/// A device to announce: register window and interrupt line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MmioDevice {
    /// First byte of the register window.
    pub address: u64,
    /// Interrupt line, edge-triggered.
    pub gsi: u32,
}

/// The platform that the tables describe.
#[derive(Debug, Clone)]
pub struct Platform {
    /// Number of vCPUs; APIC ids are 0 to `cpus - 1`.
    pub cpus: u8,
    /// virtio-mmio devices.
    pub devices: Vec<MmioDevice>,
    /// NUMA nodes; empty for none.
    pub nodes: Vec<NumaNode>,
}

/// Writes tables one after the other.
struct Writer<'a> {
    memory: &'a GuestMemory,
    next: u64,
}

impl Writer<'_> {
    fn write(&mut self, table: &dyn Aml) -> Result<u64, AcpiError> {
        let mut bytes = Vec::new();
        table.to_aml_bytes(&mut bytes);
        let address = self.next;
        let end = address + bytes.len() as u64;
        let overflow = AcpiError {
            needed_bytes: end - layout::ACPI_START,
            room_bytes: layout::GENERATION_ID - layout::ACPI_START,
        };
        if end > layout::GENERATION_ID {
            return Err(overflow);
        }
        self.memory.write_slice(&bytes, GuestAddress(address)).map_err(|_| overflow)?;
        self.next = end.next_multiple_of(16);
        Ok(address)
    }
}

/// Writes all tables into `memory` and returns the address of the root pointer (RSDP).
pub fn write_tables(memory: &GuestMemory, platform: &Platform) -> Result<GuestAddress, AcpiError> {
    // The root pointer comes first: its address does not depend on the rest.
    let rsdp_address = layout::ACPI_START;
    let mut writer =
        Writer { memory, next: rsdp_address + (Rsdp::len() as u64).next_multiple_of(16) };

    let mut dsdt = Sdt::new(*b"DSDT", 36, 6, OEM_ID, TABLE_ID, REVISION);
    dsdt.append_slice(&dsdt::namespace(&platform.devices));
    let dsdt = writer.write(&dsdt)?;
    let mut tables = vec![writer.write(&fadt(dsdt))?, writer.write(&madt(platform.cpus))?];
    if !platform.nodes.is_empty() {
        tables.push(writer.write(&numa::srat(&platform.nodes))?);
        tables.push(writer.write(&numa::slit(&platform.nodes))?);
    }
    let mut xsdt = XSDT::new(OEM_ID, TABLE_ID, REVISION);
    for table in tables {
        xsdt.add_entry(table);
    }
    let xsdt = writer.write(&xsdt)?;
    writer.next = rsdp_address;
    writer.write(&Rsdp::new(OEM_ID, xsdt))?;
    Ok(GuestAddress(rsdp_address))
}

fn fadt(dsdt: u64) -> acpi_tables::fadt::FADT {
    let register = |offset: u16| {
        GAS::new(
            AddressSpace::SystemIo,
            8,
            0,
            AccessSize::ByteAccess,
            u64::from(layout::ACPI_PORT + offset),
        )
    };
    let mut fadt = FADTBuilder::new(OEM_ID, TABLE_ID, REVISION)
        .dsdt_64(dsdt)
        .flag(Flags::HwReducedAcpi)
        .flag(Flags::ResetRegSup);
    // IA-PC boot flags (table 5.10): no VGA, no 8042 to probe, no message signalled interrupts, no
    // CMOS clock.
    fadt.iapc_boot_arch = ((1u16 << 2) | (1 << 3) | (1 << 5)).into();
    fadt.reset_reg = register(RESET);
    fadt.reset_value = RESET_VALUE;
    fadt.sleep_control_reg = register(SLEEP_CONTROL);
    fadt.sleep_status_reg = register(SLEEP_STATUS);
    fadt.finalize()
}

fn madt(cpus: u8) -> MADT {
    let mut madt = MADT::new(
        OEM_ID,
        TABLE_ID,
        REVISION,
        LocalInterruptController::Address(layout::LOCAL_APIC_START),
    );
    madt.add_structure(IoApic::new(0, layout::IOAPIC_START, 0));
    for cpu in 0..cpus {
        madt.add_structure(ProcessorLocalApic::new(cpu, cpu, EnabledStatus::Enabled));
    }
    madt
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checksum(bytes: &[u8]) -> u8 {
        bytes.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte))
    }

    fn table(memory: &GuestMemory, address: u64) -> Vec<u8> {
        let length: u32 = memory.read_obj(GuestAddress(address + 4)).unwrap();
        let mut bytes = vec![0; length as usize];
        memory.read_slice(&mut bytes, GuestAddress(address)).unwrap();
        bytes
    }

    fn tables(platform: &Platform) -> Vec<(String, Vec<u8>)> {
        let memory = GuestMemory::from_ranges(&[(GuestAddress(0), 2 << 20)]).unwrap();
        let rsdp = write_tables(&memory, platform).unwrap();
        let mut root = [0u8; 36];
        memory.read_slice(&mut root, rsdp).unwrap();
        assert_eq!(&root[..8], b"RSD PTR ");
        assert_eq!(checksum(&root[..20]), 0);
        assert_eq!(checksum(&root), 0);
        let xsdt = table(&memory, u64::from_le_bytes(root[24..32].try_into().unwrap()));
        assert_eq!(checksum(&xsdt), 0);
        xsdt[36..]
            .chunks(8)
            .map(|entry| table(&memory, u64::from_le_bytes(entry.try_into().unwrap())))
            .map(|table| (String::from_utf8(table[..4].to_vec()).unwrap(), table))
            .collect()
    }

    fn platform(cpus: u8, nodes: Vec<NumaNode>) -> Platform {
        Platform { cpus, devices: vec![MmioDevice { address: 0xd000_0f00, gsi: 5 }], nodes }
    }

    #[test]
    fn every_table_has_a_correct_checksum() {
        let nodes = vec![
            NumaNode { cpus: vec![0], ranges: vec![0..1 << 30], distances: vec![10, 20] },
            NumaNode { cpus: vec![1], ranges: vec![1 << 30..2 << 30], distances: vec![20, 10] },
        ];
        let tables = tables(&platform(2, nodes));
        let names: Vec<_> = tables.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["FACP", "APIC", "SRAT", "SLIT"]);
        for (name, bytes) in &tables {
            assert_eq!(checksum(bytes), 0, "{name}");
        }
    }

    #[test]
    fn a_guest_without_nodes_has_no_numa_tables() {
        let names: Vec<_> =
            tables(&platform(1, Vec::new())).into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["FACP", "APIC"]);
    }

    #[test]
    fn the_largest_platform_fits() {
        let devices = (0..18)
            .map(|slot| MmioDevice { address: 0xd000_0f00 + slot * 0x2000, gsi: 5 + slot as u32 })
            .collect();
        let nodes = (0..8)
            .map(|node| NumaNode {
                cpus: (node * 31..node * 31 + 31).collect(),
                ranges: vec![u64::from(node) << 30..u64::from(node + 1) << 30],
                distances: (0..8).map(|other| if other == node { 10 } else { 20 }).collect(),
            })
            .collect();
        let platform = Platform { cpus: 254, devices, nodes };
        assert_eq!(tables(&platform).len(), 4);
    }
}
