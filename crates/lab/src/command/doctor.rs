//! `ebb-lab doctor`: where guests can run on this machine, and what is missing.

use std::env;
use std::io::{ErrorKind, Write as _};
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};

use anyhow::Context as _;
use ebb_lab::harness::target;
use ebb_program::{Check, Grade};
use ebb_virtual_host::kernel::Kernel;
use ebb_virtual_host::modules::ModuleIndex;
use ebb_virtual_host::program_with_libraries;
use ebb_virtual_host::programs::{find_agent, find_monitor};
use ebb_vmm::size::ByteSize;
use serde::Serialize;

/// The emulator that the virtual host runs in.
const QEMU: &str = "qemu-system-x86_64";
/// First version that does not run stale translations of code that a processor of the guest has
/// changed.
const SOUND_QEMU: (u32, u32) = (8, 1);
/// The smallest virtual host with a small guest.
const LEAST_MEMORY: ByteSize = ByteSize::from_mib(1536);
/// A demonstration: guests of some hundred MiB in a host of 2 GiB.
const DEMO_MEMORY: ByteSize = ByteSize::from_mib(3 << 10);
/// An experiment at full size: a host of 15 GiB.
const FULL_MEMORY: ByteSize = ByteSize::from_mib(16 << 10);
/// Modules that the virtual host and the guests in it load.
const MODULES: [&str; 7] = [
    "kvm_amd",
    "virtio_pci",
    "virtio_mmio",
    "virtio_balloon",
    "virtio_blk",
    "virtio_console",
    "virtio_rng",
];

/// Show where guests can run on this machine.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Args {
    /// Print one JSON document instead of a table
    #[arg(long)]
    json: bool,
}

/// Where guests can run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
enum Verdict {
    /// On this machine's own KVM.
    Direct,
    /// In the virtual host.
    VirtualHost,
    /// Not at all.
    Cannot {
        /// The reasons.
        reasons: Vec<String>,
    },
}

/// The report of the doctor.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Report {
    verdict: Verdict,
    /// The verdict in words.
    summary: String,
    checks: Vec<Check>,
}

/// State of the machine. `Err` contains the problem and its remedy.
#[derive(Clone, Debug)]
struct Facts {
    /// KVM of this machine; `Err` is the reason why guests cannot run on it directly.
    kvm: Result<(), String>,
    available: ByteSize,
    /// Requirements of guests wherever they run.
    everywhere: Vec<(&'static str, Result<String, String>)>,
    /// The first line of `qemu-system-x86_64 --version`.
    qemu: Result<String, String>,
    busybox: Result<String, String>,
}

/// Examines the machine and prints the results. Succeeds if guests can run here in either way.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let report = judge(&Facts::collect()?);
    let text = if args.json {
        format!("{}\n", serde_json::to_string_pretty(&report)?)
    } else {
        ebb_program::table(&report.checks, &report.summary)
    };
    std::io::stdout().write_all(text.as_bytes()).context("cannot write to standard output")?;
    Ok(match report.verdict {
        Verdict::Direct | Verdict::VirtualHost => ExitCode::SUCCESS,
        Verdict::Cannot { .. } => ExitCode::FAILURE,
    })
}

impl Facts {
    fn collect() -> anyhow::Result<Self> {
        let kernel = Kernel::find(None);
        let modules = match &kernel {
            Ok(kernel) => ModuleIndex::read(&kernel.modules)
                .and_then(|index| index.load_order(&MODULES))
                .map(|_| kernel.modules.display().to_string())
                .map_err(|error| error.to_string()),
            Err(_) => Err("they belong to the missing kernel".to_owned()),
        };
        let program = |name: &str, found: Option<PathBuf>| {
            found
                .map(|path| path.display().to_string())
                .ok_or_else(|| format!("it is not next to ebb-lab; cargo build -p {name}"))
        };
        let available_kib = ebb_lab::harness::host::MemoryState::read()?.available_kib;
        Ok(Self {
            kvm: target::obstacle_here().map_or(Ok(()), Err),
            available: ByteSize::from_bytes(available_kib << 10),
            everywhere: vec![
                (
                    "kernel for guests",
                    kernel
                        .map(|kernel| kernel.image.display().to_string())
                        .map_err(|error| error.to_string()),
                ),
                ("modules for guests", modules),
                ("monitor", program("ebb", find_monitor(None))),
                ("guest agent", program("ebb-agent", find_agent(None))),
            ],
            qemu: qemu_version(),
            busybox: busybox(),
        })
    }
}

fn qemu_version() -> Result<String, String> {
    let install = "install it: sudo apt-get install --no-install-recommends qemu-system-x86";
    let output =
        Command::new(QEMU).arg("--version").stdin(Stdio::null()).output().map_err(|error| {
            match error.kind() {
                ErrorKind::NotFound => format!("{QEMU} is not installed; {install}"),
                _ => format!("{QEMU} cannot be run: {error}; {install}"),
            }
        })?;
    let text = String::from_utf8_lossy(&output.stdout);
    match text.lines().next() {
        Some(line) if output.status.success() => Ok(line.trim().to_owned()),
        _ => Err(format!("{QEMU} --version fails ({}); {install}", output.status)),
    }
}

fn busybox() -> Result<String, String> {
    let path =
        env::var_os("EBB_BUSYBOX").map_or_else(|| PathBuf::from("/bin/busybox"), PathBuf::from);
    let install = "install it: sudo apt-get install busybox-static";
    if !path.exists() {
        return Err(format!("there is no {}; {install}", path.display()));
    }
    let listed = Command::new(&path).arg("--list").stdin(Stdio::null()).output();
    if !listed.is_ok_and(|output| output.status.success()) {
        return Err(format!("{} does not run; {install}", path.display()));
    }
    // A static program has no libraries. Without ldd, which lists them, the program is assumed to
    // be static.
    match program_with_libraries(&path) {
        Ok(files) if files.len() > 1 => Err(format!("{} is not static; {install}", path.display())),
        Ok(_) | Err(_) => Ok(path.display().to_string()),
    }
}

fn judge(facts: &Facts) -> Report {
    let verdict = verdict(facts);
    // Where KVM runs guests, the virtual host is not needed; elsewhere it is required.
    let lack = if verdict == Verdict::Direct { Grade::Warning } else { Grade::Problem };
    let mut checks = vec![
        match &facts.kvm {
            Ok(()) => Check::new("KVM", Grade::Ok, "runs Linux guests", None),
            Err(reason) => {
                let bad = if verdict == Verdict::VirtualHost { Grade::Warning } else { lack };
                Check::new("KVM", bad, reason, Some("`ebb doctor` has the details"))
            }
        },
        memory(facts.available),
    ];
    checks.extend(facts.everywhere.iter().map(|(name, fact)| part(name, fact, Grade::Problem)));
    checks.push(qemu(&facts.qemu, lack));
    checks.push(part("busybox", &facts.busybox, lack));
    let summary = match &verdict {
        Verdict::Direct => "guests run directly on KVM".to_owned(),
        Verdict::VirtualHost => "guests run in the virtual host".to_owned(),
        Verdict::Cannot { reasons } => format!("cannot run, because {}", reasons.join("; ")),
    };
    Report { verdict, summary, checks }
}

fn verdict(facts: &Facts) -> Verdict {
    let mut reasons = Vec::new();
    if facts.available < LEAST_MEMORY {
        let available = facts.available.rounded();
        reasons.push(format!("only {available} of memory are available"));
    }
    for (name, fact) in &facts.everywhere {
        if fact.is_err() {
            reasons.push(format!("there is no {name}"));
        }
    }
    if let Err(kvm) = &facts.kvm {
        let host = [("QEMU", &facts.qemu), ("a static busybox", &facts.busybox)];
        let lacks: Vec<&str> =
            host.into_iter().filter(|(_, fact)| fact.is_err()).map(|(name, _)| name).collect();
        if !lacks.is_empty() {
            reasons.push(format!("{kvm}, and the virtual host lacks {}", lacks.join(", ")));
        }
    }
    match (reasons.is_empty(), &facts.kvm) {
        (false, _) => Verdict::Cannot { reasons },
        (true, Ok(())) => Verdict::Direct,
        (true, Err(_)) => Verdict::VirtualHost,
    }
}

fn memory(available: ByteSize) -> Check {
    const NAME: &str = "memory";
    let found = format!("{} available", available.rounded());
    if available < LEAST_MEMORY {
        let remedy = "end other programs: at least 1.5 GiB are needed";
        Check::new(NAME, Grade::Problem, found, Some(remedy))
    } else if available < DEMO_MEMORY {
        Check::new(NAME, Grade::Warning, found, Some("the demonstrations need about 3 GiB"))
    } else if available < FULL_MEMORY {
        Check::new(NAME, Grade::Ok, format!("{found}; experiments at full size need 16 GiB"), None)
    } else {
        Check::new(NAME, Grade::Ok, found, None)
    }
}

fn qemu(fact: &Result<String, String>, lack: Grade) -> Check {
    const NAME: &str = "QEMU for the virtual host";
    match fact {
        Ok(found) if version_in(found).is_some_and(|version| version < SOUND_QEMU) => Check::new(
            NAME,
            Grade::Warning,
            format!("{found}: it may run stale translations of code that a processor has changed"),
            Some(
                "guests may hang or crash at random; install 8.1 or newer, on Debian 12 from \
                 bookworm-backports",
            ),
        ),
        fact => part(NAME, fact, lack),
    }
}

/// Major and minor version in the first line of `--version`.
fn version_in(line: &str) -> Option<(u32, u32)> {
    let version = line
        .split_ascii_whitespace()
        .find(|word| word.starts_with(|c: char| c.is_ascii_digit()))?;
    let mut numbers = version.split('.');
    let major = numbers.next()?.parse().ok()?;
    Some((major, numbers.next().and_then(|minor| minor.parse().ok()).unwrap_or(0)))
}

fn part(name: &'static str, fact: &Result<String, String>, lack: Grade) -> Check {
    match fact {
        Ok(found) => Check::new(name, Grade::Ok, found, None),
        Err(text) => match text.split_once([';', ':']) {
            Some((found, remedy)) => Check::new(name, lack, found.trim(), Some(remedy.trim())),
            None => Check::new(name, lack, text, None),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(kvm: Result<(), String>) -> Facts {
        Facts {
            kvm,
            available: ByteSize::from_mib(20 << 10),
            everywhere: vec![
                ("kernel for guests", Ok("/boot/vmlinuz".into())),
                ("modules for guests", Ok("/lib/modules/6.1".into())),
            ],
            qemu: Ok("QEMU emulator version 10.0.2 (Debian 1:10.0.2+ds-2~bpo12+1)".into()),
            busybox: Ok("/bin/busybox".into()),
        }
    }

    fn slow() -> Result<(), String> {
        Err("there is no /dev/kvm".into())
    }

    fn lack() -> Result<String, String> {
        Err("it is missing; get it".into())
    }

    #[test]
    fn kvm_is_preferred_to_the_virtual_host() {
        assert_eq!(judge(&facts(Ok(()))).summary, "guests run directly on KVM");
        assert_eq!(judge(&facts(slow())).summary, "guests run in the virtual host");
        let without_qemu = |kvm| Facts { qemu: lack(), ..facts(kvm) };
        assert_eq!(judge(&without_qemu(Ok(()))).verdict, Verdict::Direct);
        assert_eq!(
            judge(&without_qemu(slow())).summary,
            "cannot run, because there is no /dev/kvm, and the virtual host lacks QEMU"
        );
    }

    #[test]
    fn every_part_of_the_virtual_host_is_needed_without_kvm() {
        let mut no_kernel = facts(slow());
        no_kernel.everywhere[0].1 = lack();
        let mut no_modules = facts(slow());
        no_modules.everywhere[1].1 = lack();
        for facts in [
            Facts { qemu: lack(), ..facts(slow()) },
            Facts { busybox: lack(), ..facts(slow()) },
            no_kernel,
            no_modules,
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
        for kvm in [Ok(()), slow()] {
            let report = judge(&Facts { available: ByteSize::from_mib(1 << 10), ..facts(kvm) });
            assert!(report.summary.contains("only 1.0 GiB of memory"), "{}", report.summary);
            assert_eq!(report.checks[1].grade, Grade::Problem);
        }
    }

    #[test]
    fn nothing_is_a_problem_where_guests_run() {
        let without_host = Facts { qemu: lack(), busybox: lack(), ..facts(Ok(())) };
        for facts in [facts(Ok(())), facts(slow()), without_host] {
            let report = judge(&facts);
            assert!(report.checks.iter().all(|check| check.grade != Grade::Problem), "{report:?}");
        }
    }

    #[test]
    fn an_old_qemu_is_a_warning() {
        let grade = |line: &str| {
            let report = judge(&Facts { qemu: Ok(line.into()), ..facts(slow()) });
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
    fn every_lack_on_this_machine_has_a_remedy() {
        let facts = Facts::collect().unwrap();
        for lack in [&facts.qemu, &facts.busybox].into_iter().filter_map(|fact| fact.as_ref().err())
        {
            assert!(lack.contains("install"), "{lack}");
        }
    }

    #[test]
    fn the_report_is_one_json_document() {
        let json = serde_json::to_value(judge(&Facts { qemu: lack(), ..facts(slow()) })).unwrap();
        assert_eq!(json["verdict"]["kind"], "cannot");
        assert_eq!(json["checks"][0]["grade"], "problem");
    }
}
