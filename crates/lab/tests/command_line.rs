//! The command line of `ebb-lab` as far as it needs no guest.

#![allow(clippy::expect_used)]

use std::process::{Command, Output};

fn ebb_lab(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_ebb-lab")).args(arguments).output().expect("ebb-lab runs")
}

fn errors(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn wrong_usage_has_exit_code_2_and_a_message() {
    for arguments in [
        &["run"][..],
        &["run", "densty"],
        &["run", "density", "--scale", "huge"],
        &["run", "memhog", "--series", "fast"],
        &["run", "all", "--series", "reporting"],
        &["virtual-host", "--memory", "4Q", "--", "true"],
        &["no-such-command"],
        &["--log", "=loud=", "list"],
    ] {
        let output = ebb_lab(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {}", errors(&output));
        assert!(!errors(&output).is_empty(), "{arguments:?}");
    }
}

#[test]
fn every_command_has_help() {
    for command in ["list", "run", "results", "report", "doctor", "virtual-host", "guest-image"] {
        let output = ebb_lab(&[command, "--help"]);
        assert!(output.status.success(), "{command}");
        assert!(output.stdout.len() > 200, "{command}");
    }
}

#[test]
fn the_list_is_one_json_document() {
    let output = ebb_lab(&["list", "--json"]);
    assert!(output.status.success(), "{}", errors(&output));
    let document: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let experiments = document["experiments"].as_array().expect("a list");
    assert!(experiments.iter().any(|experiment| experiment["name"] == "density"));
}
