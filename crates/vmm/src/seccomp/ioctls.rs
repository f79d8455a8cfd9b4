//! Requests of ioctl(2), one list for each kind of thread.

use super::ThreadKind;
use crate::cpu::tsc;
use crate::devices::virtio::block::BLKDISCARD;

/// `_IO`, `_IOR`, `_IOW` of KVM (type 0xae; Linux include/uapi/linux/kvm.h).
pub(super) const fn kvm(direction: u64, number: u64, bytes: u64) -> u64 {
    direction << 30 | bytes << 16 | 0xae << 8 | number
}

const READ: u64 = 2;
const WRITE: u64 = 1;
/// Interrupts the guest: each device does it.
const KVM_IRQ_LINE: u64 = kvm(WRITE, 0x61, size_of::<kvm_bindings::kvm_irq_level>() as u64);
const KVM_RUN: u64 = kvm(0, 0x80, 0);
const KVM_KVMCLOCK_CTRL: u64 = kvm(0, 0xad, 0);
const KVM_GET_REGS: u64 = kvm(READ, 0x81, size_of::<kvm_bindings::kvm_regs>() as u64);
const KVM_SET_REGS: u64 = kvm(WRITE, 0x82, size_of::<kvm_bindings::kvm_regs>() as u64);
const KVM_GET_SREGS: u64 = kvm(READ, 0x83, size_of::<kvm_bindings::kvm_sregs>() as u64);
const KVM_SET_SREGS: u64 = kvm(WRITE, 0x84, size_of::<kvm_bindings::kvm_sregs>() as u64);
const KVM_GET_MSRS: u64 = kvm(READ | WRITE, 0x88, 8);
const KVM_GET_MP_STATE: u64 = kvm(READ, 0x98, size_of::<kvm_bindings::kvm_mp_state>() as u64);
const KVM_GET_VCPU_EVENTS: u64 = kvm(READ, 0x9f, size_of::<kvm_bindings::kvm_vcpu_events>() as u64);
const KVM_GET_DEBUGREGS: u64 = kvm(READ, 0xa1, size_of::<kvm_bindings::kvm_debugregs>() as u64);
const KVM_GET_XSAVE: u64 = kvm(READ, 0xa4, size_of::<kvm_bindings::kvm_xsave>() as u64);
const KVM_SET_XSAVE: u64 = kvm(WRITE, 0xa5, size_of::<kvm_bindings::kvm_xsave>() as u64);
const KVM_GET_XCRS: u64 = kvm(READ, 0xa6, size_of::<kvm_bindings::kvm_xcrs>() as u64);
const KVM_GET_IRQCHIP: u64 = kvm(READ | WRITE, 0x62, size_of::<kvm_bindings::kvm_irqchip>() as u64);
const KVM_GET_PIT2: u64 = kvm(READ, 0x9f, size_of::<kvm_bindings::kvm_pit_state2>() as u64);
const KVM_GET_CLOCK: u64 = kvm(READ, 0x7c, size_of::<kvm_bindings::kvm_clock_data>() as u64);
const KVM_SET_MSRS: u64 = kvm(WRITE, 0x89, 8);
const KVM_GET_LAPIC: u64 = kvm(READ, 0x8e, size_of::<kvm_bindings::kvm_lapic_state>() as u64);
const KVM_SET_LAPIC: u64 = kvm(WRITE, 0x8f, size_of::<kvm_bindings::kvm_lapic_state>() as u64);
const KVM_SET_MP_STATE: u64 = kvm(WRITE, 0x99, size_of::<kvm_bindings::kvm_mp_state>() as u64);
const KVM_SET_VCPU_EVENTS: u64 =
    kvm(WRITE, 0xa0, size_of::<kvm_bindings::kvm_vcpu_events>() as u64);
const KVM_SET_DEBUGREGS: u64 = kvm(WRITE, 0xa2, size_of::<kvm_bindings::kvm_debugregs>() as u64);
const KVM_SET_XCRS: u64 = kvm(WRITE, 0xa7, size_of::<kvm_bindings::kvm_xcrs>() as u64);
// Declared as a read although it writes.
const KVM_SET_IRQCHIP: u64 = kvm(READ, 0x63, size_of::<kvm_bindings::kvm_irqchip>() as u64);
const KVM_SET_PIT2: u64 = kvm(WRITE, 0xa0, size_of::<kvm_bindings::kvm_pit_state2>() as u64);
const KVM_SET_CLOCK: u64 = kvm(WRITE, 0x7b, size_of::<kvm_bindings::kvm_clock_data>() as u64);

const KVM_CHECK_EXTENSION: u64 = kvm(0, 0x03, 0);
const KVM_GET_DIRTY_LOG: u64 = kvm(WRITE, 0x42, size_of::<kvm_bindings::kvm_dirty_log>() as u64);
const KVM_SET_USER_MEMORY_REGION: u64 =
    kvm(WRITE, 0x46, size_of::<kvm_bindings::kvm_userspace_memory_region>() as u64);
const KVM_ENABLE_CAP: u64 = kvm(WRITE, 0xa3, size_of::<kvm_bindings::kvm_enable_cap>() as u64);
const KVM_CLEAR_DIRTY_LOG: u64 =
    kvm(READ | WRITE, 0xc0, size_of::<kvm_bindings::kvm_clear_dirty_log>() as u64);

/// Linux's `PAGEMAP_SCAN` (6.7), used to count resident pages: `_IOWR('f', 16, struct
/// pm_scan_arg)`.
const PAGEMAP_SCAN: u64 = 3 << 30 | 96 << 16 | (b'f' as u64) << 8 | 16;

/// `_IOR` and `_IOWR` of userfaultfd (type 0xaa; Linux include/uapi/linux/userfaultfd.h).
const fn uffd(direction: u64, number: u64, bytes: u64) -> u64 {
    direction << 30 | bytes << 16 | 0xaa << 8 | number
}

const USERFAULTFD_IOC_NEW: u64 = uffd(0, 0x00, 0);
const UFFDIO_API: u64 = uffd(READ | WRITE, 0x3f, 24);
const UFFDIO_REGISTER: u64 = uffd(READ | WRITE, 0x00, 32);
const UFFDIO_UNREGISTER: u64 = uffd(READ, 0x01, 16);
const UFFDIO_WAKE: u64 = uffd(READ, 0x02, 16);
const UFFDIO_COPY: u64 = uffd(READ | WRITE, 0x03, 40);
const UFFDIO_MOVE: u64 = uffd(READ | WRITE, 0x05, 40);
const UFFDIO_WRITEPROTECT: u64 = uffd(READ | WRITE, 0x06, 24);

const KVM_GET_API_VERSION: u64 = kvm(0, 0x00, 0);
const KVM_CREATE_VM: u64 = kvm(0, 0x01, 0);
const KVM_GET_MSR_INDEX_LIST: u64 = kvm(READ | WRITE, 0x02, 4);
const KVM_GET_VCPU_MMAP_SIZE: u64 = kvm(0, 0x04, 0);
const KVM_GET_SUPPORTED_CPUID: u64 = kvm(READ | WRITE, 0x05, 8);
const KVM_CREATE_VCPU: u64 = kvm(0, 0x41, 0);
const KVM_SET_TSS_ADDR: u64 = kvm(0, 0x47, 0);
const KVM_SET_IDENTITY_MAP_ADDR: u64 = kvm(WRITE, 0x48, 8);
const KVM_CREATE_IRQCHIP: u64 = kvm(0, 0x60, 0);
const KVM_IRQFD: u64 = kvm(WRITE, 0x76, size_of::<kvm_bindings::kvm_irqfd>() as u64);
const KVM_CREATE_PIT2: u64 = kvm(WRITE, 0x77, size_of::<kvm_bindings::kvm_pit_config>() as u64);
const KVM_IOEVENTFD: u64 = kvm(WRITE, 0x79, size_of::<kvm_bindings::kvm_ioeventfd>() as u64);
const KVM_SET_FPU: u64 = kvm(WRITE, 0x8d, size_of::<kvm_bindings::kvm_fpu>() as u64);
const KVM_SET_CPUID2: u64 = kvm(WRITE, 0x90, 8);
const KVM_SET_TSC_KHZ: u64 = kvm(0, 0xa2, 0);
const KVM_GET_TSC_KHZ: u64 = kvm(0, 0xa3, 0);

/// Of a process that is forked from a monitor: it builds a machine. Those of the machine's threads
/// are in their own lists.
const BUILD: &[u64] = &[
    KVM_GET_API_VERSION,
    KVM_CREATE_VM,
    KVM_GET_MSR_INDEX_LIST,
    KVM_GET_VCPU_MMAP_SIZE,
    KVM_GET_SUPPORTED_CPUID,
    KVM_CREATE_VCPU,
    KVM_SET_TSS_ADDR,
    KVM_SET_IDENTITY_MAP_ADDR,
    KVM_CREATE_IRQCHIP,
    KVM_IRQFD,
    KVM_CREATE_PIT2,
    KVM_IOEVENTFD,
    KVM_SET_FPU,
    KVM_SET_CPUID2,
    KVM_SET_TSC_KHZ,
    KVM_GET_TSC_KHZ,
    // With the device that its client has opened.
    USERFAULTFD_IOC_NEW,
    UFFDIO_API,
    crate::devices::virtio::net::TUNGETIFF,
    crate::devices::virtio::net::TUNSETVNETHDRSZ,
];

/// The requests that threads of `kind` may make.
pub(super) fn ioctls(kind: ThreadKind) -> Vec<u64> {
    const MACHINE: [ThreadKind; 9] = [
        ThreadKind::Main,
        ThreadKind::Api,
        ThreadKind::Vcpu,
        ThreadKind::Device,
        ThreadKind::Net,
        ThreadKind::Vsock,
        ThreadKind::Disk,
        ThreadKind::Migrate,
        ThreadKind::Merge,
    ];
    if kind != ThreadKind::Fork {
        return of_kind(kind).to_vec();
    }
    let of_threads = MACHINE.into_iter().flat_map(|kind| of_kind(kind).iter().copied());
    let all: std::collections::BTreeSet<u64> = of_threads.chain(BUILD.iter().copied()).collect();
    all.into_iter().collect()
}

fn of_kind(kind: ThreadKind) -> &'static [u64] {
    match kind {
        ThreadKind::Vcpu => &[
            KVM_IRQ_LINE,
            KVM_RUN,
            KVM_KVMCLOCK_CTRL,
            KVM_GET_REGS,
            KVM_SET_REGS,
            KVM_GET_SREGS,
            KVM_SET_SREGS,
            KVM_GET_MSRS,
            KVM_SET_MSRS,
            KVM_GET_XSAVE,
            KVM_SET_XSAVE,
            KVM_GET_LAPIC,
            KVM_SET_LAPIC,
            KVM_GET_MP_STATE,
            KVM_SET_MP_STATE,
            KVM_GET_VCPU_EVENTS,
            KVM_SET_VCPU_EVENTS,
            KVM_GET_DEBUGREGS,
            KVM_SET_DEBUGREGS,
            KVM_GET_XCRS,
            KVM_SET_XCRS,
            tsc::KVM_SET_DEVICE_ATTR,
            tsc::KVM_GET_DEVICE_ATTR,
        ],
        ThreadKind::Main => &[
            KVM_IRQ_LINE,
            KVM_SET_IRQCHIP,
            KVM_SET_PIT2,
            KVM_GET_CLOCK,
            KVM_SET_CLOCK,
            libc::TCGETS,
            libc::TCSETS,
            libc::TCSETSW,
            libc::TCSETSF,
            // With speeds: the variant that rustix uses.
            libc::TCGETS2,
            libc::TCSETS2,
            PAGEMAP_SCAN,
        ],
        ThreadKind::Migrate => &[
            PAGEMAP_SCAN,
            KVM_IRQ_LINE,
            KVM_GET_IRQCHIP,
            KVM_SET_IRQCHIP,
            KVM_GET_PIT2,
            KVM_SET_PIT2,
            KVM_GET_CLOCK,
            KVM_SET_CLOCK,
            KVM_SET_USER_MEMORY_REGION,
            KVM_GET_DIRTY_LOG,
            KVM_CLEAR_DIRTY_LOG,
            KVM_ENABLE_CAP,
            KVM_CHECK_EXTENSION,
            // Guest memory is protected while it is written to a snapshot.
            UFFDIO_REGISTER,
            UFFDIO_UNREGISTER,
            UFFDIO_WAKE,
            UFFDIO_WRITEPROTECT,
        ],
        ThreadKind::Api => {
            &[libc::FIONBIO, PAGEMAP_SCAN, KVM_IRQ_LINE, KVM_GET_CLOCK, KVM_SET_CLOCK]
        }
        ThreadKind::Merge => &[
            PAGEMAP_SCAN,
            UFFDIO_REGISTER,
            UFFDIO_UNREGISTER,
            UFFDIO_WAKE,
            UFFDIO_COPY,
            UFFDIO_MOVE,
            UFFDIO_WRITEPROTECT,
        ],
        ThreadKind::Disk => &[KVM_IRQ_LINE, BLKDISCARD],
        ThreadKind::Net => &[KVM_IRQ_LINE, crate::devices::virtio::net::TUNSETOFFLOAD],
        ThreadKind::Device | ThreadKind::Vsock => &[KVM_IRQ_LINE],
        // Never issued: the list must not be empty, or every request would pass.
        ThreadKind::Console
        | ThreadKind::ReadAhead
        | ThreadKind::Companion
        | ThreadKind::Broker
        | ThreadKind::Fork => &[libc::FIONBIO],
    }
}
