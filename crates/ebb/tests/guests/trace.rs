//! Records KVM's last events before a guest's unexpected end in a small trace buffer of the kernel.
//!
//! Events cost microseconds in an emulated host: recording all exits would take a third of the time
//! of a test that writes much to its console. Only rare events are recorded, which do not slow down
//! tests.

use std::collections::BTreeMap;
use std::ffi::CStr;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use std::{fs, thread};

use rustix::mount::{MountFlags, mount};

/// Mount point of tracefs (Linux Documentation/trace/ftrace.rst).
const TRACEFS: &str = "/sys/kernel/tracing";
/// Size of each processor's buffer: some thousand events.
const BUFFER_KIB: &str = "256";
/// Events of the group `kvm`, each with a filter; a kernel may lack some. Only the last exit is
/// recorded: it contains the guest's address and the event that was being delivered (AMD64
/// Architecture Programmer's Manual, volume 2, appendix C: 7Fh is a shutdown).
const EVENTS: [(&str, &str); 3] =
    [("kvm_exit", "exit_reason == 0x7f"), ("kvm_inj_exception", "0"), ("kvm_page_fault", "0")];
/// Maximum number of lines of a report.
const REPORT_LINES: usize = 80;

/// Time for which a guest that does not answer is traced.
const MOMENT: Duration = Duration::from_millis(300);
/// Maximum number of lines of that trace.
const MOMENT_LINES: usize = 24;

/// Start of a line that reports a failure of the emulated host, not of a guest or its monitor.
pub const HOST_FAILED: &str = "the emulated host has failed: ";
/// Bits of a nested page fault's error code (AMD64 Architecture Programmer's Manual, volume 2,
/// section 15.25.6): a reserved bit was set, and the access was part of a walk of the guest's page
/// tables.
const RESERVED_BIT: u64 = 1 << 3;
const GUEST_TABLE_WALK: u64 = 1 << 33;
/// Number of equal faults in [`MOMENT`] that indicates an endless loop.
const FAULTS_WITHOUT_END: usize = 100;
/// Start of the kernel's addresses, and the length of a loop that waits for a spinlock.
const KERNEL: u64 = 0xffff_8000_0000_0000;
const LOOP_BYTES: u64 = 128;
/// Entries of external interrupts in a trace of a guest's kernel, with the offset that a call from
/// them has (Linux `arch/x86/include/asm/idtentry.h`).
const INTERRUPT_ENTRIES: [&str; 2] = [" asm_sysvec_", " asm_common_interrupt+"];
/// Time without progress of its counters after which a processor of the host counts as stuck.
const STILL: Duration = Duration::from_secs(2);

/// Interval of the pulse, and the delay of one beat that no load of the machine explains.
const BEAT: Duration = Duration::from_millis(100);
const STANDSTILL: Duration = Duration::from_secs(10);
/// Longest time between two beats of the pulse so far, in ms.
static LONGEST_BEAT_MS: AtomicU64 = AtomicU64::new(0);

/// A running trace.
#[derive(Debug, Clone)]
pub struct Trace {
    directory: PathBuf,
}

impl Trace {
    /// Mounts tracefs if necessary and starts the trace.
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
                // 0 means no filter.
                write(&format!("{event}/filter"), filter)?;
                write(&format!("{event}/enable"), "1")?;
            }
        }
        write("tracing_on", "1")?;
        thread::spawn(pulse);
        Ok(Self { directory })
    }

    /// The last events of a vCPU up to and including the triple fault that ended its guest.
    pub fn before_triple_fault(&self, vcpu: u32) -> String {
        report(&self.directory, vcpu)
    }
}

/// Sleeps for a short time, again and again, which nothing in a host that works can prevent for
/// seconds.
fn pulse() {
    let mut last = Instant::now();
    loop {
        thread::sleep(BEAT);
        let beat = last.elapsed();
        last += beat;
        LONGEST_BEAT_MS
            .fetch_max(beat.as_millis().try_into().unwrap_or(u64::MAX), Ordering::Relaxed);
    }
}

/// Whether the whole host stood still for a while since the last call of this function.
pub fn standstill() -> String {
    let longest = Duration::from_millis(LONGEST_BEAT_MS.swap(0, Ordering::Relaxed));
    if longest < STANDSTILL {
        return String::new();
    }
    format!("{HOST_FAILED}it stood still for {} s\n", longest.as_secs())
}

/// Present activity of all guests' vCPUs: for each vCPU the number of exits in [`MOMENT`] by reason
/// and address. Empty without KVM's events, that is, outside of a virtual host. `started`: the
/// guest's agent has answered at least once.
pub fn moment(started: bool) -> String {
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
            "{HOST_FAILED}a vCPU walks page tables that do not belong to its guest"
        );
    }
    if !started && waits_for_itself(&exits) {
        let _ = writeln!(
            report,
            "{HOST_FAILED}a vCPU waits in a loop for a lock that no running vCPU holds, before the \
             guest has loaded a driver of Ebb"
        );
    }
    if let Some(processor) = still_processor() {
        let _ = writeln!(report, "{HOST_FAILED}{processor} no longer counts time");
    }
    report
}

/// Whether exactly one vCPU runs, and only in one short loop of the guest's kernel.
///
/// This is what an interrupt that is injected twice leaves behind (CONTRIBUTING.md): the handler
/// waits for a lock that the code it interrupted holds with interrupts disabled.
fn waits_for_itself(exits: &[((&str, &str), usize)]) -> bool {
    let of_vcpus = || exits.iter().filter(|((thread, _), _)| thread.starts_with("vcpu"));
    let Some(((first, _), _)) = of_vcpus().next() else { return false };
    let mut addresses = Vec::new();
    for ((thread, event), _) in of_vcpus() {
        let address = event
            .split_once("reason interrupt rip 0x")
            .and_then(|(_, address)| u64::from_str_radix(address.trim(), 16).ok());
        match address {
            Some(address) if thread == first && address >= KERNEL => addresses.push(address),
            _ => return false,
        }
    }
    let (least, most) = (addresses.iter().min(), addresses.iter().max());
    least.zip(most).is_some_and(|(least, most)| most - least < LOOP_BYTES)
}

/// Sign in a guest's console that an interrupt was delivered while they were disabled: the
/// registers that an oops prints for an interrupted context have the interrupt flag clear, which no
/// processor does (see CONTRIBUTING.md for the emulator that does).
pub fn impossible_interrupt(console: &str) -> Option<&'static str> {
    const SIGN: &str = "the emulated host has failed: an interrupt was delivered while disabled\n";
    const INTERRUPT_FLAG: u64 = 1 << 9;
    let mut lines = console.lines();
    while lines.by_ref().any(|line| INTERRUPT_ENTRIES.iter().any(|name| line.contains(name))) {
        // RIP, code and stack pointer follow the entry's line.
        let flags =
            lines.clone().take(3).find_map(|line| line.split_once("EFLAGS: ")).map(|it| it.1);
        let flags = flags.and_then(|flags| u64::from_str_radix(flags.trim(), 16).ok());
        if flags.is_some_and(|flags| flags & INTERRUPT_FLAG == 0) {
            return Some(SIGN);
        }
    }
    None
}

/// Whether this is a fault on a page table of the guest outside of its memory, where no guest
/// places one.
fn walks_foreign_tables(event: &str) -> bool {
    const BITS: u64 = RESERVED_BIT | GUEST_TABLE_WALK;
    let code =
        event.strip_prefix("page_fault:").and_then(|event| event.rsplit_once("error_code 0x"));
    code.and_then(|(_, code)| u64::from_str_radix(code.trim(), 16).ok())
        .is_some_and(|code| code & BITS == BITS)
}

/// A processor of the host whose counters of busy and idle time (proc_stat(5)) do not advance while
/// those of others advance.
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

/// The lines of the thread with the last shutdown, up to the shutdown, including page faults of
/// others; without a shutdown, those of the last thread of this vCPU.
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
