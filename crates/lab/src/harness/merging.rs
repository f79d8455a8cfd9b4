//! Same-page merging of the guests of a series: its settings, and the broker through which monitors
//! share pages.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use ebb_page_merge::broker::ask_status;
use ebb_page_merge::kernel::knobs::RUN_STOP;
use ebb_page_merge::kernel::{
    Counter, KernelDomain, Knob, Ksm, KsmGuard, RUN_FOLDER, SYSFS, Values,
};

use crate::LabError;
use crate::harness::proc;
use crate::harness::survey::MergedBy;

/// The trust domain of all guests of a series.
pub const DOMAIN: &str = "lab";
/// Time limit until a broker listens.
const BROKER_LIMIT: Duration = Duration::from_secs(20);
const LOOK_INTERVAL: Duration = Duration::from_millis(20);

/// Whether pages of different nodes are merged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Nodes {
    /// They are merged (`merge_across_nodes=on`).
    Across,
    /// They are kept apart.
    Apart,
}

/// Whether and how equal pages of a series' guests are merged; all of them are of one trust domain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Merging {
    /// They are not merged.
    Off,
    /// By the monitors, which share pages through a broker.
    Owner(Nodes),
    /// By the monitors, each within its own guest.
    Alone,
    /// By the kernel.
    Kernel(Nodes),
}

impl Merging {
    /// The component that merges.
    pub fn by(self) -> Option<MergedBy> {
        match self {
            Self::Off => None,
            Self::Owner(_) | Self::Alone => Some(MergedBy::Owner),
            Self::Kernel(_) => Some(MergedBy::Kernel),
        }
    }

    /// Its part of the value of `--memory`.
    pub fn memory_option(self) -> String {
        let nodes = |nodes| match nodes {
            Nodes::Across => "on",
            Nodes::Apart => "off",
        };
        match self {
            Self::Off => String::new(),
            Self::Alone => ",merge=owner".to_owned(),
            Self::Owner(across) => format!(
                ",merge=owner,merge_domain={DOMAIN},merge_broker={},merge_across_nodes={}",
                broker_socket().display(),
                nodes(across)
            ),
            Self::Kernel(across) => {
                format!(",merge=kernel,merge_domain={DOMAIN},merge_across_nodes={}", nodes(across))
            }
        }
    }

    /// Description for a document.
    pub fn describe(self) -> Option<String> {
        let (by, nodes) = match self {
            Self::Off => return None,
            Self::Alone => return Some("pages merged within each guest".to_owned()),
            Self::Owner(nodes) => ("monitors", nodes),
            Self::Kernel(nodes) => ("kernel", nodes),
        };
        let nodes = match nodes {
            Nodes::Across => "across nodes",
            Nodes::Apart => "within each node",
        };
        Some(format!("pages merged by the {by} {nodes}"))
    }
}

/// Socket of the broker of this process's guests.
pub fn broker_socket() -> PathBuf {
    std::env::temp_dir().join(format!("ebb-lab-broker-{}", std::process::id()))
}

/// Shared pages, counted like KSM.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SharedCounts {
    /// Pages that are shared.
    pub pages_shared: u64,
    /// Further pages that share them, which are saved.
    pub pages_sharing: u64,
}

/// A broker; ends when dropped.
#[derive(Debug)]
pub struct Broker(Child);

impl Broker {
    /// Starts `ebb merge-broker`, and waits until it listens.
    ///
    /// # Errors
    /// [`LabError::StartMonitor`] if it cannot be run, [`LabError::Merging`] if it ends or does not
    /// listen.
    pub fn start(ebb: &Path) -> Result<Self, LabError> {
        let socket = broker_socket();
        let mut program = Command::new(ebb);
        program
            .args(["merge-broker", "--listen"])
            .arg(format!("unix:{}", socket.display()))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        crate::harness::guest_process::end_with_parent(&mut program);
        let child = program.spawn().map_err(|cause| LabError::StartMonitor {
            program: ebb.display().to_string(),
            cause,
        })?;
        let mut broker = Self(child);
        let begin = Instant::now();
        while !socket.exists() {
            if let Ok(Some(status)) = broker.0.try_wait() {
                return Err(LabError::Merging(format!(
                    "the broker ended ({status}) before it listened"
                )));
            }
            if begin.elapsed() > BROKER_LIMIT {
                return Err(LabError::Merging(format!(
                    "the broker does not listen after {BROKER_LIMIT:?}"
                )));
            }
            thread::sleep(LOOK_INTERVAL);
        }
        Ok(broker)
    }
}

impl Broker {
    /// Number of its process.
    pub fn pid(&self) -> u32 {
        self.0.id()
    }

    /// The pages that its clients share.
    ///
    /// # Errors
    /// [`LabError::Merging`].
    pub fn shared(&self) -> Result<SharedCounts, LabError> {
        let status = ask_status(&broker_socket(), BROKER_LIMIT)
            .map_err(|error| LabError::Merging(format!("cannot query the broker: {error}")))?;
        let nodes = status.domains.iter().flat_map(|domain| &domain.nodes);
        Ok(nodes.fold(SharedCounts::default(), |sum, node| SharedCounts {
            pages_shared: sum.pages_shared + node.stable_pages,
            pages_sharing: sum.pages_sharing + node.saved_pages(),
        }))
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
        // A killed broker cannot remove it.
        let _ = fs::remove_file(broker_socket());
    }
}

/// The host's KSM while the kernel merges the pages of guests.
#[derive(Debug)]
pub struct HostKsm {
    /// Restores the settings when the guests have ended.
    guard: KsmGuard,
    _domain: KernelDomain,
}

impl HostKsm {
    /// Prepares it, stopped, before any guest starts; machines of other trust domains are refused.
    ///
    /// # Errors
    /// [`LabError::Merging`].
    pub fn join(nodes: Nodes) -> Result<Self, LabError> {
        let failed = |error: &dyn std::fmt::Display| LabError::Merging(error.to_string());
        let domain =
            KernelDomain::join(Path::new(RUN_FOLDER), DOMAIN).map_err(|error| failed(&error))?;
        let ksm = Ksm::open(Path::new(SYSFS)).map_err(|error| failed(&error))?;
        let guard = KsmGuard::new(ksm).map_err(|error| failed(&error))?;
        let mut wanted = Values::new().with(Knob::Run, RUN_STOP);
        // A kernel without NUMA lacks this setting.
        if guard.before().get(Knob::MergeAcrossNodes).is_some() {
            wanted = wanted.with(Knob::MergeAcrossNodes, u64::from(nodes == Nodes::Across));
        }
        guard.ksm().apply(&wanted).map_err(|error| failed(&error))?;
        Ok(Self { guard, _domain: domain })
    }

    /// The shared pages of the whole host.
    ///
    /// # Errors
    /// [`LabError::Merging`].
    pub fn shared(&self) -> Result<SharedCounts, LabError> {
        let counters =
            self.guard.ksm().counters().map_err(|error| LabError::Merging(error.to_string()))?;
        Ok(SharedCounts {
            pages_shared: counters.count(Counter::PagesShared),
            pages_sharing: counters.count(Counter::PagesSharing),
        })
    }

    /// Changes a setting for the whole host.
    ///
    /// # Errors
    /// [`LabError::Merging`].
    pub fn set(&self, knob: Knob, value: u64) -> Result<(), LabError> {
        let wanted = Values::new().with(knob, value);
        self.guard.ksm().apply(&wanted).map_err(|error| LabError::Merging(error.to_string()))
    }

    /// Sets the number of pages to scan per second, not counting the time of the scan.
    ///
    /// # Errors
    /// [`LabError::Merging`].
    pub fn set_pace(&self, pages_per_second: u64) -> Result<(), LabError> {
        const REST_MS: u64 = 20;
        self.set(Knob::SleepMillisecs, REST_MS)?;
        self.set(Knob::PagesToScan, (pages_per_second * REST_MS / 1000).max(1))
    }
}

/// Thread id of the kernel's thread that merges.
///
/// # Errors
/// [`LabError::SystemFile`], [`LabError::Merging`].
pub(crate) fn kernel_thread() -> Result<u32, LabError> {
    let processes = fs::read_dir("/proc").map_err(LabError::of_file("/proc"))?;
    processes
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok())
        .find(|pid| {
            fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim() == "ksmd")
        })
        .ok_or_else(|| {
            LabError::Merging(
                "there is no kernel thread ksmd, although the kernel has KSM".to_owned(),
            )
        })
}

/// Processor time of a process's thread; for a running one, up to the last tick of the clock.
///
/// # Errors
/// [`LabError::SystemFile`], [`LabError::MissingField`].
pub(crate) fn running_ns(pid: u32, thread: u32) -> Result<u64, LabError> {
    let path = PathBuf::from(format!("/proc/{pid}/task/{thread}/schedstat"));
    let text = fs::read_to_string(&path).map_err(LabError::of_file(&path))?;
    proc::schedstat(&text)
        .map(|times| times.running_ns)
        .ok_or(LabError::MissingField { path, field: "time spent on the CPU" })
}

/// Processor time of the thread of a monitor that merges.
///
/// # Errors
/// [`LabError::SystemFile`], [`LabError::MissingField`], and [`LabError::Merging`] without such a
/// thread.
pub(crate) fn monitor_running_ns(pid: u32) -> Result<u64, LabError> {
    let path = PathBuf::from(format!("/proc/{pid}/task"));
    let threads = fs::read_dir(&path).map_err(LabError::of_file(&path))?;
    let thread = threads
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok())
        .find(|thread| {
            let name = fs::read_to_string(path.join(thread.to_string()).join("comm"));
            name.is_ok_and(|name| name.trim() == "merge")
        })
        .ok_or_else(|| LabError::Merging(format!("process {pid} has no thread that merges")))?;
    running_ns(pid, thread)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_name_the_backend_and_whether_nodes_are_merged() {
        assert_eq!(Merging::Off.memory_option(), "");
        let owner = Merging::Owner(Nodes::Apart).memory_option();
        assert!(owner.starts_with(",merge=owner,merge_domain=lab,merge_broker=/"), "{owner}");
        assert!(owner.ends_with(",merge_across_nodes=off"), "{owner}");
        let kernel = Merging::Kernel(Nodes::Across).memory_option();
        assert_eq!(kernel, ",merge=kernel,merge_domain=lab,merge_across_nodes=on");
    }

    #[test]
    fn a_broker_that_cannot_be_run_or_ends_at_once_is_reported() {
        assert!(matches!(
            Broker::start(Path::new("/no/such/ebb")),
            Err(LabError::StartMonitor { .. })
        ));
        let error = Broker::start(Path::new("/bin/false")).unwrap_err().to_string();
        assert!(error.contains("ended"), "{error}");
    }
}
