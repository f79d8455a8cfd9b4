//! Support for tests of same-page merging: guests whose memory is merged, the broker, and the
//! host's pages that are actually shared.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command as Program, Stdio};

use ebb_lab::harness::guest_process::end_with_parent;
use ebb_page_merge::broker::BrokerStatus;
use ebb_vmm::api::{MergeInfo, MergeState, MergeStatistics};
use serde_json::{Value, json};

use crate::guest::Guest;
use crate::harness::{Scene, WRONG_CONTENT, eventually, when};
use crate::setup::Setup;

/// Bytes of a page.
pub const PAGE_BYTES: u64 = 4096;
/// Prefix of the names of files of stable pages.
const STABLE_NAME: &str = "memfd:ebb-stable";
/// Time limit for merging in seconds: some passes over a guest's memory in an emulated host.
const MERGE_LIMIT_S: u64 = 60;

/// Pages scanned per second: a guest of these tests in less than a second. Twice as many slow an
/// emulated processor down.
const PAGES_PER_SECOND: u64 = 100_000;

/// Configuration of a guest of this size whose monitor merges its pages; `more` is the rest of
/// `--memory`.
pub fn merged<'a>(scene: &'a Scene, size: &str, more: &str) -> Setup<'a> {
    Setup::new(scene).memory(&format!("size={size},thp=off,merge=owner{more}"))
}

impl Setup<'_> {
    /// Starts the monitor and waits for the agent; merging begins then. A booting guest would write
    /// to pages that were just merged, which takes an emulated processor many seconds.
    #[track_caller]
    pub fn start_and_merge(self) -> Guest {
        self.start_and_merge_beside(&[])
    }

    /// The same, while other guests are not scanned: that would slow the start down.
    #[track_caller]
    pub fn start_and_merge_beside(self, others: &[&Guest]) -> Guest {
        for other in others {
            other.set_merge(&json!({ "run": "stop" }));
        }
        let guest = self.start_api();
        guest.set_merge(&json!({ "run": "stop" }));
        guest.merge_quickly();
        guest.wait_ready(1);
        for guest in others.iter().copied().chain([&guest]) {
            guest.set_merge(&json!({ "run": "merge" }));
        }
        guest
    }
}

impl Guest {
    /// `GET /merge`.
    #[track_caller]
    pub fn merge(&self) -> MergeInfo {
        self.client().get("/merge").unwrap_or_else(|error| panic!("{error}"))
    }

    /// The statistics of a machine whose pages are merged.
    #[track_caller]
    pub fn merge_statistics(&self) -> MergeStatistics {
        let info = self.merge();
        info.statistics.clone().unwrap_or_else(|| panic!("no statistics in {info:?}"))
    }

    /// `PUT /merge`, which must be accepted.
    #[track_caller]
    pub fn set_merge(&self, change: &Value) -> MergeInfo {
        self.client().put_json("/merge", change).unwrap_or_else(|error| panic!("{change}: {error}"))
    }

    /// Scans the guest without the pauses that limit the load on a real guest.
    #[track_caller]
    pub fn merge_quickly(&self) {
        self.set_merge(&json!({
            "pages_per_second": PAGES_PER_SECOND,
            "cpu_percent": 50,
            "min_pass_millisecs": 0,
            "clean_passes": 1,
        }));
    }

    /// Waits until the monitor reports at least `bytes` of merged memory.
    #[track_caller]
    pub fn wait_merged(&self, bytes: u64) {
        eventually("equal pages are merged", MERGE_LIMIT_S, || {
            let info = self.merge();
            let merged = info.statistics.as_ref().and_then(|statistics| statistics.merged_bytes);
            when(merged >= Some(bytes), || format!("{bytes} bytes are awaited: {info:?}"))
        });
    }

    /// Waits until no memory is merged.
    #[track_caller]
    pub fn wait_unmerged(&self) {
        eventually("all pages are unmerged", MERGE_LIMIT_S, || {
            let info = self.merge();
            let merged = info.statistics.as_ref().and_then(|statistics| statistics.merged_bytes);
            let done = info.state == MergeState::Unmerged && merged == Some(0);
            when(done, || format!("{info:?}"))
        });
    }

    /// Unmerges all pages.
    #[track_caller]
    pub fn unmerge(&self) {
        self.set_merge(&json!({ "run": "unmerge" }));
        self.wait_unmerged();
    }

    /// Fails unless all held memory has its content.
    #[track_caller]
    pub fn check_held(&self) {
        assert_eq!(self.wrong_pages(), 0, "{WRONG_CONTENT}");
    }

    /// See [`stable_frames`].
    pub fn stable_frames(&self) -> BTreeSet<u64> {
        stable_frames(self.pid())
    }
}

/// Numbers of the host's pages that are mapped in a guest's memory as stable pages, whether or not
/// other machines map them, too. `pid` is its monitor's. Format in Linux
/// Documentation/admin-guide/mm/pagemap.rst.
pub fn stable_frames(pid: u32) -> BTreeSet<u64> {
    const PRESENT: u64 = 1 << 63;
    const OF_A_FILE: u64 = 1 << 61;
    const NUMBER: u64 = (1 << 55) - 1;
    let process = format!("/proc/{pid}");
    let maps = fs::read_to_string(format!("{process}/maps")).expect("the monitor runs");
    let pagemap = File::open(format!("{process}/pagemap")).expect("the monitor runs");
    let mut found = BTreeSet::new();
    // The guest's memory is mapped writable; the merging thread's mapping for comparisons is
    // read-only.
    for line in maps.lines().filter(|line| line.contains(STABLE_NAME) && line.contains(" rw-p ")) {
        let (start, rest) = line.split_once('-').expect("a range");
        let end = rest.split(' ').next().expect("an end");
        let [start, end] = [start, end]
            .map(|text| u64::from_str_radix(text, 16).expect("an address") / PAGE_BYTES);
        let mut entries = vec![0; (end - start) as usize * 8];
        pagemap.read_exact_at(&mut entries, start * 8).expect("entries of mapped pages");
        for entry in entries.as_chunks::<8>().0 {
            let entry = u64::from_le_bytes(*entry);
            // A page that was written to since is a private copy.
            if entry & PRESENT != 0 && entry & OF_A_FILE != 0 {
                assert_ne!(entry & NUMBER, 0, "page frame numbers are visible to root only");
                found.insert(entry & NUMBER);
            }
        }
    }
    found
}

/// `ebb merge-broker`; killed when dropped.
pub struct Broker {
    process: Child,
    /// Path of its socket.
    pub socket: PathBuf,
}

impl Broker {
    /// Starts it; `name` is unique in the test.
    #[track_caller]
    pub fn start(scene: &Scene, name: &str) -> Self {
        Self::run(scene, name, Program::new(&scene.world.ebb))
    }

    /// The same in a cgroup from its start on.
    #[track_caller]
    pub fn start_in(scene: &Scene, name: &str, cgroup: &Path) -> Self {
        let mut program = Program::new(&scene.world.busybox);
        let procs = cgroup.join("cgroup.procs");
        program.args(["sh", "-c", "echo $$ > $0 && exec \"$@\""]).arg(procs);
        program.arg(&scene.world.ebb);
        Self::run(scene, name, program)
    }

    #[track_caller]
    fn run(scene: &Scene, name: &str, mut program: Program) -> Self {
        let socket = scene.path(name);
        program.args(["merge-broker", "--listen", &format!("unix:{}", socket.display())]);
        program.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        end_with_parent(&mut program);
        let mut process = program.spawn().expect("ebb runs");
        eventually("the broker listens", 20, || {
            if let Some(status) = process.try_wait().unwrap() {
                let mut said = String::new();
                let _ = process.stderr.take().unwrap().read_to_string(&mut said);
                panic!("the broker has ended ({status}): {said}");
            }
            UnixStream::connect(&socket).map(drop).map_err(|error| error.to_string())
        });
        Self { process, socket }
    }

    /// Number of its process.
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Options that a member of a domain adds to `--memory`.
    pub fn member(&self, domain: &str) -> String {
        member(&self.socket, domain)
    }

    /// Its state.
    #[track_caller]
    pub fn status(&self, scene: &Scene) -> BrokerStatus {
        let mut program = Program::new(&scene.world.ebb);
        program.args(["merge-broker", "--json", "--status"]).arg(&self.socket);
        let output = program.output().expect("ebb runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// SIGKILL.
    pub fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    /// Whether it still runs.
    pub fn is_running(&mut self) -> bool {
        matches!(self.process.try_wait(), Ok(None))
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// As [`Broker::member`], for a broker that may not exist.
pub fn member(socket: &Path, domain: &str) -> String {
    format!(",merge_domain={domain},merge_broker={}", socket.display())
}

/// A setting of the kernel, changed for a test and restored at its end.
pub struct Knob {
    path: &'static str,
    before: String,
}

impl Knob {
    /// Writes `value` to the file.
    #[track_caller]
    pub fn set(path: &'static str, value: &str) -> Self {
        let before = fs::read_to_string(path).unwrap_or_else(|error| panic!("{path}: {error}"));
        fs::write(path, value).unwrap_or_else(|error| panic!("{value} to {path}: {error}"));
        Self { path, before }
    }
}

impl Drop for Knob {
    fn drop(&mut self) {
        let _ = fs::write(self.path, self.before.trim_end());
    }
}
