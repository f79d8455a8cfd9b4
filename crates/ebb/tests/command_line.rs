//! The command line as far as it needs no guest.

#![allow(clippy::expect_used)]

use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use ebb_vmm::api::{Client, VmInfo};
use ebb_vmm::probe::{self, KvmQuality};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

fn ebb(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_ebb")).args(arguments).output().expect("ebb runs")
}

fn errors(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn wrong_usage_is_reported_with_exit_code_2() {
    for arguments in [
        &["run"][..],
        &["run", "--kernel", "vmlinuz", "--memory", "size=4Q"],
        &["run", "--kernel", "vmlinuz", "--memory", "size=4G,colour=red"],
        &["run", "--kernel", "vmlinuz", "--cpus", "0"],
        &["run", "--kernel", "vmlinuz", "--no-such-option"],
        &["no-such-command"],
        &["--log", "=loud=", "doctor"],
    ] {
        let output = ebb(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {}", errors(&output));
        assert!(!errors(&output).is_empty(), "{arguments:?}");
    }
}

#[test]
fn a_kvm_that_emulates_is_refused() {
    let emulated = matches!(probe::probe().quality, KvmQuality::Emulated { .. });
    let output = ebb(&["run", "--kernel", "/nonexistent/vmlinuz", "--serial", "null"]);
    assert_eq!(output.status.code(), Some(1), "{}", errors(&output));
    // Elsewhere the missing kernel is the error.
    let expected = if emulated { "ebb-lab virtual-host" } else { "/nonexistent/vmlinuz" };
    assert!(errors(&output).contains(expected), "{}", errors(&output));
    let output = ebb(&[
        "run",
        "--kernel",
        "/nonexistent/vmlinuz",
        "--serial",
        "null",
        "--emulated-kvm",
        "use",
    ]);
    assert!(errors(&output).contains("/nonexistent/vmlinuz"), "{}", errors(&output));
}

#[test]
fn only_kernels_are_extracted() {
    let directory = tempfile::tempdir().expect("a directory");
    let output_path = directory.path().join("vmlinux");
    let unpack = |input: &str| {
        ebb(&["extract-vmlinux", "--json", input, output_path.to_str().expect("a path")])
    };
    let output = unpack(env!("CARGO_BIN_EXE_ebb"));
    // An ELF file is copied unchanged.
    assert!(output.status.success(), "{}", errors(&output));
    let document: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let written = std::fs::metadata(&output_path).expect("a file").len();
    assert_eq!(document["size_bytes"], written);
    std::fs::remove_file(&output_path).expect("the file can be removed");
    let output = unpack("/etc/hostname");
    assert_eq!(output.status.code(), Some(1));
    assert!(errors(&output).contains("/etc/hostname"), "{}", errors(&output));
    assert!(!output_path.exists(), "an incomplete file is left behind");
}

#[test]
fn every_command_has_help() {
    for command in ["run", "ctl", "doctor", "extract-vmlinux"] {
        let output = ebb(&[command, "--help"]);
        assert!(output.status.success(), "{command}");
        assert!(output.stdout.len() > 200, "{command}");
    }
}

/// A reader of standard error that does not read, such as a stopped pager, must not keep a monitor
/// from handling signals.
#[test]
fn a_monitor_ends_although_nobody_reads_its_log() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = |name: &str| directory.path().join(name).to_str().expect("a path").to_owned();
    let (_never_read, log) = std::io::pipe().expect("a pipe");
    let mut filler = log.try_clone().expect("a descriptor");
    let mut monitor = Command::new(env!("CARGO_BIN_EXE_ebb"))
        .args(["--log", "trace", "receive", "--emulated-kvm", "use", "--serial", "null"])
        .args(["--on-reboot", "exit", "--listen", &format!("unix:{}", path("migration"))])
        .args(["--api", &path("api")])
        .stdin(Stdio::null())
        .stderr(log)
        .spawn()
        .expect("ebb runs");
    let begin = Instant::now();
    let wait_until = |what: &str, done: &mut dyn FnMut() -> bool| {
        while !done() {
            assert!(begin.elapsed() < Duration::from_secs(120), "{what}");
            std::thread::sleep(Duration::from_millis(10));
        }
    };
    let client = Client::new(path("api"), Duration::from_secs(5));
    wait_until("its API is served", &mut || client.get::<VmInfo>("/vm").is_ok());
    // Blocks when the pipe is full, and keeps it full.
    let full = filler.try_clone().expect("a descriptor");
    std::thread::spawn(move || {
        let _ = std::io::Write::write_all(&mut filler, &vec![0; 1 << 20]);
    });
    wait_until("the pipe is full", &mut || {
        let mut fds = [PollFd::new(&full, PollFlags::OUT)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut fds, Some(&now)).expect("a state") == 0
    });
    let pid = rustix::process::Pid::from_child(&monitor);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).expect("a signal");
    let status = loop {
        if let Some(status) = monitor.try_wait().expect("a child") {
            break status;
        }
        if begin.elapsed() > Duration::from_secs(240) {
            let _ = monitor.kill();
            panic!("the monitor waits for its log");
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    assert_eq!(status.code(), Some(6));
}
