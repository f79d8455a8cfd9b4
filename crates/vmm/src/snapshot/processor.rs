//! The processor that a guest was given, and whether another host can provide it.

use kvm_bindings::{CpuId, kvm_cpuid_entry2};
use serde::{Deserialize, Serialize};

use super::{SnapshotError, features};

/// One CPUID leaf.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpuidLeaf {
    /// EAX of the query.
    pub function: u32,
    /// ECX of the query.
    pub index: u32,
    /// `KVM_CPUID_FLAG_*`.
    pub flags: u32,
    /// The result: EAX, EBX, ECX, EDX.
    pub registers: [u32; 4],
}

/// The processor as vCPU 0 sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Processor {
    /// The leaves.
    pub cpuid: Vec<CpuidLeaf>,
}

/// Names of the registers, in the order of [`CpuidLeaf::registers`].
const NAMES: [&str; 4] = ["EAX", "EBX", "ECX", "EDX"];
const EAX: usize = 0;
const EBX: usize = 1;
const ECX: usize = 2;
const EDX: usize = 3;

/// Registers whose bits are features: leaf, subleaf, registers (Intel SDM volume 2, CPUID; AMD APM
/// volume 3, appendix E; Linux Documentation/virt/kvm/x86/cpuid.rst).
const FEATURES: &[(u32, u32, &[usize])] = &[
    (0x1, 0, &[ECX, EDX]),
    (0x7, 0, &[EBX, ECX, EDX]),
    (0x7, 1, &[EAX, EBX, ECX, EDX]),
    (0x7, 2, &[EDX]),
    // State components, whose offsets the guest's kernel has read.
    (0xd, 0, &[EAX, EDX]),
    (0xd, 1, &[EAX, ECX, EDX]),
    (0x24, 0, &[EBX]),
    (0x4000_0001, 0, &[EAX]),
    (0x8000_0001, 0, &[ECX, EDX]),
    (0x8000_0007, 0, &[EDX]),
    (0x8000_0008, 0, &[EBX]),
    (0x8000_0021, 0, &[EAX]),
];

impl Processor {
    /// Records `cpuid`.
    pub fn of(cpuid: &CpuId) -> Self {
        let leaf = |entry: &kvm_cpuid_entry2| CpuidLeaf {
            function: entry.function,
            index: entry.index,
            flags: entry.flags,
            registers: [entry.eax, entry.ebx, entry.ecx, entry.edx],
        };
        Self { cpuid: cpuid.as_slice().iter().map(leaf).collect() }
    }

    /// Converts to KVM's form; `None` if there are more leaves than KVM supports.
    pub fn to_cpuid(&self) -> Option<CpuId> {
        let entry = |leaf: &CpuidLeaf| {
            let [eax, ebx, ecx, edx] = leaf.registers;
            let (function, index, flags) = (leaf.function, leaf.index, leaf.flags);
            kvm_cpuid_entry2 { function, index, flags, eax, ebx, ecx, edx, ..Default::default() }
        };
        if self.cpuid.len() > kvm_bindings::KVM_MAX_CPUID_ENTRIES {
            return None;
        }
        CpuId::from_entries(&self.cpuid.iter().map(entry).collect::<Vec<_>>()).ok()
    }

    /// The vendor's name, for example `AuthenticAMD`; always printable.
    pub fn vendor(&self) -> String {
        let [_, ebx, ecx, edx] = self.registers(0, 0);
        let bytes = [ebx, edx, ecx].map(u32::to_le_bytes).concat();
        String::from_utf8_lossy(&bytes)
            .chars()
            .map(|c| if c.is_ascii_graphic() { c } else { '?' })
            .collect()
    }

    fn registers(&self, function: u32, index: u32) -> [u32; 4] {
        let found = self.cpuid.iter().find(|leaf| leaf.function == function && leaf.index == index);
        found.map_or([0; 4], |leaf| leaf.registers)
    }

    /// Checks whether a guest started on this processor can continue on `host`.
    ///
    /// # Errors
    /// [`SnapshotError::Vendor`], [`SnapshotError::Processor`].
    pub fn check(&self, host: &Self) -> Result<(), SnapshotError> {
        if self.vendor() != host.vendor() {
            return Err(SnapshotError::Vendor { saved: self.vendor(), host: host.vendor() });
        }
        let missing = self.missing_in(host);
        if missing.is_empty() {
            return Ok(());
        }
        Err(SnapshotError::Processor { missing: missing.join(", ") })
    }

    /// Width of physical addresses (leaf 0x80000008 EAX 7:0).
    fn address_bits(&self) -> u32 {
        self.registers(0x8000_0008, 0)[EAX] & 0xff
    }

    /// Features of this processor that `other` lacks, for example `avx2 (leaf 0x7.0 EBX bits
    /// 0x20)`.
    fn missing_in(&self, other: &Self) -> Vec<String> {
        let mut missing = Vec::new();
        for &(function, index, registers) in FEATURES {
            let (own, others) = (self.registers(function, index), other.registers(function, index));
            for &register in registers {
                let bits = own[register] & !others[register];
                if bits != 0 {
                    let place =
                        format!("leaf {function:#x}.{index} {} bits {bits:#x}", NAMES[register]);
                    let names = features::names(function, index, register, bits);
                    missing.push(if names.is_empty() {
                        place
                    } else {
                        format!("{} ({place})", names.join(" "))
                    });
                }
            }
        }
        let (own, others) = (self.address_bits(), other.address_bits());
        if own > others {
            missing.push(format!("physical addresses of {own} bits instead of {others}"));
        }
        missing
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn processor(leaves: &[(u32, [u32; 4])]) -> Processor {
        let leaf = |&(function, registers): &(u32, [u32; 4])| CpuidLeaf {
            function,
            index: 0,
            flags: 0,
            registers,
        };
        Processor { cpuid: leaves.iter().map(leaf).collect() }
    }

    #[test]
    fn the_vendor_is_in_leaf_zero() {
        let name = |text: &[u8; 4]| u32::from_le_bytes(*text);
        let amd = processor(&[(0, [16, name(b"Auth"), name(b"cAMD"), name(b"enti")])]);
        assert_eq!(amd.vendor(), "AuthenticAMD");
        assert_eq!(processor(&[(0, [0, 7, 0, 0])]).vendor(), "????????????");
    }

    #[test]
    fn another_vendor_and_missing_features_are_refused() {
        let maker = |text: &[u8; 4]| (0, [1, u32::from_le_bytes(*text), 0, 0]);
        let amd = processor(&[maker(b"Auth"), (1, [0, 0, 0b11, 0])]);
        let old = processor(&[maker(b"Auth"), (1, [0, 0, 0b01, 0])]);
        let intel = processor(&[maker(b"Genu"), (1, [0, 0, 0b11, 0])]);
        assert!(amd.check(&amd).is_ok());
        assert!(old.check(&amd).is_ok());
        let error = amd.check(&intel).unwrap_err();
        assert!(matches!(error, SnapshotError::Vendor { .. }), "{error}");
        let error = amd.check(&old).unwrap_err();
        assert!(error.to_string().contains("leaf 0x1.0 ECX bits 0x2"), "{error}");
    }

    #[test]
    fn only_feature_bits_are_compared() {
        let old = processor(&[(1, [1, 2, 0b1011, 0b1]), (7, [0, 0b100, 0, 0])]);
        let new = processor(&[(1, [9, 9, 0b1111, 0b1]), (7, [0, 0b110, 0, 0])]);
        assert_eq!(old.missing_in(&new), Vec::<String>::new());
        let missing = ["dtes64 (leaf 0x1.0 ECX bits 0x4)", "tsc_adjust (leaf 0x7.0 EBX bits 0x2)"];
        assert_eq!(new.missing_in(&old), missing);
        assert_eq!(old.missing_in(&processor(&[])).len(), 3);
    }

    #[test]
    fn cpuid_round_trips() {
        let saved = processor(&[(1, [1, 2, 3, 4]), (0x8000_0001, [5, 6, 7, 8])]);
        assert_eq!(Processor::of(&saved.to_cpuid().unwrap()), saved);
        let many =
            Processor { cpuid: vec![saved.cpuid[0]; kvm_bindings::KVM_MAX_CPUID_ENTRIES + 1] };
        assert!(many.to_cpuid().is_none());
    }
}
