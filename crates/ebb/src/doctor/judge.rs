//! What the facts mean: a pure function.

use ebb_vmm::probe::KvmQuality;
use ebb_vmm::size::ByteSize;

use super::facts::{Facts, Userfaultfd};
use super::{Check, Grade, Report, Verdict};

/// Below this not even a small guest in a small virtual host fits.
const LEAST_MEMORY: ByteSize = ByteSize::from_mib(1536);
/// The demonstrations start guests of some hundred MiB, in a virtual host of 2 GiB.
const DEMO_MEMORY: ByteSize = ByteSize::from_mib(3 << 10);
/// The experiments at full size have a host of 15 GiB.
const FULL_MEMORY: ByteSize = ByteSize::from_mib(16 << 10);

/// QEMU before this one may run stale translations of code that a processor of the guest has
/// changed.
const SOUND_QEMU: (u32, u32) = (8, 1);

pub(super) fn judge(facts: &Facts) -> Report {
    let verdict = verdict(facts);
    let mut checks = kvm_checks(facts, &verdict);
    checks.push(transparent_huge_pages(facts));
    checks.push(huge_pages(facts));
    checks.extend(facts.merging.checks());
    checks.push(userfaultfd(facts));
    checks.push(memory(facts));
    // Where KVM runs guests nobody needs the virtual host; where it does not, everything hangs on
    // it.
    let lack = if verdict == Verdict::Direct { Grade::Warning } else { Grade::Problem };
    checks.push(qemu(facts, lack));
    for (name, fact) in [
        ("kernel for guests", &facts.kernel),
        ("modules for guests", &facts.modules),
        ("busybox", &facts.busybox),
    ] {
        checks.push(part(name, fact, lack));
    }
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
    if facts.kvm.quality.runs_linux() {
        return if reasons.is_empty() { Verdict::Direct } else { Verdict::Cannot { reasons } };
    }
    let lacks: Vec<&str> = [
        ("QEMU", &facts.qemu),
        ("a kernel", &facts.kernel),
        ("the kernel's modules", &facts.modules),
        ("a static busybox", &facts.busybox),
    ]
    .into_iter()
    .filter(|(_, fact)| fact.is_err())
    .map(|(name, _)| name)
    .collect();
    if !lacks.is_empty() {
        let kvm = match &facts.kvm.quality {
            KvmQuality::Fast { .. } => "KVM is fast".to_owned(),
            KvmQuality::Emulated { .. } => "KVM only emulates guests".to_owned(),
            KvmQuality::Unavailable { reason, .. }
            | KvmQuality::PermissionDenied { reason, .. } => reason.clone(),
        };
        reasons.push(format!("{kvm}, and the virtual host lacks {}", lacks.join(", ")));
    }
    if reasons.is_empty() { Verdict::VirtualHost } else { Verdict::Cannot { reasons } }
}

pub(super) fn check(
    name: &'static str,
    grade: Grade,
    found: impl Into<String>,
    remedy: Option<&str>,
) -> Check {
    Check { name, grade, found: found.into(), remedy: remedy.map(str::to_owned) }
}

fn kvm_checks(facts: &Facts, verdict: &Verdict) -> Vec<Check> {
    const PRESENT: &str = "KVM";
    const PERMISSION: &str = "permission on KVM";
    const SPEED: &str = "speed of KVM";
    const CAPABILITIES: &str = "capabilities of KVM";
    // A bad KVM is no obstacle where the virtual host takes over.
    let bad = if *verdict == Verdict::VirtualHost { Grade::Warning } else { Grade::Problem };
    let probe = &facts.kvm;
    let present = |version: i32| {
        check(PRESENT, Grade::Ok, format!("{}, version {version}", probe.device), None)
    };
    let permitted = || check(PERMISSION, Grade::Ok, "this user may open it", None);
    let complete = || check(CAPABILITIES, Grade::Ok, "all that are needed", None);
    let speed = |ns: f64| format!("a million rounds of a loop in a guest take {}", loop_time(ns));
    let version = probe.api_version.unwrap_or_default();
    match &probe.quality {
        KvmQuality::Fast { ns_per_iteration } => {
            vec![
                present(version),
                permitted(),
                complete(),
                check(SPEED, Grade::Ok, speed(*ns_per_iteration), None),
            ]
        }
        KvmQuality::Emulated { ns_per_iteration, .. } => vec![
            present(version),
            permitted(),
            complete(),
            check(
                SPEED,
                bad,
                format!("{}: each instruction is emulated", speed(*ns_per_iteration)),
                Some(
                    "Linux does not boot on it in reasonable time; use the virtual host, or a machine with vmx or svm",
                ),
            ),
        ],
        KvmQuality::PermissionDenied { reason, remedy } => vec![
            check(PRESENT, Grade::Ok, probe.device.clone(), None),
            check(PERMISSION, bad, reason.clone(), Some(remedy)),
        ],
        KvmQuality::Unavailable { reason, remedy } if probe.missing_capabilities.is_empty() => {
            vec![check(PRESENT, bad, reason.clone(), Some(remedy))]
        }
        KvmQuality::Unavailable { reason, remedy } => {
            vec![
                present(version),
                permitted(),
                check(CAPABILITIES, bad, reason.clone(), Some(remedy)),
            ]
        }
    }
}

/// Time of a million rounds.
fn loop_time(ns_per_iteration: f64) -> String {
    let ms = ns_per_iteration;
    if ms >= 1000.0 { format!("{:.1} s", ms / 1000.0) } else { format!("{ms:.1} ms") }
}

fn transparent_huge_pages(facts: &Facts) -> Check {
    const NAME: &str = "transparent huge pages";
    let remedy = "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled";
    match facts.transparent_huge_pages.as_deref() {
        Some(mode @ ("always" | "madvise")) => check(NAME, Grade::Ok, mode, None),
        Some(mode) => check(
            NAME,
            Grade::Warning,
            format!("{mode}: guest memory is slower to touch and to give back"),
            Some(remedy),
        ),
        None => check(
            NAME,
            Grade::Warning,
            "this kernel has none: guest memory is slower to touch and to give back",
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
            let found = "this kernel has none: --memory backing=hugetlb cannot be used";
            return check(NAME, Grade::Warning, found, None);
        }
    };
    check(NAME, Grade::Ok, found, None)
}

fn userfaultfd(facts: &Facts) -> Check {
    const NAME: &str = "userfaultfd";
    match facts.userfaultfd {
        Userfaultfd::Available => check(NAME, Grade::Ok, "this user may use it", None),
        Userfaultfd::Restricted => check(
            NAME,
            Grade::Warning,
            "only with more privileges",
            Some(
                "give this user access to /dev/userfaultfd, or: sudo sysctl vm.unprivileged_userfaultfd=1",
            ),
        ),
        Userfaultfd::Missing => check(NAME, Grade::Warning, "this kernel has none", None),
    }
}

fn memory(facts: &Facts) -> Check {
    const NAME: &str = "memory";
    let Some(memory) = facts.memory else {
        return check(NAME, Grade::Warning, "/proc/meminfo cannot be read", None);
    };
    let found = format!(
        "{} of {} available, {} swap",
        memory.available.rounded(),
        memory.total.rounded(),
        memory.swap.rounded()
    );
    let available = memory.available;
    if available < LEAST_MEMORY {
        check(NAME, Grade::Problem, found, Some("end other programs: at least 1.5 GiB are needed"))
    } else if available < DEMO_MEMORY {
        check(NAME, Grade::Warning, found, Some("the demonstrations need about 3 GiB"))
    } else if available < FULL_MEMORY {
        check(NAME, Grade::Ok, format!("{found}; experiments at full size need 16 GiB"), None)
    } else {
        check(NAME, Grade::Ok, found, None)
    }
}

fn qemu(facts: &Facts, lack: Grade) -> Check {
    const NAME: &str = "QEMU for the virtual host";
    match &facts.qemu {
        Ok(found) if qemu_version(found).is_some_and(|version| version < SOUND_QEMU) => check(
            NAME,
            Grade::Warning,
            format!(
                "{found}: it may go on with stale translations of code that another processor has changed"
            ),
            Some(
                "guests may hang or crash at random; install 8.1 or newer, on Debian 12 from bookworm-backports",
            ),
        ),
        fact => part(NAME, fact, lack),
    }
}

/// Major and minor version in the first line of `--version`.
fn qemu_version(line: &str) -> Option<(u32, u32)> {
    let version = line
        .split_ascii_whitespace()
        .find(|word| word.starts_with(|c: char| c.is_ascii_digit()))?;
    let mut numbers = version.split('.');
    let major = numbers.next()?.parse().ok()?;
    Some((major, numbers.next().and_then(|minor| minor.parse().ok()).unwrap_or(0)))
}

fn part(name: &'static str, fact: &Result<String, String>, lack: Grade) -> Check {
    match fact {
        Ok(found) => check(name, Grade::Ok, found.clone(), None),
        Err(text) => match text.split_once([';', ':']) {
            Some((found, remedy)) => check(name, lack, found.trim(), Some(remedy.trim())),
            None => check(name, lack, text.clone(), None),
        },
    }
}

#[cfg(test)]
mod tests {
    use ebb_vmm::probe::KvmProbe;

    use super::super::facts::{HugePages, Memory};
    use super::super::merging::Merging;
    use super::super::table;
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
            qemu: Ok("QEMU emulator version 10.0.2 (Debian 1:10.0.2+ds-2~bpo12+1)".into()),
            kernel: Ok("/boot/vmlinuz".into()),
            modules: Ok("/lib/modules/6.1".into()),
            busybox: Ok("/bin/busybox".into()),
        }
    }

    fn without_qemu(quality: KvmQuality) -> Facts {
        Facts { qemu: Err("QEMU is not installed; install it: apt-get".into()), ..facts(quality) }
    }

    fn grade(report: &Report, name: &str) -> Grade {
        report.checks.iter().find(|check| check.name == name).unwrap().grade
    }

    #[test]
    fn kvm_comes_first_and_the_virtual_host_is_the_other_way() {
        assert_eq!(judge(&facts(fast())).verdict, Verdict::Direct);
        assert_eq!(judge(&without_qemu(fast())).verdict, Verdict::Direct);
        for quality in [emulated(), denied(), absent()] {
            assert_eq!(judge(&facts(quality.clone())).verdict, Verdict::VirtualHost);
            let Verdict::Cannot { reasons } = judge(&without_qemu(quality)).verdict else {
                panic!("nothing is left to run guests on")
            };
            assert!(reasons[0].ends_with("the virtual host lacks QEMU"), "{reasons:?}");
        }
    }

    #[test]
    fn the_last_line_is_the_verdict() {
        let last =
            |facts: &Facts| table(&judge(facts)).trim_end().lines().last().unwrap().to_owned();
        assert_eq!(last(&facts(fast())), "guests run directly on KVM");
        assert_eq!(last(&facts(emulated())), "guests run in the virtual host");
        let line = last(&without_qemu(absent()));
        assert_eq!(
            line,
            "cannot run, because there is no /dev/kvm, and the virtual host lacks QEMU"
        );
    }

    #[test]
    fn every_part_of_the_virtual_host_is_needed_without_kvm() {
        let lack = || Err::<String, String>("it is missing; get it".into());
        for facts in [
            Facts { qemu: lack(), ..facts(emulated()) },
            Facts { kernel: lack(), ..facts(emulated()) },
            Facts { modules: lack(), ..facts(emulated()) },
            Facts { busybox: lack(), ..facts(emulated()) },
        ] {
            let report = judge(&facts);
            assert!(matches!(report.verdict, Verdict::Cannot { .. }));
            let problems: Vec<_> = report
                .checks
                .iter()
                .filter(|check| check.remedy.as_deref() == Some("get it"))
                .collect();
            assert_eq!(problems.len(), 1);
            assert_eq!(problems[0].grade, Grade::Problem);
        }
    }

    #[test]
    fn too_little_memory_is_a_problem_anywhere() {
        for quality in [fast(), emulated()] {
            let memory = Some(memory_of(1 << 10));
            let report = judge(&Facts { memory, ..facts(quality) });
            assert!(report.summary.contains("only 1.0 GiB of memory"), "{}", report.summary);
            assert_eq!(grade(&report, "memory"), Grade::Problem);
        }
    }

    #[test]
    fn nothing_is_a_problem_where_guests_run() {
        for facts in [
            facts(fast()),
            without_qemu(fast()),
            facts(emulated()),
            facts(denied()),
            facts(absent()),
        ] {
            let report = judge(&facts);
            assert!(report.checks.iter().all(|check| check.grade != Grade::Problem), "{report:?}");
        }
    }

    #[test]
    fn what_is_slow_or_missing_is_a_warning_with_a_remedy() {
        let report = judge(&Facts {
            transparent_huge_pages: Some("never".into()),
            merging: Merging { owner: Err("no".into()), kernel: Err("no".into()) },
            userfaultfd: Userfaultfd::Restricted,
            ..facts(emulated())
        });
        for name in [
            "transparent huge pages",
            "merging by the monitor",
            "merging by the kernel",
            "userfaultfd",
            "speed of KVM",
        ] {
            assert_eq!(grade(&report, name), Grade::Warning, "{name}");
        }
        let text = table(&report);
        assert!(text.contains("-> echo madvise"), "{text}");
        assert!(text.contains("take 1.4 s"), "{text}");
    }

    #[test]
    fn missing_capabilities_are_named() {
        let mut facts = facts(KvmQuality::Unavailable {
            reason: "this KVM lacks KVM_CAP_IRQFD".into(),
            remedy: "another kernel".into(),
        });
        facts.kvm.api_version = Some(12);
        facts.kvm.missing_capabilities = vec!["KVM_CAP_IRQFD".into()];
        let report = judge(&facts);
        assert_eq!(grade(&report, "KVM"), Grade::Ok);
        assert_eq!(grade(&report, "capabilities of KVM"), Grade::Warning);
    }

    #[test]
    fn an_old_qemu_is_named_and_used_all_the_same() {
        let with = |line: &str| Facts { qemu: Ok(line.into()), ..facts(absent()) };
        let grade = |line| {
            let report = judge(&with(line));
            assert_eq!(report.verdict, Verdict::VirtualHost, "{line}");
            report.checks.iter().find(|check| check.name.starts_with("QEMU")).unwrap().grade
        };
        for line in [
            "QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18)",
            "QEMU emulator version 8.0",
        ] {
            assert_eq!(grade(line), Grade::Warning, "{line}");
        }
        for line in
            ["QEMU emulator version 8.1.0", "QEMU emulator version 10.0.2", "a QEMU of tomorrow"]
        {
            assert_eq!(grade(line), Grade::Ok, "{line}");
        }
    }

    #[test]
    fn the_report_is_one_json_document() {
        let json = serde_json::to_value(judge(&without_qemu(absent()))).unwrap();
        assert_eq!(json["verdict"]["kind"], "cannot");
        assert_eq!(json["kvm"]["quality"]["kind"], "unavailable");
        assert_eq!(json["checks"][0]["grade"], "problem");
    }
}
