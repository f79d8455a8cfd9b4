//! Same-page merging of the guests of a series: whether, by whom, and the broker through which monitors share pages.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::LabError;
use crate::survey::MergedBy;

/// The trust domain of all guests of a series.
const DOMAIN: &str = "lab";
/// A broker listens by then.
const BROKER_LIMIT: Duration = Duration::from_secs(20);
const LOOK_INTERVAL: Duration = Duration::from_millis(20);

/// Whether pages of different nodes are merged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Nodes {
    /// They are (`merge_across_nodes=on`).
    Across,
    /// They are not.
    Apart,
}

/// Whether and how equal pages of a series' guests are merged; all of them are of one trust domain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Merging {
    /// They are not.
    Off,
    /// By the monitors, which share pages through a broker.
    Owner(Nodes),
    /// By the kernel.
    Kernel(Nodes),
}

impl Merging {
    /// By whom.
    pub fn by(self) -> Option<MergedBy> {
        match self {
            Self::Off => None,
            Self::Owner(_) => Some(MergedBy::Owner),
            Self::Kernel(_) => Some(MergedBy::Kernel),
        }
    }

    /// Whether monitors need a broker for it.
    pub fn needs_broker(self) -> bool {
        matches!(self, Self::Owner(_))
    }

    /// What `--memory` gets for it.
    pub fn memory_option(self) -> String {
        let nodes = |nodes| match nodes {
            Nodes::Across => "on",
            Nodes::Apart => "off",
        };
        match self {
            Self::Off => String::new(),
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

    /// In words, for a document.
    pub fn describe(self) -> String {
        let nodes = |nodes| match nodes {
            Nodes::Across => "across nodes",
            Nodes::Apart => "within each node",
        };
        match self {
            Self::Off => String::new(),
            Self::Owner(across) => format!(", pages merged by the monitors {}", nodes(across)),
            Self::Kernel(across) => format!(", pages merged by the kernel {}", nodes(across)),
        }
    }
}

/// Where the broker of this process's guests listens.
pub fn broker_socket() -> PathBuf {
    std::env::temp_dir().join(format!("ebb-lab-broker-{}", std::process::id()))
}

/// A broker; ends when dropped.
#[derive(Debug)]
pub struct Broker(Child);

impl Broker {
    /// Starts `ebb merge-broker`, and waits until it listens.
    ///
    /// # Errors
    /// [`LabError::StartMonitor`] if it cannot be run, [`LabError::Merging`] if it ends or does not listen.
    pub fn start(ebb: &Path) -> Result<Self, LabError> {
        let socket = broker_socket();
        let mut program = Command::new(ebb);
        program
            .args(["merge-broker", "--listen"])
            .arg(format!("unix:{}", socket.display()))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        crate::guest::end_with_parent(&mut program);
        let child = program
            .spawn()
            .map_err(|cause| LabError::StartMonitor { program: ebb.display().to_string(), cause })?;
        let mut broker = Self(child);
        let begin = Instant::now();
        while !socket.exists() {
            if let Ok(Some(status)) = broker.0.try_wait() {
                return Err(LabError::Merging(format!("the broker ended ({status}) before it listened")));
            }
            if begin.elapsed() > BROKER_LIMIT {
                return Err(LabError::Merging(format!("the broker does not listen after {BROKER_LIMIT:?}")));
            }
            thread::sleep(LOOK_INTERVAL);
        }
        Ok(broker)
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
        // It cannot do that itself any more.
        let _ = std::fs::remove_file(broker_socket());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_say_by_whom_and_whether_across_nodes() {
        assert_eq!(Merging::Off.memory_option(), "");
        let owner = Merging::Owner(Nodes::Apart).memory_option();
        assert!(owner.starts_with(",merge=owner,merge_domain=lab,merge_broker=/"), "{owner}");
        assert!(owner.ends_with(",merge_across_nodes=off"), "{owner}");
        let kernel = Merging::Kernel(Nodes::Across).memory_option();
        assert_eq!(kernel, ",merge=kernel,merge_domain=lab,merge_across_nodes=on");
        assert!(
            Merging::Owner(Nodes::Across).needs_broker() && !Merging::Kernel(Nodes::Across).needs_broker()
        );
    }

    #[test]
    fn a_broker_that_cannot_be_run_or_ends_at_once_is_told() {
        assert!(matches!(Broker::start(Path::new("/no/such/ebb")), Err(LabError::StartMonitor { .. })));
        let error = Broker::start(Path::new("/bin/false")).unwrap_err().to_string();
        assert!(error.contains("ended"), "{error}");
    }
}
