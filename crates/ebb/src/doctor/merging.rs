//! Whether equal pages can be merged here: by the monitor, and by the kernel.

use std::path::Path;

use ebb_page_merge::kernel::{Counter, Knob, Ksm, RUN_FOLDER, SYSFS};
use ebb_program::{Check, Grade};
use ebb_vmm::probe::{probe_merging, single_pages_bytes};

/// What some distributions set `vm.max_map_count` to.
const MORE_MAPPINGS: u64 = 1 << 20;

/// State of Linux KSM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct KernelMerging {
    /// The setting `run`.
    run: u64,
    pages_sharing: u64,
    /// Whether this user can record a machine's trust domain where other monitors look it up.
    may_join: bool,
}

/// The results; `Err` contains the reason and the remedy.
#[derive(Clone, Debug)]
pub(super) struct Merging {
    /// By the monitor (merge=owner): `vm.max_map_count`, which limits it.
    pub(super) owner: Result<Option<u64>, String>,
    /// By the kernel (merge=kernel).
    pub(super) kernel: Result<KernelMerging, String>,
}

impl Merging {
    /// Probes both.
    pub(super) fn collect() -> Self {
        let max_map_count = || {
            let text = std::fs::read_to_string("/proc/sys/vm/max_map_count").ok()?;
            text.trim().parse().ok()
        };
        Self {
            owner: probe_merging().map(|()| max_map_count()).map_err(|error| error.to_string()),
            kernel: kernel_merging().map_err(|error| error.to_string()),
        }
    }

    /// One check for each.
    pub(super) fn checks(&self) -> [Check; 2] {
        [self.check_owner(), self.check_kernel()]
    }

    fn check_owner(&self) -> Check {
        const NAME: &str = "merging by the monitor";
        match &self.owner {
            Ok(Some(mappings)) => {
                let mib = |mappings| (single_pages_bytes(mappings) + (1 << 19)) >> 20;
                let found = format!(
                    "merge=owner works; of single pages, {} MiB in each machine, beside runs",
                    mib(*mappings)
                );
                let remedy = (*mappings < MORE_MAPPINGS).then(|| {
                    format!(
                        "`sysctl vm.max_map_count={MORE_MAPPINGS}` allows {} MiB of single pages \
                         (about 400 bytes of kernel memory for each)",
                        mib(MORE_MAPPINGS)
                    )
                });
                Check::new(NAME, Grade::Ok, found, remedy.as_deref())
            }
            Ok(None) => Check::new(NAME, Grade::Ok, "merge=owner works", None),
            Err(reason) => Check::new(
                NAME,
                Grade::Warning,
                format!("merge=owner does not work: {reason}"),
                None,
            ),
        }
    }

    fn check_kernel(&self) -> Check {
        const NAME: &str = "merging by the kernel";
        match &self.kernel {
            Ok(KernelMerging { run, pages_sharing, may_join }) => {
                let what = match run {
                    1 => format!("KSM runs, {pages_sharing} pages share others"),
                    _ => {
                        format!("KSM is present but off (`echo 1 > {SYSFS}/run` starts it)")
                    }
                };
                if *may_join {
                    Check::new(NAME, Grade::Ok, what, None)
                } else {
                    let found = format!(
                        "{what}; this user cannot write to {RUN_FOLDER}, so merge=kernel does not \
                         work"
                    );
                    Check::new(
                        NAME,
                        Grade::Warning,
                        found,
                        Some("run monitors with merge=kernel as root"),
                    )
                }
            }
            Err(reason) => Check::new(NAME, Grade::Warning, reason.as_str(), None),
        }
    }

    /// For tests of the other checks.
    #[cfg(test)]
    pub(super) fn possible() -> Self {
        let kernel = KernelMerging { run: 0, pages_sharing: 0, may_join: true };
        Self { owner: Ok(Some(65530)), kernel: Ok(kernel) }
    }
}

fn kernel_merging() -> Result<KernelMerging, ebb_page_merge::kernel::KsmError> {
    let ksm = Ksm::open(Path::new(SYSFS))?;
    Ok(KernelMerging {
        run: ksm.settings()?.get(Knob::Run).unwrap_or(0),
        pages_sharing: ksm.counters()?.count(Counter::PagesSharing),
        may_join: may_write(Path::new(RUN_FOLDER)),
    })
}

/// Whether this user may write to a folder, or create it.
fn may_write(folder: &Path) -> bool {
    let there = folder.ancestors().find(|folder| folder.exists());
    there.is_some_and(|folder| rustix::fs::access(folder, rustix::fs::Access::WRITE_OK).is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unavailable_merging_is_a_warning_with_its_reason() {
        let grades = |merging: &Merging| merging.checks().map(|check| check.grade);
        assert_eq!(grades(&Merging::possible()), [Grade::Ok, Grade::Ok]);
        let [few, _] = Merging::possible().checks();
        assert!(few.found.contains(" 24 MiB"), "{}", few.found);
        assert!(few.remedy.unwrap().contains("max_map_count=1048576` allows 384 MiB"));
        let many = Merging { owner: Ok(Some(MORE_MAPPINGS)), ..Merging::possible() };
        assert_eq!(many.checks()[0].remedy, None);
        let kernel = KernelMerging { run: 1, pages_sharing: 7, may_join: false };
        let poor = Merging { owner: Err("no UFFDIO_MOVE".into()), kernel: Ok(kernel) };
        assert_eq!(grades(&poor), [Grade::Warning, Grade::Warning]);
        let [owner, kernel] = poor.checks();
        assert!(owner.found.contains("no UFFDIO_MOVE"), "{}", owner.found);
        assert!(kernel.found.contains("7 pages") && kernel.remedy.is_some(), "{}", kernel.found);
    }

    #[test]
    fn this_machine_is_examined() {
        let found = Merging::collect();
        assert_eq!(found.kernel.is_ok(), Path::new(SYSFS).join("run").exists(), "{found:?}");
        if let Err(reason) = &found.owner {
            assert!(reason.contains("userfaultfd") || reason.contains("Linux"), "{reason}");
        }
    }
}
