//! Memory that several machines have in common, which the kernel counts for each of them.

use std::fs;
use std::path::Path;

use ebb_host_policy::Machine;
use ebb_program::of_meminfo;

/// Bytes of a page.
const PAGE_BYTES: u64 = 4096;

/// What processes of the host have in common.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Common {
    /// Shared memory, each page counted once (`Shmem`, proc_meminfo(5)): in it are the stable pages
    /// of merging by monitors.
    pub shared_bytes: u64,
    /// Anonymous pages that KSM has saved (`pages_sharing`,
    /// Documentation/admin-guide/mm/ksm.rst).
    pub saved_bytes: u64,
}

impl Common {
    /// Of this host, from `/proc` and `/sys`; what cannot be read is `u64::MAX` and 0, with which
    /// nothing is divided.
    pub fn read() -> Self {
        let text = |path: &str| fs::read_to_string(Path::new(path)).unwrap_or_default();
        let saved: u64 = text("/sys/kernel/mm/ksm/pages_sharing").trim().parse().unwrap_or(0);
        Self {
            shared_bytes: of_meminfo(&text("/proc/meminfo"), "Shmem").unwrap_or(u64::MAX),
            saved_bytes: saved.saturating_mul(PAGE_BYTES),
        }
    }

    /// Divides it among the machines that have it, in proportion to what the kernel counts for
    /// each: afterwards no page of the host is in two machines. Each machine comes with the part of
    /// its resident memory that is shared (`RssShmem`, proc_pid_status(5)).
    ///
    /// Which machines' pages KSM has saved is not known without rights on their processes; their
    /// sum is right.
    pub fn divide(self, machines: Vec<(Machine, u64)>) -> Vec<Machine> {
        let sum = |of: &dyn Fn(&(Machine, u64)) -> u64| {
            machines.iter().map(of).fold(0, u64::saturating_add)
        };
        let own = |machine: &Machine, shared: u64| {
            machine.resident_bytes.unwrap_or(0).saturating_sub(shared)
        };
        let all_shared = sum(&|(_, shared)| *shared);
        let all_own = sum(&|(machine, shared)| own(machine, *shared));
        let left = all_own.saturating_sub(self.saved_bytes);
        let divided = machines.into_iter().map(|(mut machine, shared)| {
            let own = own(&machine, shared);
            machine.resident_bytes = machine.resident_bytes.map(|_| {
                part(own, left, all_own) + part(shared, self.shared_bytes, all_shared).min(shared)
            });
            machine
        });
        divided.collect()
    }
}

/// `bytes` times `part / all`, where `all` is at least `bytes`.
fn part(bytes: u64, part: u64, all: u64) -> u64 {
    if all == 0 {
        return 0;
    }
    u64::try_from(u128::from(bytes) * u128::from(part) / u128::from(all)).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use ebb_host_policy::{GIB, MIB};
    use proptest::prelude::*;

    use super::*;

    fn machine(resident_bytes: u64) -> Machine {
        Machine {
            name: String::new(),
            size_bytes: 4 * GIB,
            resident_bytes: Some(resident_bytes),
            swapped_bytes: Some(0),
            processor_ms: Some(0),
            is_paused: false,
            balloon: None,
            statistics: None,
            means: ebb_host_policy::Means::default(),
        }
    }

    fn divided(common: Common, machines: &[(u64, u64)]) -> Vec<u64> {
        let machines =
            machines.iter().map(|(own, shared)| (machine(own + shared), *shared)).collect();
        let all = common.divide(machines);
        all.into_iter().map(|machine| machine.resident_bytes.unwrap()).collect()
    }

    #[test]
    fn pages_merged_by_monitors_are_counted_once() {
        let common = Common { shared_bytes: 30 * MIB, saved_bytes: 0 };
        let machines = [(100 * MIB, 30 * MIB), (100 * MIB, 30 * MIB), (50 * MIB, 0)];
        assert_eq!(divided(common, &machines), [115 * MIB, 115 * MIB, 50 * MIB]);
    }

    #[test]
    fn shared_memory_of_one_machine_stays_its_own() {
        // The host has more of it than the machines.
        let common = Common { shared_bytes: 900 * MIB, saved_bytes: 0 };
        assert_eq!(divided(common, &[(MIB, 512 * MIB), (MIB, 0)]), [513 * MIB, MIB]);
        let unknown = Common { shared_bytes: u64::MAX, saved_bytes: 0 };
        assert_eq!(divided(unknown, &[(MIB, 512 * MIB)]), [513 * MIB]);
    }

    #[test]
    fn what_ksm_has_saved_is_in_no_machine() {
        let common = Common { shared_bytes: 0, saved_bytes: 60 * MIB };
        assert_eq!(divided(common, &[(100 * MIB, 0), (200 * MIB, 0)]), [80 * MIB, 160 * MIB]);
        // More than the machines have: others use KSM, too.
        let common = Common { shared_bytes: 0, saved_bytes: GIB };
        assert_eq!(divided(common, &[(100 * MIB, 0)]), [0]);
        assert_eq!(divided(common, &[]), [0; 0]);
    }

    #[test]
    fn this_host_has_shared_memory() {
        assert!(Common::read().shared_bytes < u64::MAX);
    }

    proptest! {
        #[test]
        fn no_machine_grows_and_the_sum_is_what_the_host_has(
            machines in prop::collection::vec((0..1_u64 << 40, 0..1_u64 << 40), 1..8),
            shared_bytes in 0..1_u64 << 42,
            saved_bytes in 0..1_u64 << 42,
        ) {
            let after = divided(Common { shared_bytes, saved_bytes }, &machines);
            for (after, (own, shared)) in after.iter().zip(&machines) {
                prop_assert!(*after <= own + shared);
            }
            let sum: u64 = after.iter().sum();
            let own: u64 = machines.iter().map(|(own, _)| own).sum();
            let shared: u64 = machines.iter().map(|(_, shared)| shared).sum();
            let expected = own.saturating_sub(saved_bytes) + shared.min(shared_bytes);
            prop_assert!(sum <= expected && sum + 16 >= expected, "{sum} of {expected}");
        }
    }
}
