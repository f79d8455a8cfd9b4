//! Ends of a machine: an exit code, one line with the reason, and no files left behind.

use std::fs::File;
use std::process::Stdio;

use ebb_agent::protocol::{Command, Crash};
use rustix::process::Signal;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, tcgetattr};

use crate::guest::Guest;
use crate::harness::{Scene, Test, eventually, when};
use crate::setup::Setup;
use crate::tiny_kernel;

/// The tests.
pub const TESTS: &[Test] = &[
    Test::new("ends::power_off", 180, power_off),
    Test::new("ends::power_button", 180, power_button),
    Test::new("ends::reboot", 180, reboot),
    Test::new("ends::reboots_in_a_loop", 180, reboots_in_a_loop),
    Test::new("ends::panic", 180, panic),
    Test::new("ends::triple_fault", 180, triple_fault),
    Test::new("ends::signals", 240, signals),
    Test::new("ends::api_kill_while_paused", 180, api_kill_while_paused),
    Test::new("ends::from_a_terminal", 120, from_a_terminal),
];

/// Waits for the monitor's end and checks its exit code and message.
#[track_caller]
fn expect_end(mut guest: Guest, code: i32, words: &str) {
    let (found, log) = guest.wait_end();
    assert_eq!(found, Some(code), "{log}");
    let lines: Vec<_> = log.lines().collect();
    if code == 0 {
        assert_eq!(lines, [] as [&str; 0], "a guest that powers off causes no messages");
    } else {
        assert_eq!(lines.len(), 1, "{log}");
        assert!(lines[0].contains(words), "{log}");
    }
    assert!(!guest.socket().exists(), "the socket is left behind");
}

fn power_off(scene: &Scene) {
    let guest = Setup::new(scene).args(["--cpus", "2"]).start();
    guest.send(Command::PowerOff);
    expect_end(guest, 0, "");
}

fn power_button(scene: &Scene) {
    let guest = Setup::new(scene).start();
    // As acpid does: wait for KEY_POWER (116) pressed (1) at the input device (Linux
    // include/uapi/linux/input.h).
    let script = "head -c 24 /dev/input/event0 | hexdump -v -e '1/1 \"%02x\"'";
    let argv = ["/bin/busybox", "sh", "-c", script].map(str::to_owned).to_vec();
    let id = guest.send(Command::Exec { argv });
    // The program must be waiting when the button is pressed.
    eventually("the input device is open", 20, || {
        let handlers = guest.read_file("/proc/bus/input/devices");
        when(handlers.contains("Power Button") && handlers.contains("event0"), || {
            handlers.clone()
        })?;
        let count = guest.run(Command::Exec {
            argv: [
                "/bin/busybox",
                "sh",
                "-c",
                "ls -l /proc/[0-9]*/fd 2>/dev/null | grep -c input/event0",
            ]
            .map(str::to_owned)
            .to_vec(),
        });
        when(count["stdout"].as_str().is_some_and(|text| text.trim() != "0"), || count.to_string())
    });
    guest.put("/vm/power-button");
    let result = guest.outcome(id).unwrap();
    let bytes = result["stdout"].as_str().unwrap();
    assert!(bytes.ends_with("0100740001000000"), "{result}");
    guest.send(Command::PowerOff);
    expect_end(guest, 0, "");
}

fn reboot(scene: &Scene) {
    let guest = Setup::new(scene).args(["--on-reboot", "exit"]).start();
    guest.send(Command::Reboot);
    expect_end(guest, 3, "the guest rebooted");
}

/// A guest whose first instructions request the next reboot.
fn reboots_in_a_loop(scene: &Scene) {
    let (kernel, console) = (scene.path("kernel"), scene.path("console"));
    std::fs::write(&kernel, tiny_kernel::elf(tiny_kernel::REBOOT)).unwrap();
    let file = format!("file={}", console.display());
    let mut guest = Setup::new(scene).kernel(&kernel).serial(&file).start_api();
    let starts = || std::fs::read_to_string(&console).unwrap().lines().count();
    let waits = |guest: &Guest| guest.log().lines().count();
    eventually("a wait of 4 s", 60, || when(guest.log().contains("4s"), || guest.log()));
    // The first start, five reboots at once, and those after 250, 500, 1000 and 2000 ms.
    assert_eq!((starts(), waits(&guest)), (10, 5), "{}", guest.log());
    // No more lines, although the guest goes on.
    eventually("the reboot after 4 s", 30, || when(starts() == 11, || starts().to_string()));
    assert_eq!(waits(&guest), 5, "{}", guest.log());
    // It waits for 8 s now, and can be stopped and ended.
    for target in ["/vm/trim", "/vm/kill"] {
        let _ = guest.client().request("PUT", target, "");
    }
    let (code, log) = guest.wait_end();
    assert_eq!((code, log.lines().count()), (Some(7), 6), "{log}");
    assert_eq!(starts(), 11);
}

fn panic(scene: &Scene) {
    let guest = Setup::new(scene).start();
    guest.send(Command::Crash { how: Crash::Panic });
    expect_end(guest, 4, "panicked");
}

fn triple_fault(scene: &Scene) {
    let guest = Setup::new(scene).start();
    guest.send(Command::Crash { how: Crash::TripleFault });
    expect_end(guest, 4, "triple fault");
}

fn signals(scene: &Scene) {
    for (signal, name) in [(Signal::TERM, "SIGTERM"), (Signal::INT, "SIGINT")] {
        let guest = Setup::new(scene).start();
        guest.signal(signal);
        expect_end(guest, 6, name);
    }
}

fn api_kill_while_paused(scene: &Scene) {
    let guest = Setup::new(scene).start();
    guest.put("/vm/pause");
    guest.put("/vm/kill");
    expect_end(guest, 7, "killed through the API");
}

fn from_a_terminal(scene: &Scene) {
    let keyboard = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&keyboard).unwrap();
    unlockpt(&keyboard).unwrap();
    let path = ptsname(&keyboard, Vec::new()).unwrap().into_string().unwrap();
    let terminal = File::options().read(true).write(true).open(path).unwrap();
    let modes = || tcgetattr(&terminal).unwrap().local_modes;
    let before = modes();
    assert!(before.contains(LocalModes::ICANON | LocalModes::ECHO));

    let mut program = Setup::new(scene).serial("tty").program();
    let stream = || terminal.try_clone().unwrap();
    program.stdin(stream()).stdout(stream()).stderr(Stdio::null());
    let mut process = program.spawn().unwrap();
    eventually("the terminal is raw", 30, || {
        when(!modes().intersects(LocalModes::ICANON | LocalModes::ECHO), || {
            format!("{:?}", modes())
        })
    });
    rustix::io::write(&keyboard, b"\x01x").unwrap();
    let status = eventually("the monitor ends", 30, || {
        process.try_wait().unwrap().ok_or_else(|| "it runs".to_owned())
    });
    assert_eq!(status.code(), Some(6));
    assert_eq!(modes(), before, "the terminal's modes are restored");
    assert!(!scene.path("api").exists(), "the socket is left behind");
}
