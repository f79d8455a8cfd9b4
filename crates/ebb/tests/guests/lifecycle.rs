//! Pause and resume, restarts, and ends during work.

use std::thread;
use std::time::Duration;

use ebb_agent::protocol::{Command, Event};
use ebb_vmm::api::VmState;
use rustix::process::Signal;

use crate::guest::{GIB, Guest, MIB};
use crate::harness::{Scene, Test, counts, eventually, when};
use crate::setup::Setup;

/// The tests.
pub const TESTS: &[Test] = &[
    Test::new("lifecycle::pause_and_resume", 240, pause_and_resume),
    Test::new("lifecycle::pause_while_inflating", 300, pause_while_inflating),
    Test::new("lifecycle::sigkill_while_inflating", 300, sigkill_while_inflating),
    Test::new("lifecycle::api_kill_while_inflating", 300, api_kill_while_inflating),
    Test::new("lifecycle::restart_in_place", 300, restart_in_place),
];

/// Time in which a paused guest must show no activity.
const PAUSE: Duration = Duration::from_millis(60);

fn pause_and_resume(scene: &Scene) {
    let guest = Setup::new(scene).args(["--cpus", "2"]).start();
    guest.run(Command::Hold { bytes: 32 * MIB, pattern: 5 });
    for _ in 0..20 {
        guest.put("/vm/pause");
        assert_eq!(guest.vm().state, VmState::Paused);
        let id = guest.send(Command::MemInfo);
        thread::sleep(PAUSE);
        assert_eq!(guest.poll(id), None, "a paused guest answered");
        guest.put("/vm/resume");
        assert_eq!(guest.vm().state, VmState::Running);
        guest.outcome(id).unwrap();
    }
    // Repeating either request is no error.
    for (target, state) in [("/vm/pause", VmState::Paused), ("/vm/resume", VmState::Running)] {
        guest.put(target);
        guest.put(target);
        assert_eq!(guest.vm().state, state);
    }
    assert_eq!(guest.wrong_pages(), 0);
    assert_eq!(guest.read_file("/sys/devices/system/cpu/online"), "0-1\n");
}

/// Memory of the guest whose balloon grows, what it has touched, and the target, in bytes. Without
/// huge pages an emulated host needs some seconds for this.
fn sizes() -> [u64; 3] {
    counts([256 * MIB, 160 * MIB, 140 * MIB], [GIB, 800 * MIB, 760 * MIB])
}

/// A guest whose balloon has just begun to grow.
pub fn inflating(setup: Setup<'_>) -> Guest {
    let [ram, touched, target] = sizes();
    let memory = format!("size={ram},thp=off");
    let guest = setup.memory(&memory).balloon("reporting=off").start();
    guest.run(Command::AllocTouchExit { bytes: touched });
    guest.set_target(target);
    eventually("the balloon grows", 20, || {
        let bytes = guest.metric("ebb_balloon_inflated_bytes_total");
        when(bytes > 0, || "nothing yet".to_owned())
    });
    guest
}

fn pause_while_inflating(scene: &Scene) {
    let guest = inflating(Setup::new(scene));
    guest.put("/vm/pause");
    let bytes = || guest.metric("ebb_balloon_inflated_bytes_total");
    let (inflated, resident) = (bytes(), guest.resident());
    thread::sleep(PAUSE);
    assert_eq!((bytes(), guest.resident()), (inflated, resident), "a paused guest ran");
    guest.put("/vm/resume");
    let [ram, _, target] = sizes();
    guest.inflate_to(target);
    assert!(guest.resident() <= ram - target + 4 * MIB);
}

fn sigkill_while_inflating(scene: &Scene) {
    let mut guest = inflating(Setup::new(scene));
    guest.signal(Signal::KILL);
    let (code, _) = guest.wait_end();
    assert_eq!((code, guest.end_signal()), (None, Some(9)));
    // Its companion removes its socket, or the next guest replaces it.
    let next = Setup::new(scene).start();
    assert_eq!(next.vm().pid, next.pid());
}

fn api_kill_while_inflating(scene: &Scene) {
    let mut guest = inflating(Setup::new(scene));
    guest.put("/vm/kill");
    let (code, log) = guest.wait_end();
    assert_eq!(code, Some(7), "{log}");
    assert!(log.contains("killed through the API"), "{log}");
    assert!(!guest.socket().exists());
}

fn restart_in_place(scene: &Scene) {
    let guest = Setup::new(scene)
        .memory("size=1G")
        .balloon("reporting=off")
        .args(["--cpus", "2", "--on-reboot", "reset"])
        .start();
    let fresh = guest.resident();
    guest.run(Command::AllocTouchExit { bytes: 700 * MIB });
    guest.inflate_to(64 * MIB);
    let used = guest.resident();
    assert!(used > 600 * MIB, "{used}");
    for restart in 2..=3 {
        guest.send(Command::Reboot);
        match guest.wait_ready(restart) {
            Event::Ready { uptime_ms, cpus, warnings, .. } => {
                assert_eq!((cpus, warnings), (2, Vec::new()));
                assert!(uptime_ms < 60_000, "{uptime_ms}");
            }
            other => panic!("{other:?}"),
        }
        let resident = guest.resident();
        assert!(
            resident < fresh + 64 * MIB,
            "{fresh} when fresh, {used} in use, {resident} after restart {restart}"
        );
        // The balloon's target belongs to the user and is kept; its driver is a new one.
        guest.inflate_to(64 * MIB);
        assert!(guest.statistics().is_ok() || guest.statistics().is_ok());
        guest.run(Command::AllocTouchExit { bytes: 200 * MIB });
    }
    assert_eq!(guest.vm().state, VmState::Running);
}
