//! `ebb doctor --vm`: the isolation of a running machine's monitor.
//!
//! What the kernel reports on each thread decides; the monitor's own words are used only for what
//! other processes cannot see.

use std::fs;
use std::io;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use ebb_program::{Check, Grade};
use ebb_vmm::api::{Client, VmInfo};
use ebb_vmm::isolation::{IsolationInfo, IsolationMode};
use serde::Serialize;

const API_LIMIT: Duration = Duration::from_secs(15);
const OFF: &str = "start the machine without --isolate off";

/// The kernel's facts on a thread (Linux Documentation/filesystems/proc.rst, `status`).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Thread {
    name: String,
    /// Real, effective, saved and file system user ids.
    uids: Vec<u32>,
    gids: Vec<u32>,
    groups: Vec<u32>,
    /// Permitted, effective and inheritable capabilities.
    capabilities: u64,
    no_new_privileges: bool,
    /// Whether a filter is installed.
    is_filtered: bool,
}

#[derive(Clone, Debug, Serialize)]
struct Report {
    /// Process id of the monitor.
    pid: u32,
    summary: String,
    checks: Vec<Check>,
    /// The monitor's own report.
    isolation: IsolationInfo,
}

pub(super) fn run(socket: &Path, json: bool) -> anyhow::Result<ExitCode> {
    let vm: VmInfo = Client::new(socket, API_LIMIT).get("/vm")?;
    let threads = threads(vm.pid).with_context(|| {
        format!("cannot read the state of the monitor's threads in /proc/{}", vm.pid)
    })?;
    let mut checks = judge(&vm.isolation, &threads);
    // Without the right to see other processes' namespaces there is no such line.
    checks.extend(relatives(vm.pid).ok().as_deref().map(judge_relatives));
    let problems = checks.iter().filter(|check| check.grade == Grade::Problem).count();
    let warnings = checks.iter().filter(|check| check.grade == Grade::Warning).count();
    let summary = match (problems, warnings) {
        (0, 0) => "the monitor is isolated".to_owned(),
        (0, count) => format!("the monitor is isolated, except for {count} of the lines above"),
        (count, _) => format!("the monitor is not isolated: {count} problems"),
    };
    let report = Report { pid: vm.pid, summary, checks, isolation: vm.isolation };
    if json {
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        print!("{}", ebb_program::table(&report.checks, &report.summary));
    }
    Ok(if problems == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn threads(pid: u32) -> io::Result<Vec<Thread>> {
    let folder = format!("/proc/{pid}/task");
    let mut threads = Vec::new();
    for entry in fs::read_dir(folder)? {
        match fs::read_to_string(entry?.path().join("status")) {
            Ok(text) => threads.push(Thread::parse(&text)),
            // It has ended meanwhile.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(threads)
}

/// Processes that were forked from one another with that one, with their names: no other process
/// is in its mount namespace.
fn relatives(pid: u32) -> io::Result<Vec<(u32, String)>> {
    let of = |pid: u32| fs::read_link(format!("/proc/{pid}/ns/mnt"));
    let own = of(pid)?;
    if of(std::process::id())? == own {
        // It did not get one.
        return Err(io::ErrorKind::Unsupported.into());
    }
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let Some(other) = entry?.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        if other != pid && of(other).is_ok_and(|namespace| namespace == own) {
            let name = fs::read_to_string(format!("/proc/{other}/comm")).unwrap_or_default();
            found.push((other, name.trim_end().to_owned()));
        }
    }
    found.sort_unstable();
    Ok(found)
}

/// A line about boundaries that a forked machine does not have alone.
fn judge_relatives(relatives: &[(u32, String)]) -> Check {
    const NAME: &str = "relatives";
    /// Most of them that are named.
    const MOST: usize = 4;
    if relatives.is_empty() {
        let found = "none: user, namespaces and memory are its own";
        return Check::new(NAME, Grade::Ok, found, None);
    }
    let named: Vec<_> =
        relatives.iter().take(MOST).map(|(pid, name)| format!("{name} {pid}")).collect();
    let more = if relatives.len() > MOST { ", …" } else { "" };
    let found = format!(
        "{}: user, namespaces and memory of the time before a fork are shared with {}{more}; \
         cgroup, sockets, disks and companion are its own",
        relatives.len(),
        named.join(", ")
    );
    let remedy = "let only machines that trust one another come from one checkpoint \
                  (docs/checkpoints.md)";
    Check::new(NAME, Grade::Warning, found, Some(remedy))
}

impl Thread {
    fn parse(status: &str) -> Self {
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            line.unwrap_or_default().trim()
        };
        let numbers = |name: &str| {
            field(name).split_ascii_whitespace().filter_map(|number| number.parse().ok()).collect()
        };
        let set = |name: &str| u64::from_str_radix(field(name), 16).unwrap_or(u64::MAX);
        Self {
            name: field("Name").to_owned(),
            uids: numbers("Uid"),
            gids: numbers("Gid"),
            groups: numbers("Groups"),
            capabilities: set("CapPrm") | set("CapEff") | set("CapInh"),
            no_new_privileges: field("NoNewPrivs") == "1",
            // SECCOMP_MODE_FILTER.
            is_filtered: field("Seccomp") == "2",
        }
    }
}

/// A line for each boundary.
fn judge(info: &IsolationInfo, threads: &[Thread]) -> Vec<Check> {
    let is_on = info.mode == IsolationMode::Auto;
    let all = |name, found: &str, remedy, holds: &dyn Fn(&Thread) -> bool| {
        let without: Vec<_> =
            threads.iter().filter(|thread| !holds(thread)).map(|thread| &*thread.name).collect();
        if threads.is_empty() {
            return Check::new(name, Grade::Problem, "there are no threads", None);
        }
        if without.is_empty() {
            return Check::new(
                name,
                Grade::Ok,
                format!("{} threads: {found}", threads.len()),
                None,
            );
        }
        let found = format!("not so for {}", without.join(", "));
        Check::new(name, Grade::Problem, found, Some(remedy))
    };
    let present = |name, holds: bool, found: String, missing: &str, remedy| {
        if holds {
            return Check::new(name, Grade::Ok, found, None);
        }
        let reasons = info.missing.iter().find_map(|reason| reason.strip_prefix(missing));
        let reason = reasons.map_or_else(
            || "not in force".to_owned(),
            |reason| format!("this host does not permit it{reason}"),
        );
        Check::new(name, Grade::Warning, reason, Some(remedy))
    };
    let user = format!("user {}, group {}", info.uid, info.gid);
    let is_user = |thread: &Thread| {
        thread.uids.iter().all(|uid| *uid == info.uid)
            && thread.gids.iter().all(|gid| *gid == info.gid)
    };
    let mut checks = vec![
        all("user", &user, OFF, &|thread| is_user(thread) && (!is_on || info.uid != 0)),
        all("capabilities", "none", "please report this", &|thread| thread.capabilities == 0),
        all("new privileges", "impossible", "please report this", &|thread| {
            thread.no_new_privileges
        }),
        all("system calls", "filtered", "start the machine without --seccomp off", &|thread| {
            thread.is_filtered
        }),
    ];
    if !is_on {
        checks.push(Check::new("isolation", Grade::Problem, "off", Some(OFF)));
        return checks;
    }
    let mut unnamed = threads.iter().flat_map(|thread| &thread.groups);
    if unnamed.any(|group| *group != info.gid) {
        // Started by an ordinary user, who needs the group of /dev/kvm; it cannot give it up.
        let remedy = "start the machine as root, which then becomes a user without groups";
        checks.push(Check::new("groups", Grade::Warning, "those of the user", Some(remedy)));
    }
    checks.extend([
        present(
            "namespaces",
            !info.namespaces.is_empty(),
            info.namespaces.join(", "),
            "namespaces",
            "allow unprivileged user namespaces, or start the machine as root",
        ),
        present(
            "file system",
            info.empty_root,
            "empty, read-only".to_owned(),
            "namespaces",
            "as for namespaces",
        ),
        present(
            "Landlock",
            info.landlock,
            "refuses all paths".to_owned(),
            "Landlock",
            "use a kernel with Landlock (5.13 or newer, `landlock` among the lsm= modules)",
        ),
        present(
            "core scheduling",
            info.core_scheduling,
            "shares no processor core with others".to_owned(),
            "core scheduling",
            "use a kernel with CONFIG_SCHED_CORE, or turn off simultaneous multithreading",
        ),
        present(
            "cgroup",
            info.cgroup.is_some(),
            info.cgroup.clone().unwrap_or_default(),
            "cgroup",
            "--cgroup limits memory, processor time and threads",
        ),
    ]);
    checks
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATUS: &str = "Name:\tvcpu0\nUmask:\t0022\nUid:\t61184\t61184\t61184\t61184\n\
                          Gid:\t61184\t61184\t61184\t61184\nGroups:\t \nCapInh:\t0000000000000000\n\
                          CapPrm:\t0000000000000000\nCapEff:\t0000000000000000\n\
                          CapBnd:\t000001ffffffffff\nNoNewPrivs:\t1\nSeccomp:\t2\n\
                          Seccomp_filters:\t1\n";

    fn isolated() -> IsolationInfo {
        IsolationInfo {
            uid: 61184,
            gid: 61184,
            namespaces: vec!["mnt".to_owned()],
            empty_root: true,
            landlock: true,
            core_scheduling: true,
            seccomp: true,
            cgroup: Some("ebb".to_owned()),
            ..IsolationInfo::default()
        }
    }

    fn grades(info: &IsolationInfo, threads: &[Thread]) -> Vec<(String, Grade)> {
        let checks = judge(info, threads).into_iter();
        checks
            .filter(|check| check.grade != Grade::Ok)
            .map(|check| (check.name.to_string(), check.grade))
            .collect()
    }

    #[test]
    fn an_isolated_monitor_is_fine() {
        let thread = Thread::parse(STATUS);
        assert_eq!(thread.name, "vcpu0");
        assert_eq!(grades(&isolated(), &[thread.clone(), thread]), []);
    }

    #[test]
    fn each_right_that_is_left_is_found() {
        for (from, to, name) in [
            ("Uid:\t61184\t61184", "Uid:\t61184\t0", "user"),
            ("Gid:\t61184", "Gid:\t0", "user"),
            ("CapPrm:\t0000000000000000", "CapPrm:\t0000000000000001", "capabilities"),
            ("CapEff:\t0000000000000000\n", "", "capabilities"),
            ("NoNewPrivs:\t1", "NoNewPrivs:\t0", "new privileges"),
            ("Seccomp:\t2", "Seccomp:\t0", "system calls"),
        ] {
            assert!(STATUS.contains(from), "{from}");
            let threads = [Thread::parse(STATUS), Thread::parse(&STATUS.replacen(from, to, 1))];
            let wanted = vec![(name.to_owned(), Grade::Problem)];
            assert_eq!(grades(&isolated(), &threads), wanted, "{to}");
        }
        assert!(!grades(&isolated(), &[]).is_empty());
    }

    #[test]
    fn relatives_are_named_and_counted() {
        assert_eq!(judge_relatives(&[]).grade, Grade::Ok);
        let all: Vec<_> = (10..16).map(|pid| (pid, "ebb".to_owned())).collect();
        let check = judge_relatives(&all);
        assert_eq!(check.grade, Grade::Warning);
        assert!(check.found.starts_with("6: "), "{}", check.found);
        assert!(check.found.contains("ebb 13, …") && !check.found.contains("14"));
        // This process is in the namespace of those that ask.
        assert!(relatives(std::process::id()).is_err());
    }

    #[test]
    fn what_the_host_does_not_permit_is_a_warning_with_its_reason() {
        let missing = vec!["Landlock: the kernel does not have it".to_owned()];
        let info = IsolationInfo { landlock: false, missing, ..isolated() };
        let checks = judge(&info, &[Thread::parse(STATUS)]);
        let landlock = checks.iter().find(|check| check.name == "Landlock").unwrap();
        assert_eq!(landlock.grade, Grade::Warning);
        assert!(landlock.found.contains("does not have it"), "{}", landlock.found);
        let off = IsolationInfo { mode: IsolationMode::Off, ..isolated() };
        let wanted = vec![("isolation".to_owned(), Grade::Problem)];
        assert_eq!(grades(&off, &[Thread::parse(STATUS)]), wanted);
    }
}
