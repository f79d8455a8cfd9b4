//! Names of processor features as in `/proc/cpuinfo` (Linux arch/x86/include/asm/cpufeatures.h),
//! and for KVM's own leaf as in Documentation/virt/kvm/x86/cpuid.rst.

/// Leaf, subleaf, index of the register (EAX, EBX, ECX, EDX), and the names of its bits from 0 on,
/// separated by blanks; `-` for a bit without a name.
const NAMES: &[(u32, u32, usize, &str)] = &[
    (
        0x1,
        0,
        2,
        "sse3 pclmulqdq dtes64 monitor ds_cpl vmx smx est tm2 ssse3 cid sdbg fma cx16 xtpr pdcm \
         - pcid dca sse4_1 sse4_2 x2apic movbe popcnt tsc_deadline_timer aes xsave osxsave avx \
         f16c rdrand hypervisor",
    ),
    (
        0x1,
        0,
        3,
        "fpu vme de pse tsc msr pae mce cx8 apic - sep mtrr pge mca cmov pat pse36 pn clflush - \
         dts acpi mmx fxsr sse sse2 ss ht tm ia64 pbe",
    ),
    (
        0x7,
        0,
        1,
        "fsgsbase tsc_adjust sgx bmi1 hle avx2 fdp_excptn_only smep bmi2 erms invpcid rtm cqm \
         zero_fcs_fds mpx rdt_a avx512f avx512dq rdseed adx smap avx512ifma - clflushopt clwb \
         intel_pt avx512pf avx512er avx512cd sha_ni avx512bw avx512vl",
    ),
    (
        0x7,
        0,
        2,
        "- avx512vbmi umip pku ospke waitpkg avx512_vbmi2 shstk gfni vaes vpclmulqdq \
         avx512_vnni avx512_bitalg tme avx512_vpopcntdq - la57 - - - - - rdpid - \
         bus_lock_detect cldemote - movdiri movdir64b enqcmd sgx_lc pks",
    ),
    (
        0x7,
        0,
        3,
        "- - avx512_4vnniw avx512_4fmaps fsrm - - - avx512_vp2intersect srbds_ctrl md_clear \
         rtm_always_abort - tsx_force_abort serialize hybrid_cpu tsxldtrk - pconfig arch_lbr \
         ibt - amx_bf16 avx512_fp16 amx_tile amx_int8 spec_ctrl intel_stibp flush_l1d \
         arch_capabilities core_capabilities spec_ctrl_ssbd",
    ),
    (
        0x7,
        1,
        0,
        "- - - - avx_vnni avx512_bf16 - cmpccxadd - - fzrm fsrs fsrc - - - - fred lkgs - - \
         amx_fp16 hreset avx_ifma - - lam",
    ),
    (0xd, 1, 0, "xsaveopt xsavec xgetbv1 xsaves xfd"),
    (
        0x4000_0001,
        0,
        0,
        "kvmclock kvm_nop_io_delay kvm_mmu_op kvmclock2 kvm_async_pf kvm_steal_time kvm_pv_eoi \
         kvm_pv_unhalt - kvm_pv_tlb_flush kvm_async_pf_vmexit kvm_pv_send_ipi kvm_poll_control \
         kvm_pv_sched_yield kvm_async_pf_int kvm_msi_ext_dest_id kvm_hc_map_gpa_range \
         kvm_migration_control - - - - - - kvmclock_stable",
    ),
    (
        0x8000_0001,
        0,
        2,
        "lahf_lm cmp_legacy svm extapic cr8_legacy abm sse4a misalignsse 3dnowprefetch osvw ibs \
         xop skinit wdt - lwp fma4 tce - nodeid_msr - tbm topoext perfctr_core perfctr_nb - \
         bpext ptsc perfctr_llc mwaitx",
    ),
    (
        0x8000_0001,
        0,
        3,
        "- - - - - - - - - - - syscall - - - - - - - mp nx - mmxext - - fxsr_opt pdpe1gb rdtscp \
         - lm 3dnowext 3dnow",
    ),
    (
        0x8000_0008,
        0,
        1,
        "clzero irperf xsaveerptr - rdpru - - - - wbnoinvd - - ibpb - ibrs stibp - \
         stibp_always_on - - - - - amd_ppin amd_ssbd virt_ssbd ssb_no cppc psfd btc_no",
    ),
];

/// Names of those of `bits` that have one.
pub(super) fn names(function: u32, index: u32, register: usize, bits: u32) -> Vec<&'static str> {
    let Some((.., all)) = NAMES
        .iter()
        .find(|(leaf, subleaf, place, _)| (*leaf, *subleaf, *place) == (function, index, register))
    else {
        return Vec::new();
    };
    all.split_ascii_whitespace()
        .enumerate()
        .filter(|(bit, name)| bits >> bit & 1 != 0 && *name != "-")
        .map(|(_, name)| name)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_register_has_more_than_32_bits() {
        for (function, index, register, all) in NAMES {
            let count = all.split_ascii_whitespace().count();
            assert!(count <= 32, "{function:#x}.{index} {register}: {count}");
        }
    }

    #[test]
    fn well_known_bits_have_their_names() {
        for (function, index, register, bit, name) in [
            (0x1, 0, 2, 28, "avx"),
            (0x1, 0, 2, 31, "hypervisor"),
            (0x1, 0, 3, 26, "sse2"),
            (0x7, 0, 1, 5, "avx2"),
            (0x7, 0, 1, 16, "avx512f"),
            (0x7, 0, 1, 31, "avx512vl"),
            (0x7, 0, 2, 16, "la57"),
            (0x7, 0, 2, 22, "rdpid"),
            (0x7, 0, 3, 29, "arch_capabilities"),
            (0x7, 0, 3, 31, "spec_ctrl_ssbd"),
            (0x7, 1, 0, 26, "lam"),
            (0x4000_0001, 0, 0, 24, "kvmclock_stable"),
            (0x8000_0001, 0, 2, 2, "svm"),
            (0x8000_0001, 0, 3, 29, "lm"),
            (0x8000_0008, 0, 1, 24, "amd_ssbd"),
        ] {
            assert_eq!(
                names(function, index, register, 1 << bit),
                [name],
                "{function:#x}.{index} bit {bit}"
            );
        }
        assert_eq!(names(0x7, 0, 1, 0b10_1000), ["bmi1", "avx2"]);
        assert_eq!(names(0x24, 0, 1, u32::MAX), [""; 0]);
    }
}
