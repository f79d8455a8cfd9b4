//! The configuration file.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use ebb_host_policy::Settings;
use serde::{Deserialize, Serialize};

use crate::ksm::KsmSettings;

/// Where machines are found, and how their host's memory is managed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, expecting = "a table of settings")]
pub struct Config {
    /// Directories of sockets: each socket in one of them is a monitor's, and its machine has the
    /// name of the file without its ending.
    pub machines: Vec<PathBuf>,
    /// Sockets of libvirt (libvirtd or virtqemud): each active domain is a machine of that name.
    pub libvirt: Vec<PathBuf>,
    /// A cgroup that all machines are in, if its limit is below the host's memory: a directory of
    /// /sys/fs/cgroup.
    pub cgroup: Option<PathBuf>,
    /// Where snapshots of machines that are stopped are written, a directory (libvirt has one of
    /// its own); without it, none is stopped.
    pub snapshots: Option<PathBuf>,
    /// How often machines are asked and a decision is made, in milliseconds.
    pub interval_ms: u64,
    /// What is decided.
    pub policy: Settings,
    /// KSM's settings while the daemon runs, by their names in /sys/kernel/mm/ksm. Those that are
    /// not named stay as they are.
    pub ksm: KsmSettings,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            machines: vec!["/run/ebb/machines".into()],
            libvirt: Vec::new(),
            cgroup: None,
            snapshots: None,
            interval_ms: 1000,
            policy: Settings::default(),
            ksm: KsmSettings::default(),
        }
    }
}

/// A configuration that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read {path:?}: {source}")]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// It is not the text of a configuration.
    #[error("{path:?}: {problem}")]
    Invalid {
        /// The file.
        path: PathBuf,
        /// The first thing that is wrong.
        problem: String,
    },
}

impl Config {
    /// Reads a file and checks it.
    ///
    /// # Errors
    /// [`ConfigError`] with the first problem.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| ConfigError::Unreadable { path: path.to_owned(), source })?;
        Self::parse(&text)
            .map_err(|problem| ConfigError::Invalid { path: path.to_owned(), problem })
    }

    /// Parses the text of a file (TOML) and checks it.
    ///
    /// # Errors
    /// What is wrong with it, and where.
    pub fn parse(text: &str) -> Result<Self, String> {
        let config: Self = toml::from_str(text).map_err(|error| error.to_string())?;
        config.check()?;
        Ok(config)
    }

    fn check(&self) -> Result<(), String> {
        if !(100..=60_000).contains(&self.interval_ms) {
            let interval = self.interval_ms;
            return Err(format!("interval_ms is {interval}; give one from 100 to 60000"));
        }
        let (interval, stale) = (self.interval_ms, self.policy.stale_ms);
        if interval.saturating_mul(3) > stale {
            return Err(format!(
                "interval_ms ({interval}) must be at most a third of policy.stale_ms ({stale}): \
                 machines would be asked too seldom for what they say to be believed"
            ));
        }
        let paths =
            self.machines.iter().chain(&self.libvirt).chain(&self.cgroup).chain(&self.snapshots);
        if let Some(path) = paths.into_iter().find(|path| !path.is_absolute()) {
            return Err(format!(
                "{} is not an absolute path; begin it with a slash",
                path.display()
            ));
        }
        let mut folders = BTreeSet::new();
        if let Some(path) = self.machines.iter().find(|path| !folders.insert(*path)) {
            return Err(format!("machines: {} is there twice; remove one", path.display()));
        }
        let mut sockets = BTreeSet::new();
        if let Some(path) = self.libvirt.iter().find(|path| !sockets.insert(*path)) {
            return Err(format!("libvirt: {} is there twice; remove one", path.display()));
        }
        self.ksm.check().map_err(|problem| format!("ksm: {problem}"))?;
        self.policy.check().map_err(|contradiction| format!("policy: {contradiction}"))
    }
}

#[cfg(test)]
mod tests {
    use ebb_host_policy::{Class, GIB};

    use super::*;

    #[test]
    fn an_empty_file_is_the_default() {
        assert_eq!(Config::parse("").unwrap(), Config::default());
    }

    #[test]
    fn a_whole_one() {
        let text = r#"
            machines = ["/run/ebb/machines", "/run/qemu"]
            cgroup = "/sys/fs/cgroup/machine.slice"
            interval_ms = 500
            [policy]
            tight_percent = 30
            machines = { "web-*" = "web", db = "db" }
            [policy.profiles.web]
            shares = 2000
            [policy.profiles.db]
            class = "latency"
            floor_bytes = 4294967296
        "#;
        let config = Config::parse(text).unwrap();
        assert_eq!(config.interval_ms, 500);
        let (name, profile) = config.policy.profile("db");
        assert_eq!((name, profile.class, profile.floor_bytes), ("db", Class::Latency, 4 * GIB));
        assert_eq!(config.policy.profile("web-7").1.shares, 2000);
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (text, words) in [
            ("interval_ms = 5", "interval_ms is 5; give one from 100"),
            ("interval_ms = 6000", "a third of policy.stale_ms (15000)"),
            ("machines = [\"run\"]", "not an absolute path"),
            ("machines = [\"/a\", \"/a\"]", "is there twice"),
            ("libvirt = [\"run\"]", "not an absolute path"),
            ("libvirt = [\"/a\", \"/a\"]", "libvirt: /a is there twice"),
            ("intervall_ms = 500", "intervall_ms"),
            ("[policy]\ntight_percent = 10", "must be below"),
            ("[policy]\nmachines = { a = \"b\" }", "no profile b"),
            ("interval_ms = \"x\"", "line 1"),
            ("\0", "line 1"),
            ("[ksm]\npages = 5", "no setting pages"),
            ("[ksm]\nrun = 2", "run is 2; give 0 or 1"),
            ("[ksm]\nadvisor_mode = \"x\"", "advisor_mode cannot be x"),
            ("[ksm]\nrun = -1", "line 2"),
            ("policy = 5", "expected a table of settings"),
            ("[policy]\ndefault = 5", "expected a table of a profile's settings"),
        ] {
            let problem = Config::parse(text).unwrap_err();
            assert!(problem.contains(words), "{text}: {problem}");
        }
        let error = Config::read(Path::new("/nonexistent")).unwrap_err();
        assert!(error.to_string().contains("/nonexistent"));
    }
}
