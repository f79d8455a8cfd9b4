//! Judges the facts: a pure function.

use ebb_program::{Check, Grade};
use ebb_vmm::probe::KvmQuality;
use ebb_vmm::size::ByteSize;

use super::facts::{Facts, Userfaultfd};
use super::{Report, Verdict};

/// Minimum for a small guest.
const LEAST_MEMORY: ByteSize = ByteSize::from_mib(512);

pub(super) fn judge(facts: &Facts) -> Report {
    let verdict = verdict(facts);
    let mut checks = kvm_checks(facts);
    checks.push(transparent_huge_pages(facts));
    checks.push(huge_pages(facts));
    checks.extend(facts.merging.checks());
    checks.push(userfaultfd(facts));
    checks.push(memory(facts));
    Report { summary: verdict.line(), verdict, checks, kvm: facts.kvm.clone() }
}

fn verdict(facts: &Facts) -> Verdict {
    let mut reasons = Vec::new();
    if let Some(memory) = facts.memory
        && memory.available < LEAST_MEMORY
    {
        let available = memory.available.rounded();
        reasons.push(format!("only {available} of memory are available"));
    }
    match &facts.kvm.quality {
        KvmQuality::Fast { .. } => {}
        KvmQuality::Emulated { .. } => {
            reasons.push("KVM emulates each instruction of a guest".to_owned());
        }
        KvmQuality::Unavailable { reason, .. } | KvmQuality::PermissionDenied { reason, .. } => {
            reasons.push(reason.clone());
        }
    }
    if reasons.is_empty() { Verdict::Direct } else { Verdict::Cannot { reasons } }
}

fn kvm_checks(facts: &Facts) -> Vec<Check> {
    const PRESENT: &str = "KVM";
    const PERMISSION: &str = "permission on KVM";
    const SPEED: &str = "speed of KVM";
    const CAPABILITIES: &str = "capabilities of KVM";
    let probe = &facts.kvm;
    let present = |version: i32| {
        Check::new(PRESENT, Grade::Ok, format!("{}, version {version}", probe.device), None)
    };
    let permitted = || Check::new(PERMISSION, Grade::Ok, "this user may open it", None);
    let complete = || Check::new(CAPABILITIES, Grade::Ok, "all required ones", None);
    let speed = |ns: f64| format!("an iteration of a loop in a guest takes {ns:.1} ns");
    let version = probe.api_version.unwrap_or_default();
    match &probe.quality {
        KvmQuality::Fast { ns_per_iteration } => {
            vec![
                present(version),
                permitted(),
                complete(),
                Check::new(SPEED, Grade::Ok, speed(*ns_per_iteration), None),
            ]
        }
        KvmQuality::Emulated { ns_per_iteration, .. } => vec![
            present(version),
            permitted(),
            complete(),
            Check::new(
                SPEED,
                Grade::Problem,
                format!("{}: each instruction is emulated", speed(*ns_per_iteration)),
                Some(
                    "Linux does not boot on it in reasonable time; use a machine with vmx or svm, \
                     or `ebb-lab virtual-host`",
                ),
            ),
        ],
        KvmQuality::PermissionDenied { reason, remedy } => vec![
            Check::new(PRESENT, Grade::Ok, probe.device.clone(), None),
            Check::new(PERMISSION, Grade::Problem, reason.clone(), Some(remedy)),
        ],
        KvmQuality::Unavailable { reason, remedy } if probe.missing_capabilities.is_empty() => {
            vec![Check::new(PRESENT, Grade::Problem, reason.clone(), Some(remedy))]
        }
        KvmQuality::Unavailable { reason, remedy } => {
            vec![
                present(version),
                permitted(),
                Check::new(CAPABILITIES, Grade::Problem, reason.clone(), Some(remedy)),
            ]
        }
    }
}

fn transparent_huge_pages(facts: &Facts) -> Check {
    const NAME: &str = "transparent huge pages";
    let remedy = "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled";
    match facts.transparent_huge_pages.as_deref() {
        Some(mode @ ("always" | "madvise")) => Check::new(NAME, Grade::Ok, mode, None),
        Some(mode) => Check::new(
            NAME,
            Grade::Warning,
            format!("{mode}: guest memory is slower to touch and to discard"),
            Some(remedy),
        ),
        None => Check::new(
            NAME,
            Grade::Warning,
            "not supported by this kernel: guest memory is slower to touch and to discard",
            None,
        ),
    }
}

fn huge_pages(facts: &Facts) -> Check {
    const NAME: &str = "2 MiB huge pages";
    let found = match facts.huge_pages {
        Some(pages) if pages.total > 0 => format!("{} of {} free", pages.free, pages.total),
        Some(_) => "none reserved; only --memory backing=hugetlb needs them".to_owned(),
        None => {
            let found = "not supported by this kernel: --memory backing=hugetlb cannot be used";
            return Check::new(NAME, Grade::Warning, found, None);
        }
    };
    Check::new(NAME, Grade::Ok, found, None)
}

fn userfaultfd(facts: &Facts) -> Check {
    const NAME: &str = "userfaultfd";
    match facts.userfaultfd {
        Userfaultfd::Available => Check::new(NAME, Grade::Ok, "this user may use it", None),
        Userfaultfd::Restricted => Check::new(
            NAME,
            Grade::Warning,
            "only with more privileges",
            Some(
                "give this user access to /dev/userfaultfd, or: sudo sysctl \
                 vm.unprivileged_userfaultfd=1",
            ),
        ),
        Userfaultfd::Missing => {
            Check::new(NAME, Grade::Warning, "not supported by this kernel", None)
        }
    }
}

fn memory(facts: &Facts) -> Check {
    const NAME: &str = "memory";
    let Some(memory) = facts.memory else {
        return Check::new(NAME, Grade::Warning, "/proc/meminfo cannot be read", None);
    };
    let found = format!(
        "{} of {} available, {} swap",
        memory.available.rounded(),
        memory.total.rounded(),
        memory.swap.rounded()
    );
    let available = memory.available;
    if available < LEAST_MEMORY {
        Check::new(NAME, Grade::Problem, found, Some("end other programs"))
    } else {
        Check::new(NAME, Grade::Ok, found, None)
    }
}

#[cfg(test)]
mod tests {
    use ebb_vmm::probe::KvmProbe;

    use super::super::facts::{HugePages, Memory};
    use super::super::merging::Merging;
    use super::*;

    fn fast() -> KvmQuality {
        KvmQuality::Fast { ns_per_iteration: 0.8 }
    }

    fn emulated() -> KvmQuality {
        KvmQuality::Emulated { ns_per_iteration: 1400.0, iterations: 1_000_000 }
    }

    fn denied() -> KvmQuality {
        KvmQuality::PermissionDenied {
            reason: "this user may not open /dev/kvm".into(),
            remedy: "join kvm".into(),
        }
    }

    fn absent() -> KvmQuality {
        KvmQuality::Unavailable { reason: "there is no /dev/kvm".into(), remedy: "load it".into() }
    }

    fn memory_of(available_mib: u64) -> Memory {
        let total = ByteSize::from_mib(24 << 10);
        Memory { total, available: ByteSize::from_mib(available_mib), swap: ByteSize::default() }
    }

    fn facts(quality: KvmQuality) -> Facts {
        let api_version =
            matches!(quality, KvmQuality::Fast { .. } | KvmQuality::Emulated { .. }).then_some(12);
        Facts {
            kvm: KvmProbe {
                device: "/dev/kvm".into(),
                quality,
                api_version,
                missing_capabilities: Vec::new(),
            },
            transparent_huge_pages: Some("madvise".into()),
            huge_pages: Some(HugePages { total: 8, free: 4 }),
            merging: Merging::possible(),
            userfaultfd: Userfaultfd::Available,
            memory: Some(memory_of(20 << 10)),
        }
    }

    fn grade(report: &Report, name: &str) -> Grade {
        report.checks.iter().find(|check| check.name == name).unwrap().grade
    }

    #[test]
    fn guests_run_where_kvm_is_fast_and_nowhere_else() {
        assert_eq!(judge(&facts(fast())).verdict, Verdict::Direct);
        for quality in [emulated(), denied(), absent()] {
            let report = judge(&facts(quality));
            assert!(matches!(report.verdict, Verdict::Cannot { .. }));
            let problems = |check: &&Check| check.grade == Grade::Problem;
            let problem = report.checks.iter().find(problems).expect("a problem");
            assert!(problem.remedy.is_some(), "{problem:?}");
        }
    }

    #[test]
    fn the_last_line_is_the_verdict() {
        let last = |facts: &Facts| judge(facts).verdict.line();
        assert_eq!(last(&facts(fast())), "guests run directly on KVM");
        assert_eq!(last(&facts(absent())), "cannot run, because there is no /dev/kvm");
        let line = last(&facts(emulated()));
        assert_eq!(line, "cannot run, because KVM emulates each instruction of a guest");
    }

    #[test]
    fn too_little_memory_is_a_problem_anywhere() {
        for quality in [fast(), emulated()] {
            let memory = Some(memory_of(256));
            let report = judge(&Facts { memory, ..facts(quality) });
            assert!(report.summary.contains("only 256.0 MiB of memory"), "{}", report.summary);
            assert_eq!(grade(&report, "memory"), Grade::Problem);
        }
    }

    #[test]
    fn nothing_is_a_problem_where_guests_run() {
        let report = judge(&facts(fast()));
        assert!(report.checks.iter().all(|check| check.grade != Grade::Problem), "{report:?}");
    }

    #[test]
    fn slow_and_missing_features_are_warnings_with_a_remedy() {
        let report = judge(&Facts {
            transparent_huge_pages: Some("never".into()),
            merging: Merging { owner: Err("no".into()), kernel: Err("no".into()) },
            userfaultfd: Userfaultfd::Restricted,
            ..facts(fast())
        });
        for name in [
            "transparent huge pages",
            "merging by the monitor",
            "merging by the kernel",
            "userfaultfd",
        ] {
            assert_eq!(grade(&report, name), Grade::Warning, "{name}");
        }
        let text = ebb_program::table(&report.checks, &report.summary);
        assert!(text.contains("-> echo madvise"), "{text}");
        let text = ebb_program::table(&judge(&facts(emulated())).checks, "");
        assert!(text.contains("takes 1400.0 ns"), "{text}");
    }

    #[test]
    fn missing_capabilities_are_named() {
        let mut facts = facts(KvmQuality::Unavailable {
            reason: "this KVM lacks KVM_CAP_IOEVENTFD".into(),
            remedy: "another kernel".into(),
        });
        facts.kvm.api_version = Some(12);
        facts.kvm.missing_capabilities = vec!["KVM_CAP_IOEVENTFD".into()];
        let report = judge(&facts);
        assert_eq!(grade(&report, "KVM"), Grade::Ok);
        assert_eq!(grade(&report, "capabilities of KVM"), Grade::Problem);
    }

    #[test]
    fn the_report_is_one_json_document() {
        let json = serde_json::to_value(judge(&facts(absent()))).unwrap();
        assert_eq!(json["verdict"]["kind"], "cannot");
        assert_eq!(json["kvm"]["quality"]["kind"], "unavailable");
        assert_eq!(json["checks"][0]["grade"], "problem");
    }
}
