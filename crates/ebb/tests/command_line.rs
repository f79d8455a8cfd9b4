//! The command line as far as it needs no guest.

#![allow(clippy::expect_used)]

use std::process::{Command, Output};

use ebb_vmm::probe::{self, KvmQuality};

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
