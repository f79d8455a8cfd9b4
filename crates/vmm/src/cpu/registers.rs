//! Initial state of a vCPU: registers, segments, page tables and MSRs for each entry protocol.

use ebb_guest_ram::GuestMemory;
use kvm_bindings::{Msrs, kvm_fpu, kvm_lapic_state, kvm_msr_entry, kvm_regs, kvm_segment};
use kvm_ioctls::VcpuFd;
use vm_memory::{Bytes, GuestAddress};

use super::CpuError;
use crate::boot::Entry;
use crate::layout;

const CR0_PE: u64 = 1;
const CR0_ET: u64 = 1 << 4;
const CR0_PG: u64 = 1 << 31;
const CR4_PAE: u64 = 1 << 5;
const EFER_LME: u64 = 1 << 8;
const EFER_LMA: u64 = 1 << 10;
/// Bit 1 of RFLAGS always reads one.
const RFLAGS_RESERVED: u64 = 2;

const PAGE_PRESENT_WRITABLE: u64 = 0b11;
const PAGE_HUGE: u64 = 1 << 7;

const MSR_IA32_MISC_ENABLE: u32 = 0x1a0;
const MISC_ENABLE_FAST_STRING: u64 = 1;
const MSR_MTRR_DEFAULT_TYPE: u32 = 0x2ff;
const MTRR_ENABLE: u64 = 1 << 11;
const MTRR_WRITE_BACK: u64 = 6;

/// Local APIC registers in `kvm_lapic_state`, and the delivery modes written there (Intel SDM
/// volume 3, 11.5.1).
const LAPIC_LVT_LINT0: usize = 0x350;
const LAPIC_LVT_LINT1: usize = 0x360;
const DELIVERY_EXTINT: u32 = 7 << 8;
const DELIVERY_NMI: u32 = 4 << 8;

/// Sets what every vCPU needs: floating point state, MSRs, local interrupt lines.
pub(super) fn initialize(vcpu: &VcpuFd) -> Result<(), CpuError> {
    let fpu = kvm_fpu { fcw: 0x37f, mxcsr: 0x1f80, ..Default::default() };
    vcpu.set_fpu(&fpu).map_err(CpuError::kvm("set the floating point state"))?;

    let entry = |index, data| kvm_msr_entry { index, data, ..Default::default() };
    let entries = [
        entry(MSR_IA32_MISC_ENABLE, MISC_ENABLE_FAST_STRING),
        entry(MSR_MTRR_DEFAULT_TYPE, MTRR_ENABLE | MTRR_WRITE_BACK),
    ];
    let msrs = Msrs::from_entries(&entries).map_err(|_| CpuError::Layout("a list of two MSRs"))?;
    let written =
        vcpu.set_msrs(&msrs).map_err(CpuError::kvm("set the model specific registers"))?;
    if written != entries.len() {
        return Err(CpuError::NoMsr { index: entries[written].index });
    }

    let mut lapic = vcpu.get_lapic().map_err(CpuError::kvm("read the local APIC"))?;
    set_delivery(&mut lapic, LAPIC_LVT_LINT0, DELIVERY_EXTINT);
    set_delivery(&mut lapic, LAPIC_LVT_LINT1, DELIVERY_NMI);
    vcpu.set_lapic(&lapic).map_err(CpuError::kvm("set the local APIC"))
}

fn set_delivery(lapic: &mut kvm_lapic_state, register: usize, mode: u32) {
    let mode = (mode.to_le_bytes()[1] & 0x7).cast_signed();
    lapic.regs[register + 1] = (lapic.regs[register + 1] & !0x7) | mode;
}

/// Points the boot vCPU at the kernel, and writes the descriptor and page tables that it needs to
/// `memory`.
pub(super) fn enter(vcpu: &VcpuFd, memory: &GuestMemory, entry: Entry) -> Result<(), CpuError> {
    let mut sregs = vcpu.get_sregs().map_err(CpuError::kvm("read the system registers"))?;
    let long_mode = matches!(entry, Entry::Linux64(_));
    let (code, data) = (code_segment(long_mode), data_segment());
    let gdt = [0, 0, descriptor(&code), descriptor(&data)];
    write_table(memory, layout::GDT_START, &gdt)?;
    sregs.gdt.base = layout::GDT_START;
    sregs.gdt.limit = (size_of_val(&gdt) - 1) as u16;
    sregs.idt.base = 0;
    sregs.idt.limit = 0;
    sregs.cs = code;
    (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
    sregs.tr = task_segment();
    sregs.cr0 = CR0_PE | CR0_ET;
    sregs.cr4 = 0;
    sregs.efer = 0;
    if long_mode {
        write_page_tables(memory)?;
        sregs.cr3 = layout::PAGE_TABLES;
        sregs.cr4 = CR4_PAE;
        sregs.cr0 |= CR0_PG;
        sregs.efer = EFER_LME | EFER_LMA;
    }
    vcpu.set_sregs(&sregs).map_err(CpuError::kvm("set the system registers"))?;

    let regs = match entry {
        Entry::Linux64(address) => kvm_regs {
            rip: address.0,
            rsi: layout::ZERO_PAGE,
            rsp: layout::BOOT_STACK,
            ..Default::default()
        },
        Entry::Pvh(address) => {
            kvm_regs { rip: address.0, rbx: layout::PVH_START_INFO, ..Default::default() }
        }
    };
    vcpu.set_regs(&kvm_regs { rflags: RFLAGS_RESERVED, ..regs })
        .map_err(CpuError::kvm("set the registers"))
}

/// Identity-maps the first 4 GiB with 2 MiB pages.
fn write_page_tables(memory: &GuestMemory) -> Result<(), CpuError> {
    const TABLE_BYTES: u64 = 4096;
    const ENTRIES: u64 = 512;
    let pdpt = layout::PAGE_TABLES + TABLE_BYTES;
    let directories = pdpt + TABLE_BYTES;
    write_table(memory, layout::PAGE_TABLES, &[pdpt | PAGE_PRESENT_WRITABLE])?;
    let pointers: Vec<u64> =
        (0..4).map(|gib| (directories + gib * TABLE_BYTES) | PAGE_PRESENT_WRITABLE).collect();
    write_table(memory, pdpt, &pointers)?;
    let pages: Vec<u64> =
        (0..4 * ENTRIES).map(|page| (page << 21) | PAGE_PRESENT_WRITABLE | PAGE_HUGE).collect();
    write_table(memory, directories, &pages)
}

fn write_table(memory: &GuestMemory, address: u64, entries: &[u64]) -> Result<(), CpuError> {
    let bytes: Vec<u8> = entries.iter().flat_map(|entry| entry.to_le_bytes()).collect();
    memory
        .write_slice(&bytes, GuestAddress(address))
        .map_err(|_| CpuError::Layout("descriptor and page tables"))
}

/// Selectors of the PVH and Linux boot protocols: code 0x10, data 0x18.
fn code_segment(long_mode: bool) -> kvm_segment {
    kvm_segment {
        base: 0,
        limit: 0xffff_ffff,
        selector: 0x10,
        type_: 0xb,
        present: 1,
        db: u8::from(!long_mode),
        s: 1,
        l: u8::from(long_mode),
        g: 1,
        ..Default::default()
    }
}

fn data_segment() -> kvm_segment {
    kvm_segment {
        base: 0,
        limit: 0xffff_ffff,
        selector: 0x18,
        type_: 0x3,
        present: 1,
        db: 1,
        s: 1,
        g: 1,
        ..Default::default()
    }
}

fn task_segment() -> kvm_segment {
    kvm_segment { limit: 0x67, type_: 0xb, present: 1, ..Default::default() }
}

/// A segment in the format of the descriptor table (Intel SDM volume 3, 3.4.5).
fn descriptor(segment: &kvm_segment) -> u64 {
    let limit = u64::from(segment.limit >> if segment.g == 1 { 12 } else { 0 });
    let base = segment.base;
    (limit & 0xffff)
        | (base & 0xff_ffff) << 16
        | u64::from(segment.type_) << 40
        | u64::from(segment.s) << 44
        | u64::from(segment.dpl) << 45
        | u64::from(segment.present) << 47
        | (limit >> 16 & 0xf) << 48
        | u64::from(segment.l) << 53
        | u64::from(segment.db) << 54
        | u64::from(segment.g) << 55
        | (base >> 24 & 0xff) << 56
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_are_the_well_known_flat_ones() {
        assert_eq!(descriptor(&code_segment(true)), 0x00af_9b00_0000_ffff);
        assert_eq!(descriptor(&code_segment(false)), 0x00cf_9b00_0000_ffff);
        assert_eq!(descriptor(&data_segment()), 0x00cf_9300_0000_ffff);
    }

    #[test]
    fn page_tables_identity_map_four_gib() {
        let memory = GuestMemory::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
        write_page_tables(&memory).unwrap();
        let read = |address: u64| memory.read_obj::<u64>(GuestAddress(address)).unwrap();
        for address in [0u64, 0x20_0000, 0x3fff_ffff, 0xc000_0000, 0xffff_ffff] {
            let pdpt = read(layout::PAGE_TABLES) & !0xfff;
            let directory = read(pdpt + (address >> 30) * 8) & !0xfff;
            let page = read(directory + (address >> 21 & 0x1ff) * 8);
            assert_eq!(page & 0x83, 0x83);
            assert_eq!(page & !0xfff, address & !0x1f_ffff);
        }
    }
}
