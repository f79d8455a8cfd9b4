//! What KVM did just before a guest ended in a way that it should not: the kernel's trace buffer,
//! always on, small.
//!
//! Events cost microseconds in an emulated host: all exits of a test that writes much to its
//! console take a third of its time. What is recorded here is rare, so that a test takes as long
//! with it as without.

use std::collections::BTreeMap;
use std::ffi::CStr;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fs, thread};

use rustix::mount::{MountFlags, mount};

/// Where tracefs is mounted (Linux Documentation/trace/ftrace.rst).
const TRACEFS: &str = "/sys/kernel/tracing";
/// Size of the buffer of each processor: some thousand events.
const BUFFER_KIB: &str = "256";
/// Events of the group `kvm`, each with a filter; a kernel may lack some. Of the exits the last one
/// counts: it tells where the guest was and what was being delivered to it (AMD64 Architecture
/// Programmer's Manual, volume 2, appendix C: 7Fh is a shutdown).
const EVENTS: [(&str, &str); 3] =
    [("kvm_exit", "exit_reason == 0x7f"), ("kvm_inj_exception", "0"), ("kvm_page_fault", "0")];
/// Lines that a report holds.
const REPORT_LINES: usize = 80;

/// How long a guest that does not answer is looked at.
const MOMENT: Duration = Duration::from_millis(300);
/// Lines on what it did.
const MOMENT_LINES: usize = 24;

/// Begins a line that tells that the emulated host has failed, and neither a guest nor its monitor.
pub const HOST_FAILED: &str = "the emulated host has failed: ";
/// Bits of a nested page fault's code (AMD64 Architecture Programmer's Manual, volume 2, section
/// 15.25.6): a reserved bit was set, and the access was one of a walk through the guest's own page
/// tables.
const RESERVED_BIT: u64 = 1 << 3;
const GUEST_TABLE_WALK: u64 = 1 << 33;
/// So many of the same such fault in a moment are no accident of one.
const FAULTS_WITHOUT_END: usize = 100;
/// A processor of the host that counts no time for so long does nothing any more.
const STILL: Duration = Duration::from_secs(2);

/// A trace that runs.
#[derive(Debug, Clone)]
pub struct Trace {
    directory: PathBuf,
}

impl Trace {
    /// Mounts tracefs where it is not and begins to record; says why if it cannot.
    pub fn start() -> Result<Self, String> {
        let directory = PathBuf::from(TRACEFS);
        if !directory.join("trace").exists() {
            mount("tracefs", TRACEFS, "tracefs", MountFlags::empty(), None::<&CStr>)
                .map_err(|error| format!("cannot mount {TRACEFS}: {error}"))?;
        }
        let write = |name: &str, text: &str| {
            let path = directory.join(name);
            fs::write(&path, text)
                .map_err(|error| format!("cannot write {}: {error}", path.display()))
        };
        write("buffer_size_kb", BUFFER_KIB)?;
        for (event, filter) in EVENTS {
            let event = format!("events/kvm/{event}");
            if directory.join(&event).exists() {
                // Zero stands for no filter.
                write(&format!("{event}/filter"), filter)?;
                write(&format!("{event}/enable"), "1")?;
            }
        }
        write("tracing_on", "1")?;
        Ok(Self { directory })
    }

    /// The last events of a vCPU whose guest has ended with a triple fault, that one being the
    /// last.
    pub fn before_triple_fault(&self, vcpu: u32) -> String {
        report(&self.directory, vcpu)
    }
}

/// What the vCPUs of all guests do right now: how often each left the guest in a moment, why and
/// from where. Without KVM's events, as anywhere but in a virtual host, nothing.
pub fn moment() -> String {
    let directory = Path::new(TRACEFS).join("instances/ebb-moment");
    if fs::create_dir(&directory).is_err() {
        return String::new();
    }
    let write = |name: &str, text: &str| fs::write(directory.join(name), text);
    let _ = write("events/kvm/kvm_page_fault/enable", "1");
    let recorded = write("events/kvm/kvm_exit/enable", "1").map(|()| thread::sleep(MOMENT));
    let _ = write("tracing_on", "0");
    let text = recorded.and_then(|()| fs::read(directory.join("trace"))).unwrap_or_default();
    let _ = fs::remove_dir(&directory);
    let text = String::from_utf8_lossy(&text);
    let mut exits: BTreeMap<(&str, &str), usize> = BTreeMap::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let (thread, event) = (line.split_once('['), line.split_once("kvm_"));
        if let (Some((thread, _)), Some((_, event))) = (thread, event) {
            let event = event.split_once(" info1").map_or(event, |(event, _)| event);
            *exits.entry((thread.trim(), event)).or_default() += 1;
        }
    }
    let mut exits: Vec<_> = exits.into_iter().collect();
    exits.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    let mut report = format!("exits of {} ms, the most frequent ones:\n", MOMENT.as_millis());
    for ((thread, reason), count) in exits.iter().take(MOMENT_LINES) {
        let _ = writeln!(report, "{count:6} {thread} {reason}");
    }
    if exits
        .iter()
        .any(|((_, event), count)| *count >= FAULTS_WITHOUT_END && walks_foreign_tables(event))
    {
        let _ = writeln!(
            report,
            "{HOST_FAILED}a guest's processor walks page tables that are not the guest's"
        );
    }
    if let Some(processor) = still_processor() {
        let _ = writeln!(report, "{HOST_FAILED}{processor} counts no time any more");
    }
    report
}

/// Whether this is a fault at a page table of the guest that lies outside of its memory, where no
/// guest puts one.
fn walks_foreign_tables(event: &str) -> bool {
    const BITS: u64 = RESERVED_BIT | GUEST_TABLE_WALK;
    let code =
        event.strip_prefix("page_fault:").and_then(|event| event.rsplit_once("error_code 0x"));
    code.and_then(|(_, code)| u64::from_str_radix(code.trim(), 16).ok())
        .is_some_and(|code| code & BITS == BITS)
}

/// A processor of the host for which no time is counted, neither busy nor idle (proc_stat(5)),
/// while it is for others.
fn still_processor() -> Option<String> {
    let times = || -> Vec<(String, u64)> {
        let text = fs::read_to_string("/proc/stat").unwrap_or_default();
        let lines =
            text.lines().filter(|line| line.starts_with("cpu") && !line.starts_with("cpu "));
        let sum =
            |line: &str| line.split(' ').skip(1).filter_map(|word| word.parse::<u64>().ok()).sum();
        lines
            .map(|line| (line.split(' ').next().unwrap_or_default().to_owned(), sum(line)))
            .collect()
    };
    let before = times();
    thread::sleep(STILL);
    let after = times();
    let moved = |name: &str, time: u64| after.iter().any(|(of, now)| of == name && *now > time);
    let still = before.iter().find(|(name, time)| !moved(name, *time))?;
    before.iter().any(|(name, time)| moved(name, *time)).then(|| still.0.clone())
}

fn report(directory: &Path, vcpu: u32) -> String {
    let path = directory.join("trace");
    let text = match fs::read(&path) {
        Ok(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
        Err(error) => return format!("\nno trace: {}: {error}\n", path.display()),
    };
    let lines = select(&text, vcpu);
    let mut report = format!("\n--- last {} events of KVM for vCPU {vcpu}\n", lines.len());
    for line in lines {
        let _ = writeln!(report, "{line}");
    }
    report
}

/// The lines of the thread that saw a shutdown last, up to there, and page faults of others among
/// them; without a shutdown those of the thread of this vCPU that was seen last.
fn select(text: &str, vcpu: u32) -> Vec<&str> {
    let events: Vec<(&str, &str)> = text
        .lines()
        .filter(|line| !line.starts_with('#'))
        .filter_map(|line| Some((line.split_once('[')?.0.trim(), line)))
        .collect();
    let is_shutdown = |line: &str| line.contains("kvm_exit:") && line.contains("reason shutdown");
    let of_vcpu = |thread: &str| {
        thread.rsplit_once('-').is_some_and(|(name, _)| name == format!("vcpu{vcpu}"))
    };
    let last = events
        .iter()
        .rposition(|(_, line)| is_shutdown(line))
        .or_else(|| events.iter().rposition(|(thread, _)| of_vcpu(thread)));
    let Some(last) = last else { return Vec::new() };
    let thread = events[last].0;
    let mut lines: Vec<&str> = events[..=last]
        .iter()
        .rev()
        .filter(|(of, line)| *of == thread || line.contains("kvm_page_fault:"))
        .map(|(_, line)| *line)
        .take(REPORT_LINES)
        .collect();
    lines.reverse();
    lines
}
