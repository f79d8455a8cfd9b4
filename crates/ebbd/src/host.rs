//! What the host says about its memory, or about that of a cgroup that all machines are in.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use ebb_host_policy::{Host, Pressure, Swap};
use ebb_program::of_meminfo;

/// Where the host's memory is read.
#[derive(Clone, Debug)]
pub struct Source {
    proc: PathBuf,
    /// The directory of a cgroup (version 2) whose limit is below the host's memory.
    cgroup: Option<PathBuf>,
}

/// The host's memory cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("{}: {problem}", path.display())]
pub struct Unreadable {
    /// The file.
    pub path: PathBuf,
    /// What is wrong with it.
    pub problem: String,
}

impl Source {
    /// The host, and a cgroup of it if one is given.
    pub fn new(cgroup: Option<PathBuf>) -> Self {
        Self { proc: "/proc".into(), cgroup }
    }

    /// Reads it.
    ///
    /// # Errors
    /// [`Unreadable`]: without /proc/meminfo nothing can be decided, without the rest less.
    pub fn read(&self) -> Result<Host, Unreadable> {
        let path = self.proc.join("meminfo");
        let text = read(&path)?;
        let bytes = |name: &str| of_meminfo(&text, name);
        let missing = |name: &str| Unreadable {
            path: path.clone(),
            problem: format!("it has no {name}; Linux 3.14 or newer is needed"),
        };
        let total_bytes = bytes("MemTotal").ok_or_else(|| missing("MemTotal"))?;
        let available_bytes = bytes("MemAvailable").ok_or_else(|| missing("MemAvailable"))?;
        let swap = bytes("SwapTotal").filter(|total| *total > 0).map(|total_bytes| Swap {
            total_bytes,
            used_bytes: total_bytes.saturating_sub(bytes("SwapFree").unwrap_or(total_bytes)),
            out_bytes: self.swapped_out(),
        });
        let pressure = fs::read_to_string(self.proc.join("pressure/memory"));
        let pressure = pressure.ok().and_then(|text| pressure_of(&text));
        let host = Host { total_bytes, available_bytes, swap, pressure };
        Ok(match &self.cgroup {
            Some(cgroup) if cgroup.exists() => within(host, cgroup)?,
            _ => host,
        })
    }

    /// The cgroup, if there is none at its path: a slice exists only with something in it.
    pub fn missing(&self) -> Option<&Path> {
        self.cgroup.as_deref().filter(|cgroup| !cgroup.exists())
    }

    fn swapped_out(&self) -> u64 {
        let text = fs::read_to_string(self.proc.join("vmstat")).unwrap_or_default();
        field(&text, "pswpout").unwrap_or(0).saturating_mul(4096)
    }
}

fn read(path: &Path) -> Result<String, Unreadable> {
    fs::read_to_string(path).map_err(|error: io::Error| Unreadable {
        path: path.to_owned(),
        problem: error.to_string(),
    })
}

/// The memory of a cgroup: its limit, if that is below the host's, and what is left below it
/// (Documentation/admin-guide/cgroup-v2.rst).
fn within(host: Host, cgroup: &Path) -> Result<Host, Unreadable> {
    let limit = ["memory.max", "memory.high"].map(|name| number(cgroup, name));
    let limit_bytes = limit.into_iter().flatten().min();
    let current = read(&cgroup.join("memory.current"))?;
    let current: u64 = current.trim().parse().unwrap_or(0);
    let Some(limit_bytes) = limit_bytes.filter(|limit| *limit < host.total_bytes) else {
        return Ok(host);
    };
    let stat = fs::read_to_string(cgroup.join("memory.stat")).unwrap_or_default();
    // Files in the page cache can be evicted.
    let files =
        field(&stat, "inactive_file").unwrap_or(0) + field(&stat, "active_file").unwrap_or(0);
    let left = limit_bytes.saturating_sub(current.saturating_sub(files));
    let pressure = fs::read_to_string(cgroup.join("memory.pressure"));
    Ok(Host {
        total_bytes: limit_bytes,
        available_bytes: left.min(host.available_bytes),
        swap: host.swap.map(|swap| Swap {
            used_bytes: number(cgroup, "memory.swap.current").unwrap_or(swap.used_bytes),
            ..swap
        }),
        pressure: pressure.ok().and_then(|text| pressure_of(&text)).or(host.pressure),
    })
}

/// The number in a file of a cgroup; `None` for `max`.
fn number(cgroup: &Path, name: &str) -> Option<u64> {
    fs::read_to_string(cgroup.join(name)).ok()?.trim().parse().ok()
}

fn field(text: &str, name: &str) -> Option<u64> {
    let mut lines = text.lines().map(str::split_ascii_whitespace);
    let mut line = lines.find(|line| line.clone().next() == Some(name))?;
    line.nth(1)?.parse().ok()
}

/// The totals of a file of pressure (Documentation/accounting/psi.rst).
fn pressure_of(text: &str) -> Option<Pressure> {
    let total = |kind: &str| {
        let line = text.lines().find(|line| line.split(' ').next() == Some(kind))?;
        line.split(' ').find_map(|word| word.strip_prefix("total="))?.parse().ok()
    };
    Some(Pressure { some_us: total("some")?, full_us: total("full")? })
}

#[cfg(test)]
mod tests {
    use ebb_host_policy::{GIB, MIB};

    use super::*;

    fn write(directory: &Path, files: &[(&str, &str)]) {
        for (name, text) in files {
            let path = directory.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
    }

    fn source(files: &[(&str, &str)], cgroup: &[(&str, &str)]) -> (tempfile::TempDir, Source) {
        let root = tempfile::tempdir().unwrap();
        write(&root.path().join("proc"), files);
        write(&root.path().join("group"), cgroup);
        let cgroup = (!cgroup.is_empty()).then(|| root.path().join("group"));
        let source = Source { proc: root.path().join("proc"), cgroup };
        (root, source)
    }

    const MEMINFO: &str = "MemTotal: 16777216 kB\nMemFree: 100 kB\nMemAvailable: 8388608 kB\n\
                           SwapTotal: 2097152 kB\nSwapFree: 1048576 kB\n";
    const PRESSURE: &str = "some avg10=0.00 avg60=1.00 avg300=0.00 total=5000\n\
                            full avg10=0.00 avg60=0.00 avg300=0.00 total=700\n";

    #[test]
    fn a_host() {
        let vmstat = "pswpin 4\npswpout 256\n";
        let files = [("meminfo", MEMINFO), ("vmstat", vmstat), ("pressure/memory", PRESSURE)];
        let (_root, source) = source(&files, &[]);
        let host = source.read().unwrap();
        assert_eq!((host.total_bytes, host.available_bytes), (16 * GIB, 8 * GIB));
        let swap = Swap { total_bytes: 2 * GIB, used_bytes: GIB, out_bytes: MIB };
        assert_eq!(host.swap, Some(swap));
        assert_eq!(host.pressure, Some(Pressure { some_us: 5000, full_us: 700 }));
    }

    #[test]
    fn without_swap_and_pressure() {
        let meminfo = "MemTotal: 1024 kB\nMemAvailable: 512 kB\nSwapTotal: 0 kB\n";
        let (_root, source) = source(&[("meminfo", meminfo)], &[]);
        let host = source.read().unwrap();
        assert_eq!((host.swap, host.pressure), (None, None));
        assert_eq!((host.total_bytes, host.available_bytes), (MIB, MIB / 2));
    }

    #[test]
    fn a_limit_below_the_host_s_counts() {
        let group = [
            ("memory.max", "4294967296\n"),
            ("memory.high", "max\n"),
            ("memory.current", "3221225472\n"),
            ("memory.stat", "anon 9\ninactive_file 536870912\nactive_file 0\n"),
            ("memory.pressure", PRESSURE),
            ("memory.swap.current", "4096\n"),
        ];
        let (root, source) = source(&[("meminfo", MEMINFO)], &group);
        let host = source.read().unwrap();
        assert_eq!((host.total_bytes, host.available_bytes), (4 * GIB, 3 * GIB / 2));
        assert_eq!(host.swap.map(|swap| swap.used_bytes), Some(4096));
        assert_eq!(host.pressure.map(|pressure| pressure.full_us), Some(700));
        assert_eq!(source.missing(), None);
        // A limit above the host's memory is none.
        write(&root.path().join("group"), &[("memory.max", "999999999999999\n")]);
        assert_eq!(source.read().unwrap().total_bytes, 16 * GIB);
    }

    #[test]
    fn a_cgroup_that_does_not_exist_yet_has_no_limit() {
        let (root, source) = source(&[("meminfo", MEMINFO)], &[("memory.current", "0\n")]);
        fs::remove_dir_all(root.path().join("group")).unwrap();
        assert_eq!(source.read().unwrap().total_bytes, 16 * GIB);
        assert_eq!(source.missing(), Some(&*root.path().join("group")));
    }

    #[test]
    fn what_is_missing_is_named() {
        let (_root, bad) = source(&[("meminfo", "MemTotal: 5 kB\n")], &[]);
        assert!(bad.read().unwrap_err().to_string().contains("no MemAvailable"));
        let (root, none) = source(&[("meminfo", MEMINFO)], &[("x", "")]);
        let error = none.read().unwrap_err();
        assert_eq!(error.path, root.path().join("group/memory.current"));
    }

    #[test]
    fn this_host() {
        let host = Source::new(None).read().unwrap();
        assert!(host.available_bytes > 0 && host.available_bytes < host.total_bytes);
    }
}
