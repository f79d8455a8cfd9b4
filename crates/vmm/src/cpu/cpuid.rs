//! CPUID of the vCPUs: the host's as far as KVM can virtualize it, with the guest's own topology.

use kvm_bindings::{CpuId, KVM_CPUID_FLAG_SIGNIFCANT_INDEX, kvm_cpuid_entry2};

const LEAF_FEATURES: u32 = 0x1;
const LEAF_CACHE_INTEL: u32 = 0x4;
const LEAF_EXTENDED_FEATURES: u32 = 0x7;
const LEAF_PERFORMANCE: u32 = 0xa;
const LEAF_TOPOLOGY: u32 = 0xb;
const LEAF_TOPOLOGY_V2: u32 = 0x1f;
const LEAF_AMD_FEATURES: u32 = 0x8000_0001;
const LEAF_AMD_CAPACITY: u32 = 0x8000_0008;
const LEAF_AMD_CACHE: u32 = 0x8000_001d;
const LEAF_AMD_TOPOLOGY: u32 = 0x8000_001e;
const LEAF_AMD_PERFORMANCE: u32 = 0x8000_0022;

/// Leaf 1 ECX: the local APIC timer can be armed with a TSC deadline.
const TSC_DEADLINE: u32 = 1 << 24;
/// Leaf 1 ECX: x2APIC mode.
const X2APIC: u32 = 1 << 21;
/// Leaf 1 ECX: the processor runs under a hypervisor.
const HYPERVISOR: u32 = 1 << 31;
/// Leaf 1 ECX: VMX. Nested guests are out of scope.
const VMX: u32 = 1 << 5;
/// Leaf 7 ECX: shadow stacks. Their pointer is in no register that can be saved by number.
const SHADOW_STACKS: u32 = 1 << 7;
/// Leaf 7 EDX: indirect branch tracking, the other half of the same extension.
const BRANCH_TRACKING: u32 = 1 << 20;
/// Leaf 1 EDX: more than one logical processor in the package.
const HTT: u32 = 1 << 28;
/// Leaf 0x80000001 ECX: SVM.
const SVM: u32 = 1 << 2;
/// Leaf 0x80000001 ECX: performance counter extensions (core, northbridge, last-level cache).
const AMD_PERFORMANCE: u32 = (1 << 23) | (1 << 24) | (1 << 28);
/// Leaf 0x80000001 ECX: topology extensions.
const AMD_TOPOLOGY: u32 = 1 << 22;

/// Whether KVM emulates the TSC deadline timer in its local APIC; KVM leaves that out of its CPUID
/// list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeadlineTimer {
    /// KVM has `KVM_CAP_TSC_DEADLINE_TIMER`.
    Available,
    /// KVM lacks it.
    Missing,
}

/// CPUID for guests out of what KVM supports, without the topology of the vCPU.
///
/// The KVM leaves at 0x40000000 (kvmclock among them) pass as KVM offers them. Performance counters
/// and nested virtualization are hidden because they cost exits or memory in guests that never use
/// them; shadow stacks, because a snapshot could not hold their state.
pub fn offered(supported: &CpuId, deadline: DeadlineTimer) -> CpuId {
    let mut cpuid = supported.clone();
    for entry in cpuid.as_mut_slice() {
        match entry.function {
            LEAF_FEATURES => {
                entry.ecx = (entry.ecx | X2APIC | HYPERVISOR) & !VMX;
                if deadline == DeadlineTimer::Available {
                    entry.ecx |= TSC_DEADLINE;
                }
            }
            LEAF_EXTENDED_FEATURES if entry.index == 0 => {
                entry.ecx &= !SHADOW_STACKS;
                entry.edx &= !BRANCH_TRACKING;
            }
            LEAF_PERFORMANCE | LEAF_AMD_PERFORMANCE => clear(entry),
            LEAF_AMD_FEATURES => entry.ecx &= !(SVM | AMD_PERFORMANCE | AMD_TOPOLOGY),
            _ => {}
        }
    }
    cpuid
}

/// CPUID for vCPU `index` of `count`, derived from [`offered`] or from another vCPU's: every vCPU
/// is one core of one package, and its APIC id is its index.
pub fn for_vcpu(offered: &CpuId, index: u8, count: u8) -> CpuId {
    let mut cpuid = offered.clone();
    for entry in cpuid.as_mut_slice() {
        match entry.function {
            LEAF_FEATURES => {
                entry.ebx =
                    (entry.ebx & 0x0000_ffff) | (u32::from(count) << 16) | (u32::from(index) << 24);
                entry.edx = if count > 1 { entry.edx | HTT } else { entry.edx & !HTT };
            }
            LEAF_CACHE_INTEL | LEAF_AMD_CACHE => set_cache_sharing(entry, count),
            LEAF_TOPOLOGY | LEAF_TOPOLOGY_V2 => set_topology(entry, index, count),
            LEAF_AMD_CAPACITY => {
                // ECX 7:0 is the number of threads in the package minus one, 15:12 the width of its
                // APIC ids.
                entry.ecx = (u32::from(count) - 1) | (apic_id_bits(count) << 12);
            }
            LEAF_AMD_TOPOLOGY => {
                entry.eax = u32::from(index);
                entry.ebx = u32::from(index);
                entry.ecx = 0;
            }
            _ => {}
        }
    }
    cpuid
}

fn clear(entry: &mut kvm_cpuid_entry2) {
    (entry.eax, entry.ebx, entry.ecx, entry.edx) = (0, 0, 0, 0);
}

/// Number of bits of an APIC id that numbers `count` vCPUs.
fn apic_id_bits(count: u8) -> u32 {
    u32::from(count).next_power_of_two().trailing_zeros()
}

/// Levels 1 and 2 belong to one core, level 3 to the package.
fn set_cache_sharing(entry: &mut kvm_cpuid_entry2, count: u8) {
    let kind = entry.eax & 0x1f;
    let level = (entry.eax >> 5) & 0x7;
    if kind == 0 {
        return;
    }
    let sharing = if level >= 3 { (1 << apic_id_bits(count)) - 1 } else { 0 };
    entry.eax = (entry.eax & !(0xfff << 14)) | (sharing << 14);
    if entry.function == LEAF_CACHE_INTEL {
        let cores = (1 << apic_id_bits(count)) - 1;
        entry.eax = (entry.eax & !(0x3f << 26)) | ((cores & 0x3f) << 26);
    }
}

/// Extended topology enumeration: subleaf 0 is the thread level, subleaf 1 the core level.
fn set_topology(entry: &mut kvm_cpuid_entry2, index: u8, count: u8) {
    const LEVEL_THREAD: u32 = 1;
    const LEVEL_CORE: u32 = 2;
    let subleaf = entry.index;
    entry.flags |= KVM_CPUID_FLAG_SIGNIFCANT_INDEX;
    (entry.eax, entry.ebx, entry.ecx) = match subleaf {
        0 => (0, 1, LEVEL_THREAD << 8),
        1 => (apic_id_bits(count), u32::from(count), 1 | (LEVEL_CORE << 8)),
        _ => (0, 0, subleaf & 0xff),
    };
    entry.edx = u32::from(index);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn supported() -> CpuId {
        let entry = |function, index, eax, ecx| kvm_cpuid_entry2 {
            function,
            index,
            eax,
            ecx,
            edx: 0xffff_ffff,
            ebx: 0xffff_ffff,
            ..Default::default()
        };
        CpuId::from_entries(&[
            entry(1, 0, 0, VMX),
            entry(4, 0, 0x121, 0),
            entry(4, 3, 0x163, 0),
            entry(0xa, 0, 0x0730_0402, 0),
            entry(0xb, 0, 1, 0),
            entry(0xb, 1, 5, 0),
            entry(LEAF_AMD_FEATURES, 0, 0, SVM | 1),
            entry(0x4000_0001, 0, 0x0100_7efb, 0),
        ])
        .unwrap()
    }

    fn leaf(cpuid: &CpuId, function: u32, index: u32) -> kvm_cpuid_entry2 {
        *cpuid.as_slice().iter().find(|e| e.function == function && e.index == index).unwrap()
    }

    #[test]
    fn each_vcpu_has_its_own_apic_id() {
        for index in 0..4 {
            let cpuid = for_vcpu(&offered(&supported(), DeadlineTimer::Available), index, 4);
            let features = leaf(&cpuid, 1, 0);
            assert_eq!(features.ebx >> 24, u32::from(index));
            assert_eq!((features.ebx >> 16) & 0xff, 4);
            assert_eq!(leaf(&cpuid, 0xb, 1).edx, u32::from(index));
            assert_eq!(leaf(&cpuid, 0xb, 1).eax, 2);
            assert_eq!(leaf(&cpuid, 0xb, 1).ebx, 4);
        }
    }

    #[test]
    fn nested_virtualization_and_counters_are_hidden_and_kvm_leaves_pass() {
        let cpuid = for_vcpu(&offered(&supported(), DeadlineTimer::Missing), 0, 1);
        let features = leaf(&cpuid, 1, 0);
        assert_eq!(features.ecx & VMX, 0);
        assert_eq!(features.ecx & (HYPERVISOR | X2APIC), HYPERVISOR | X2APIC);
        assert_eq!(features.ecx & TSC_DEADLINE, 0);
        assert_eq!(features.edx & HTT, 0);
        assert_eq!(leaf(&cpuid, LEAF_AMD_FEATURES, 0).ecx, 1);
        assert_eq!(leaf(&cpuid, 0xa, 0).eax, 0);
        assert_eq!(leaf(&cpuid, 0x4000_0001, 0).eax, 0x0100_7efb);
    }

    #[test]
    fn cpuid_of_any_vcpu_yields_that_of_the_others() {
        let offered = offered(&supported(), DeadlineTimer::Available);
        let first = for_vcpu(&offered, 0, 4);
        for index in 0..4 {
            assert_eq!(
                for_vcpu(&first, index, 4).as_slice(),
                for_vcpu(&offered, index, 4).as_slice()
            );
        }
    }

    #[test]
    fn caches_are_shared_from_level_three_on() {
        let cpuid = for_vcpu(&offered(&supported(), DeadlineTimer::Available), 0, 4);
        assert_eq!((leaf(&cpuid, 4, 0).eax >> 14) & 0xfff, 0);
        assert_eq!((leaf(&cpuid, 4, 3).eax >> 14) & 0xfff, 3);
    }
}
