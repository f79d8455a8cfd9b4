//! Runs the real agent as an ordinary process. With an integration test, cargo builds the program
//! itself for the tests of the workspace, and the tests on real guests put it into their images.

#![allow(clippy::unwrap_used)]

use std::process::{Command, Output};

fn agent(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_ebb-guest-agent")).args(arguments).output().unwrap()
}

#[test]
fn help_and_version() {
    let help = agent(&["--help"]);
    assert!(help.status.success(), "{help:?}");
    let text = String::from_utf8(help.stdout).unwrap();
    assert!(text.contains("ebb exec") && text.contains("[default: 3771]"), "{text}");
    assert!(agent(&["--version"]).status.success());
}

#[test]
fn wrong_ports_are_errors() {
    for port in ["", "-1", "4294967296", "ssh"] {
        let output = agent(&[&format!("--port={port}")]);
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(text.contains("--port"), "{text}");
    }
}
