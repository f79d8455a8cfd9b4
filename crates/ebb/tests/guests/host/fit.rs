//! `ebb host fit`: as many machines as it says are started, and then more.

use std::fs;

use ebb_agent::protocol::Command;
use rustix::process::Signal;
use serde_json::{Value, json};

use super::{Daemon, folder};
use crate::guest::{Guest, MIB};
use crate::harness::{Scene, additional_mib, eventually, when};
use crate::park::host_counter;
use crate::setup::Setup;

/// The host has plenty until little more than the limit of an emergency is left, and pauses none.
const SETTINGS: &str = "tight_percent = 7\npressed_percent = 6\nemergency_percent = 5\n\
                        pause_ms = 0\nstale_ms = 6000\n";
/// Memory of each machine in MiB, and what its guest holds of it in bytes.
const SIZE_MIB: u64 = 320;
const HELD: u64 = 170 * MIB;
/// How long a machine is observed, in seconds, and what each of them counts as: four hours.
const OBSERVED: u64 = 10;
const COUNTS: u64 = 4 * 3600;
/// Machines that boot at the same time.
const AT_A_TIME: usize = 2;
/// The least share of the machines that fitted, in percent.
const LEAST_PERCENT: u64 = 85;

fn setup<'a>(scene: &'a Scene, name: &str) -> Setup<'a> {
    folder(scene);
    let memory = format!("size={SIZE_MIB}M");
    Setup::new(scene).memory(&memory).socket(&format!("machines/{name}.sock"))
}

/// Has machines hold what they need, and waits until the daemon knows it.
fn hold(daemon: &Daemon, guests: &[(String, Guest)]) {
    for (_, guest) in guests {
        guest.wait_ready(1);
    }
    let held = |guest: &Guest| guest.send(Command::Hold { bytes: HELD, pattern: 1 });
    let jobs: Vec<_> = guests.iter().map(|(_, guest)| held(guest)).collect();
    for ((name, guest), job) in guests.iter().zip(jobs) {
        guest.outcome(job).unwrap();
        wait_known(daemon, name);
    }
}

fn wait_known(daemon: &Daemon, name: &str) {
    let most = (SIZE_MIB + additional_mib()) * MIB - HELD;
    eventually("the daemon knows what it holds", 30, || {
        let shown = daemon.machine(name);
        let available = shown["machine"]["statistics"]["available_bytes"].as_u64();
        when(available.is_some_and(|available| available < most), || shown.to_string())
    });
}

/// Makes what the daemon remembers as long as hours would.
fn lengthen_history(scene: &Scene) {
    let path = scene.path("state/state.json");
    let mut saved: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let multiply = |number: &mut Value| *number = json!(number.as_u64().unwrap() * COUNTS);
    let sizes = saved["state"]["history"]["profiles"]["default"].as_object_mut().unwrap();
    for needs in sizes.values_mut().flat_map(|it| it.as_object_mut().unwrap().values_mut()) {
        needs["counts"].as_array_mut().unwrap().iter_mut().for_each(multiply);
        multiply(&mut needs["sum"]);
    }
    fs::write(&path, saved.to_string()).unwrap();
}

/// Never too many, and at most 15 % too few.
///
/// What a machine needs is measured on this host. Only the length of the observation is given: it
/// counts as hours, and nothing else was seen in them.
pub fn is_what_fits(scene: &Scene) {
    let counters = || ["pswpout", "oom_kill"].map(host_counter);
    let before = counters();
    let memory = format!("{}M", SIZE_MIB + additional_mib());
    let fit = |daemon: &Daemon| daemon.json(&["fit", "--memory", &memory]);
    let first = setup(scene, "first").start();
    first.run(Command::Hold { bytes: HELD, pattern: 1 });
    let mut daemon = Daemon::start(scene, SETTINGS);
    eventually("it is observed", 60, || {
        let fit = fit(&daemon);
        when(fit["observed_seconds"].as_u64() >= Some(OBSERVED), || fit.to_string())
    });
    assert_eq!(daemon.end(Signal::TERM), Some(0));
    lengthen_history(scene);
    daemon = Daemon::start(scene, SETTINGS);
    wait_known(&daemon, "first");
    let mut guests = vec![("first".to_owned(), first)];
    let said = fit(&daemon);
    let fitting = said["machines"].as_u64().unwrap();
    assert!(fitting >= 8, "{said}");

    // As many as it says are admitted. One that boots counts with its size, so others wait for it.
    let socket = scene.path("ebbd.sock").display().to_string();
    let via = ["--via", socket.as_str()];
    let names: Vec<String> = (0..fitting).map(|number| format!("new-{number}")).collect();
    for names in names.chunks(AT_A_TIME) {
        let arguments = [&via[..], &["--via-wait", "40"]].concat();
        let start =
            |name: &String| (name.clone(), setup(scene, name).args(arguments.iter()).spawn());
        let new: Vec<_> = names.iter().map(start).collect();
        hold(&daemon, &new);
        guests.extend(new);
    }
    let is_well = |guests: &[(String, Guest)]| {
        assert_eq!(counters(), before, "swapped, or killed for lack of memory");
        assert!(guests.iter().all(|(_, guest)| guest.wrong_pages() == 0));
        let log = fs::read_to_string(scene.path("ebbd.log")).unwrap();
        assert!(!log.contains("the host is emergency") && !log.contains("ordered"), "{log}");
    };
    is_well(&guests);
    let (code, log) = setup(scene, "refused").args(via).spawn().wait_end();
    assert_eq!(code, Some(9), "{log}");
    is_well(&guests);

    // Those that fit besides, until the host is in an emergency or swaps.
    let mut more = 0;
    loop {
        let name = format!("more-{more}");
        let new = setup(scene, &name).spawn();
        guests.push((name, new));
        hold(&daemon, &guests[guests.len() - 1..]);
        let status = daemon.json(&["status"]);
        if status["level"] == "emergency" || counters() != before {
            break;
        }
        more += 1;
        let all = fitting + more;
        assert!(100 * fitting >= LEAST_PERCENT * all, "{fitting} of {all}: {said}");
    }
}
