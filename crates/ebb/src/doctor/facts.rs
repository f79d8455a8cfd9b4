//! Facts that the doctor collects about the machine, without judging them.

use std::fs;

use ebb_vmm::probe::{KvmProbe, probe};
use ebb_vmm::size::ByteSize;
use rustix::io::Errno;
use rustix::mm::UserfaultfdFlags;

use super::merging::Merging;

/// Whether a process here may handle another's page faults.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Userfaultfd {
    /// It may.
    Available,
    /// Only with more privileges.
    Restricted,
    /// The kernel does not support it.
    Missing,
}

/// Memory of this machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Memory {
    pub(super) total: ByteSize,
    pub(super) available: ByteSize,
    pub(super) swap: ByteSize,
}

/// 2 MiB pages of the hugetlb pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HugePages {
    pub(super) total: u64,
    pub(super) free: u64,
}

/// State of the machine.
#[derive(Clone, Debug)]
pub(super) struct Facts {
    pub(super) kvm: KvmProbe,
    /// The mode in brackets in `/sys/kernel/mm/transparent_hugepage/enabled`.
    pub(super) transparent_huge_pages: Option<String>,
    pub(super) huge_pages: Option<HugePages>,
    /// Whether equal pages can be merged.
    pub(super) merging: Merging,
    pub(super) userfaultfd: Userfaultfd,
    pub(super) memory: Option<Memory>,
}

impl Facts {
    /// Examines everything. Takes up to a second where KVM is emulated.
    pub(super) fn collect() -> Self {
        Self {
            kvm: probe(),
            transparent_huge_pages: read("/sys/kernel/mm/transparent_hugepage/enabled")
                .and_then(|text| selected(&text)),
            huge_pages: huge_pages(),
            merging: Merging::collect(),
            userfaultfd: userfaultfd(),
            memory: read("/proc/meminfo").and_then(|text| memory(&text)),
        }
    }
}

fn read(path: &str) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

/// The word in brackets of a line such as `always [madvise] never`.
fn selected(line: &str) -> Option<String> {
    let (_, rest) = line.split_once('[')?;
    rest.split_once(']').map(|(word, _)| word.to_owned())
}

fn huge_pages() -> Option<HugePages> {
    let number = |name: &str| {
        read(&format!("/sys/kernel/mm/hugepages/hugepages-2048kB/{name}"))?.parse().ok()
    };
    Some(HugePages { total: number("nr_hugepages")?, free: number("free_hugepages")? })
}

fn memory(meminfo: &str) -> Option<Memory> {
    let size = |name: &str| ebb_program::of_meminfo(meminfo, name).map(ByteSize::from_bytes);
    Some(Memory {
        total: size("MemTotal")?,
        available: size("MemAvailable")?,
        swap: size("SwapTotal")?,
    })
}

fn userfaultfd() -> Userfaultfd {
    // The device needs no privilege but its own permissions (Linux 6.1 and later).
    if fs::OpenOptions::new().read(true).write(true).open("/dev/userfaultfd").is_ok() {
        return Userfaultfd::Available;
    }
    // SAFETY: the descriptor is closed at once and no memory is ever registered with it.
    match unsafe { rustix::mm::userfaultfd(UserfaultfdFlags::CLOEXEC) } {
        Ok(_) => Userfaultfd::Available,
        Err(Errno::PERM | Errno::ACCESS) => Userfaultfd::Restricted,
        Err(_) => Userfaultfd::Missing,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_the_kernel_are_parsed() {
        assert_eq!(selected("always [madvise] never").as_deref(), Some("madvise"));
        assert_eq!(selected("[always] madvise never").as_deref(), Some("always"));
        assert_eq!(selected("strange"), None);
        let text = "MemTotal:       24623456 kB\nMemFree: 1 kB\nMemAvailable:   20000000 \
                    kB\nSwapTotal:  0 kB\n";
        assert_eq!(
            memory(text),
            Some(Memory {
                total: ByteSize::from_bytes(24_623_456 << 10),
                available: ByteSize::from_bytes(20_000_000 << 10),
                swap: ByteSize::default(),
            })
        );
        for broken in ["", "MemTotal: x kB\n", "MemTotal: 5\n", "MemTotal: 5 kB\nSwapTotal: 0 kB\n"]
        {
            assert_eq!(memory(broken), None, "{broken:?}");
        }
    }

    #[test]
    fn this_machine_has_memory() {
        let memory = Facts::collect().memory.unwrap();
        assert!(memory.total >= memory.available && memory.available.bytes() > 0);
    }
}
