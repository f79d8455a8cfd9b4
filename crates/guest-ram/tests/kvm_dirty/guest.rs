//! A guest that increments the first byte of each of a row of pages.

use std::cell::RefCell;

use ebb_abi::PAGE_SIZE_BYTES;
use ebb_guest_ram::{Backing, GuestRam, GuestRange, HugePages, PageBitmap, Populate, RegionSpec};
use kvm_bindings::{kvm_regs, kvm_segment, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use vm_memory::{Bytes, GuestAddress};

/// In 32-bit mode: `round: mov eax, esi; mov ecx, edi; next: inc byte [eax]; add eax, edx; dec ecx;
/// jnz next; dec ebp; jnz round; hlt`
const PROGRAM: [u8; 15] =
    [0x89, 0xf0, 0x89, 0xf9, 0xfe, 0x00, 0x01, 0xd0, 0x49, 0x75, 0xf9, 0x4d, 0x75, 0xf2, 0xf4];

/// First pages and sizes of the regions, in pages: the first two adjoin, no size is a multiple of
/// 64 pages, and the last has more pages than a small ring has entries.
pub const REGIONS: [(u64, u64); 3] = [(0, 70), (70, 130), (4096, 2000)];

/// Protected mode (Intel SDM volume 3, section 2.5).
const CR0_PE: u64 = 1;
/// Bit 1 of RFLAGS is always set.
const RFLAGS_RESERVED: u64 = 1 << 1;
/// `KVM_EXIT_DIRTY_RING_FULL`, which kvm-ioctls lacks.
const EXIT_DIRTY_RING_FULL: u32 = 31;

/// A machine with one vCPU. Memory comes last, so that it is unmapped last.
pub struct Guest {
    pub vcpu: RefCell<VcpuFd>,
    pub vm: VmFd,
    pub ram: GuestRam,
}

/// Reason of the guest's stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    Done,
    RingFull,
}

/// KVM; `None`, with a message, where it is missing.
pub fn kvm() -> Option<Kvm> {
    if !std::path::Path::new("/dev/kvm").exists() {
        eprintln!("skipped: this machine has no /dev/kvm");
        return None;
    }
    Some(Kvm::new().unwrap())
}

impl Guest {
    /// `before_vcpu` gets the machine before its vCPU is created.
    pub fn new(kvm: &Kvm, before_vcpu: impl FnOnce(&VmFd)) -> Self {
        let specs = REGIONS.map(|(first, pages)| RegionSpec {
            start: GuestAddress(first * PAGE_SIZE_BYTES),
            size_bytes: pages * PAGE_SIZE_BYTES,
            host_node: None,
        });
        let ram = GuestRam::new(&specs, Backing::Anonymous, HugePages::On, Populate::Lazy).unwrap();
        ram.memory().write_slice(&PROGRAM, GuestAddress(0)).unwrap();
        let vm = kvm.create_vm().unwrap();
        vm.set_tss_address(0xfffb_d000).unwrap();
        for (slot, region) in ram.regions().iter().enumerate() {
            let slot = kvm_userspace_memory_region {
                slot: slot as u32,
                flags: 0,
                guest_phys_addr: region.start.0,
                memory_size: region.size_bytes,
                userspace_addr: region.host_address,
            };
            // SAFETY: the memory lives in the same struct as the machine and is dropped after it.
            unsafe { vm.set_user_memory_region(slot) }.unwrap();
        }
        before_vcpu(&vm);
        let vcpu = create_vcpu(&vm, 0);
        Self { vcpu: RefCell::new(vcpu), vm, ram }
    }

    /// Makes the guest write to `count` pages from page `first` on, `step` pages apart.
    pub fn write(&self, first: u64, step: u64, count: u64) -> Stop {
        let mut vcpu = self.vcpu.borrow_mut();
        prepare(&vcpu, first, step, count, 1);
        resume(&mut vcpu)
    }

    /// Resumes the guest after a stop.
    pub fn resume(&self) -> Stop {
        resume(&mut self.vcpu.borrow_mut())
    }

    /// An empty set of the guest's pages.
    pub fn no_pages(&self) -> PageBitmap {
        PageBitmap::new(&self.ram.page_ranges())
    }
}

/// A vCPU in 32-bit mode with all memory mapped identically.
pub fn create_vcpu(vm: &VmFd, number: u64) -> VcpuFd {
    let vcpu = vm.create_vcpu(number).unwrap();
    let mut registers = vcpu.get_sregs().unwrap();
    let flat = kvm_segment {
        base: 0,
        limit: u32::MAX,
        present: 1,
        s: 1,
        db: 1,
        g: 1,
        ..kvm_segment::default()
    };
    registers.cs = kvm_segment { selector: 8, type_: 0xb, ..flat };
    let data = kvm_segment { selector: 16, type_: 3, ..flat };
    (registers.ds, registers.es, registers.ss) = (data, data, data);
    registers.cr0 |= CR0_PE;
    vcpu.set_sregs(&registers).unwrap();
    vcpu
}

/// Prepares a vCPU to write to `count` pages from page `first` on, `step` pages apart, `rounds`
/// times.
pub fn prepare(vcpu: &VcpuFd, first: u64, step: u64, count: u64, rounds: u64) {
    let registers = kvm_regs {
        rip: 0,
        rsi: first * PAGE_SIZE_BYTES,
        rdi: count,
        rdx: step * PAGE_SIZE_BYTES,
        rbp: rounds,
        rflags: RFLAGS_RESERVED,
        ..kvm_regs::default()
    };
    vcpu.set_regs(&registers).unwrap();
}

/// Runs a vCPU until it stops.
pub fn resume(vcpu: &mut VcpuFd) -> Stop {
    match vcpu.run().unwrap() {
        VcpuExit::Hlt => Stop::Done,
        VcpuExit::Unsupported(EXIT_DIRTY_RING_FULL) => Stop::RingFull,
        other => panic!("{other:?}"),
    }
}

/// Pages as numbers.
pub fn numbers(pages: &PageBitmap) -> Vec<u64> {
    pages.ranges().flat_map(|range: GuestRange| range.start.0..range.end().0).collect()
}
