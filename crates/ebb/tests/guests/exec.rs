//! `ebb exec` and `ebb cp` with the agent in a real guest.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::process::{Command as Program, Output, Stdio};

use ebb_agent::protocol::Command;
use serde_json::Value;

use crate::guest::MIB;
use crate::harness::{Scene, Test, counts, eventually};
use crate::place::GUEST_AGENT;
use crate::saved::Restore;
use crate::setup::Setup;

/// The tests.
pub const TESTS: &[Test] = &[Test::new("exec::commands_and_files", 240, commands_and_files)];

fn commands_and_files(scene: &Scene) {
    let vsock = format!("cid=9,path={}", scene.path("vsock").display());
    let guest =
        Setup::new(scene).initrd(&scene.world.hostile_initrd).args(["--vsock", &vsock]).start();
    let socket = guest.socket().display().to_string();
    let ebb = |arguments: &[&str]| {
        let mut program = Program::new(&scene.world.ebb);
        program.args(arguments).stdin(Stdio::null());
        program.stdout(Stdio::piped()).stderr(Stdio::piped());
        program
    };
    let run = |arguments: &[&str]| ebb(arguments).output().unwrap();
    let output = run(&["exec", &socket, "--", "true"]);
    assert_eq!(output.status.code(), Some(125), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("install ebb-guest-agent"));

    let job = guest.send(Command::Exec { argv: vec![GUEST_AGENT.to_owned()] });
    guest.wait_started(job);
    let script = "echo $((6 * 7)); echo \"$HOME\" >&2; exit 5";
    let arguments =
        ["exec", "--wait", "60", "--json", &socket, "--", "/bin/busybox", "sh", "-c", script];
    let output = run(&arguments);
    assert_eq!(output.status.code(), Some(5), "{output:?}");
    let document: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&document["stdout"], &document["stderr"]), (&"42\n".into(), &"/\n".into()));
    assert_eq!(document["exit_code"], 5);

    // A directory there and back.
    let tree = scene.path("tree");
    fs::create_dir_all(tree.join("sub")).unwrap();
    let content: Vec<u8> = (0..counts(4 * MIB, 64 * MIB)).map(|byte| (byte / 3) as u8).collect();
    fs::write(tree.join("sub/file"), &content).unwrap();
    let there = format!("{socket}:/tmp/");
    let succeeds = |output: Output| assert!(output.status.success(), "{output:?}");
    succeeds(run(&["cp", tree.to_str().unwrap(), &there]));
    let back = scene.path("back");
    succeeds(run(&["cp", &format!("{socket}:/tmp/tree"), back.to_str().unwrap()]));
    assert!(fs::read(back.join("sub/file")).unwrap() == content);

    // Side by side.
    let script = "sleep 0.5; echo $0";
    let children: Vec<_> = (0..20)
        .map(|number| {
            let number = number.to_string();
            let shell = ["exec", &socket, "--", "/bin/busybox", "sh", "-c", script, &number];
            ebb(&shell).spawn().unwrap()
        })
        .collect();
    for (number, child) in children.into_iter().enumerate() {
        let output = child.wait_with_output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), format!("{number}\n"), "{output:?}");
    }

    // A command that runs while the machine is paused goes on.
    let paused = ebb(&["exec", &socket, "--", "/bin/busybox", "sh", "-c", "sleep 1; echo done"]);
    let child = { paused }.spawn().unwrap();
    succeeds(run(&["ctl", &socket, "pause"]));
    succeeds(run(&["ctl", &socket, "resume"]));
    let output = child.wait_with_output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "done\n", "{output:?}");

    // The kernel of a restored machine gets random bytes of its own: it has no driver for the VM
    // generation id.
    let reseeded = |times: &str| {
        let script = "dmesg | grep -c 'random numbers reseeded from the host'";
        eventually("random numbers", 20, || {
            let output = run(&["exec", &socket, "--", "/bin/busybox", "sh", "-c", script]);
            if output.stdout == times.as_bytes() { Ok(()) } else { Err(format!("{output:?}")) }
        });
    };
    reseeded("1\n");
    let script = "echo $$; exec sleep 100000";
    let mut child =
        ebb(&["exec", &socket, "--", "/bin/busybox", "sh", "-c", script]).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let process = format!("/proc/{}", line.trim());
    let exists = ["exec", &socket, "--", "/bin/busybox", "test", "-e", &process];
    succeeds(run(&exists));
    let file = scene.path("vm.snapshot");
    guest.save_and_end(&file);
    assert_eq!(child.wait().unwrap().code(), Some(125));
    let guest = Restore::new(scene, &file).args(["--vsock", &vsock]).start();
    assert_eq!(guest.socket().display().to_string(), socket);
    reseeded("2\n");
    // The command that ran when the machine was saved has lost its connection.
    eventually("the command is hung up", 60, || {
        let output = run(&exists);
        if output.status.code() == Some(1) { Ok(()) } else { Err(format!("{output:?}")) }
    });
    guest.end();
}
