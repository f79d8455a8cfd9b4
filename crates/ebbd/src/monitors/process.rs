//! The process of a monitor: what it occupies, and how long it has run.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

use rustix::fs::{Mode, OFlags};
use tokio::net::UnixStream;

/// A process. Its files in /proc are open, so that another one that gets the same number later is
/// not taken for it.
#[derive(Debug)]
pub struct Process {
    status: File,
    stat: File,
    name: String,
    pid: u32,
}

/// What a process occupies, and its processor time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Anonymous and shared memory, and that of hugetlbfs, in bytes. Pages of other files are not
    /// counted: they are in the page cache anyhow.
    pub resident_bytes: u64,
    /// The shared memory in it, in bytes.
    pub shared_bytes: u64,
    /// What the host has swapped out, in bytes.
    pub swapped_bytes: u64,
    /// Processor time since its start, in milliseconds.
    pub processor_ms: u64,
}

impl Process {
    /// The process that listens on a socket (`SO_PEERCRED`).
    ///
    /// # Errors
    /// It has ended, or is in another PID namespace.
    pub fn behind(stream: &UnixStream) -> io::Result<Self> {
        match stream.peer_cred()?.pid() {
            Some(pid) if pid > 0 => Self::of(pid.unsigned_abs()),
            _ => Err(io::Error::other("its process is in another PID namespace")),
        }
    }

    /// The process with this number.
    ///
    /// # Errors
    /// It has ended.
    pub fn of(pid: u32) -> io::Result<Self> {
        let directory = File::open(format!("/proc/{pid}"))?;
        let open = |name: &str| -> io::Result<File> {
            let flags = OFlags::RDONLY | OFlags::CLOEXEC;
            Ok(rustix::fs::openat(&directory, name, flags, Mode::empty())?.into())
        };
        let name = read(&open("comm")?)?.trim_end().to_owned();
        Ok(Self { status: open("status")?, stat: open("stat")?, name, pid })
    }

    /// Its number.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// The name that it has given itself, or that of its program (`comm`, proc_pid_comm(5)).
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What it occupies now.
    ///
    /// # Errors
    /// It has ended.
    pub fn usage(&self) -> io::Result<Usage> {
        let status = read(&self.status)?;
        let kib = |name| field(&status, name).unwrap_or(0) * 1024;
        let resident = ["RssAnon:", "RssShmem:", "HugetlbPages:"].into_iter().map(kib).sum();
        Ok(Usage {
            resident_bytes: resident,
            shared_bytes: kib("RssShmem:"),
            swapped_bytes: kib("VmSwap:"),
            processor_ms: 10 * ticks(&read(&self.stat)?).unwrap_or(0),
        })
    }
}

/// A file of /proc from its beginning, as far as it is used here.
fn read(file: &File) -> io::Result<String> {
    let mut text = [0; 4096];
    let length = file.read_at(&mut text, 0)?;
    Ok(String::from_utf8_lossy(&text[..length]).into_owned())
}

fn field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.starts_with(name))?;
    line.split_ascii_whitespace().nth(1)?.parse().ok()
}

/// The sum of user and system time, in ticks of a hundredth of a second (`USER_HZ`). The program's
/// name before them may contain spaces and parentheses.
fn ticks(stat: &str) -> Option<u64> {
    let (_, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_ascii_whitespace().skip(11);
    let user: u64 = fields.next()?.parse().ok()?;
    let system: u64 = fields.next()?.parse().ok()?;
    Some(user.saturating_add(system))
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::process::Stdio;

    use super::*;

    #[test]
    fn this_process_occupies_memory_and_has_run() {
        let process = Process::of(std::process::id()).unwrap();
        let before = process.usage().unwrap();
        let held = vec![1_u8; 64 << 20];
        let mut sum = 0_u64;
        let after = loop {
            sum += held.iter().map(|byte| u64::from(*byte)).sum::<u64>();
            let after = process.usage().unwrap();
            if after.processor_ms >= before.processor_ms + 30 {
                break after;
            }
        };
        assert!(sum >= 64 << 20);
        assert!(after.resident_bytes >= before.resident_bytes + (31 << 20), "{after:?}");
    }

    #[test]
    fn an_ended_process_has_no_usage() {
        let mut program = std::process::Command::new("sh");
        program.args(["-c", "echo ready; read line"]);
        let mut child = program.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        // It has its own name from then on.
        let mut ready = [0];
        child.stdout.as_mut().unwrap().read_exact(&mut ready).unwrap();
        let process = Process::of(child.id()).unwrap();
        assert_eq!(process.name(), "sh");
        process.usage().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(process.usage().is_err());
    }

    #[test]
    fn a_name_does_not_hide_the_times() {
        let stat = "7 (a) b (c) S 1 7 7 0 -1 4194560 190 0 0 0 12 30 0 0 20 0 1 0 5 9 9 0 0";
        assert_eq!(ticks(stat), Some(42));
        assert_eq!(ticks("7 (a"), None);
    }
}
