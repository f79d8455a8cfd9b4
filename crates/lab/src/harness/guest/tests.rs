//! The driver against the real agent as an ordinary process, and against processes that misbehave.

use super::*;
use ebb_virtual_host::programs::find_agent;
use rustix::process::Signal;
use std::path::{Path, PathBuf};
use std::thread;

const LIMIT: Duration = Duration::from_secs(60);

/// The agent's program, built if necessary: cargo builds only the libraries that a test depends on.
fn agent() -> PathBuf {
    let status =
        Program::new(env!("CARGO")).args(["build", "--quiet", "--package", "ebb-agent"]).status();
    assert!(status.unwrap().success());
    find_agent(None).expect("cargo has put the agent beside this test")
}

fn script(text: &str) -> Guest {
    let mut shell = Program::new("/bin/sh");
    shell.args(["-c", text]);
    Guest::start(3, shell).unwrap()
}

/// Output of a guest when it is ready, for `printf`.
fn ready() -> String {
    let event = Event::Ready {
        uptime_ms: 1,
        kernel: "6.1".to_owned(),
        cpus: 1,
        memory: ebb_agent::meminfo::MemInfo::default(),
        balloon_driver: BalloonDriver::None,
        warnings: Vec::new(),
    };
    let line = String::from_utf8(event.to_line().unwrap()).unwrap();
    format!("printf '\\036%s\\n' '{}'", &line[1..line.len() - 1])
}

fn message(error: &LabError) -> String {
    error.to_string()
}

#[test]
fn the_real_agent_answers() {
    let mut guest = Guest::start(1, Program::new(agent())).unwrap();
    assert!(guest.wait_ready(LIMIT).unwrap() < LIMIT);
    let answer = guest.command(Command::MemInfo, LIMIT, &mut || {}).unwrap();
    assert!(answer.result["MemTotal"].as_u64().unwrap() > 0);
    let mut looks = 0;
    let slept = guest.command(Command::Sleep { ms: 700 }, LIMIT, &mut || looks += 1).unwrap();
    assert!(slept.waited >= slept.elapsed.saturating_sub(Duration::from_millis(1)));
    assert!(looks >= 1, "the caller is called back while it waits");
    let split = guest.exchange(Command::MemInfo, Sending::EndLast, LIMIT, &mut || {}).unwrap();
    assert!(split.result["MemTotal"].as_u64().unwrap() > 0);
    assert!(split.sent <= split.answered && split.answered <= split.sent + split.waited);
}

#[test]
fn a_command_that_fails_in_the_guest_is_reported() {
    let mut guest = Guest::start(1, Program::new(agent())).unwrap();
    guest.wait_ready(LIMIT).unwrap();
    let command = Command::read_file("/no/such/file");
    let text = message(&guest.command(command, LIMIT, &mut || {}).unwrap_err());
    assert!(text.starts_with("guest 1: the command failed in the guest: "), "{text}");
}

#[test]
fn a_monitor_that_ends_is_reported_with_its_last_messages() {
    let mut guest = script("echo '[0.1] Kernel panic'; echo 'cannot open /dev/kvm' >&2; exit 5");
    let text = message(&guest.wait_ready(LIMIT).unwrap_err());
    assert!(text.contains("exit code 5") && text.contains("sign of its agent"), "{text}");
    assert!(text.contains("last lines of its console:\n    [0.1] Kernel panic"), "{text}");
}

#[test]
fn the_log_of_the_monitor_is_part_of_the_explanation() {
    // The console stays open longer than the log, so that the log has been read when the console
    // ends.
    let mut guest = script("echo 'cannot open /dev/kvm' >&2; exec 2>&-; sleep 0.5");
    let text = message(&guest.wait_ready(LIMIT).unwrap_err());
    assert!(text.contains("last lines of its monitor:\n    cannot open /dev/kvm"), "{text}");
}

#[test]
fn a_killed_monitor_is_reported_with_the_signal() {
    let mut guest = script(&format!("{}; read line; kill -9 $$", ready()));
    guest.wait_ready(LIMIT).unwrap();
    let text = message(&guest.command(Command::MemInfo, LIMIT, &mut || {}).unwrap_err());
    assert!(text.contains("signal 9") && text.contains("end of its command"), "{text}");
}

#[test]
fn a_silent_guest_runs_into_the_limit() {
    let mut guest = script("echo booting; read forever");
    let text = message(&guest.wait_ready(Duration::from_millis(300)).unwrap_err());
    assert!(text.contains("no sign of its agent within 300ms"), "{text}");
    assert!(text.contains("booting"), "{text}");
}

#[test]
fn a_guest_that_restarts_has_lost_its_command() {
    let mut guest = script(&format!("{0}; read line; {0}; read forever", ready()));
    guest.wait_ready(LIMIT).unwrap();
    let text = message(&guest.command(Command::MemInfo, LIMIT, &mut || {}).unwrap_err());
    assert!(text.contains("restarted"), "{text}");
}

#[test]
fn answers_to_other_commands_are_ignored() {
    let done = |id: u64| {
        format!(
            "printf '\\036%s\\n' '{{\"done\":{{\"id\":{id},\"elapsed_ms\":{id},\"result\":null}}}}'"
        )
    };
    let mut guest =
        script(&format!("{}; read line; {}; {}; read forever", ready(), done(9), done(1)));
    guest.wait_ready(LIMIT).unwrap();
    let answer = guest.command(Command::MemInfo, LIMIT, &mut || {}).unwrap();
    assert_eq!(answer.elapsed, Duration::from_millis(1));
}

#[test]
fn a_started_command_can_be_awaited_later_and_in_another_monitor() {
    let done = |id: u64| {
        format!(
            "printf '\\036%s\\n' '{{\"done\":{{\"id\":{id},\"elapsed_ms\":{id},\"result\":null}}}}'"
        )
    };
    let mut source =
        script(&format!("{}; read line; read line; {}; read forever", ready(), done(3)));
    source.wait_ready(LIMIT).unwrap();
    let (first, second) =
        (source.begin(Command::MemInfo).unwrap(), source.begin(Command::VmStat).unwrap());
    let mut destination =
        script(&format!("read line; {}; {}; {}; read forever", done(2), done(3), done(1)));
    destination.goes_on_from(&mut source);
    destination.command(Command::MemInfo, LIMIT, &mut || {}).unwrap();
    for (begun, ms) in [(first, 1), (second, 2)] {
        assert_eq!(destination.finish(begun, LIMIT).unwrap().elapsed, Duration::from_millis(ms));
    }
}

#[test]
fn a_guest_that_ends_while_idle_is_detected() {
    let mut guest = script("read line; exit 4");
    assert!(guest.ended_by_itself().is_none());
    guest.process.close_input();
    guest.process.wait_end(LIMIT);
    let text = message(&guest.ended_by_itself().unwrap());
    assert!(text.contains("exit code 4"), "{text}");
}

#[test]
fn a_missing_program_is_named() {
    let text = message(&Guest::start(1, Program::new("/no/such/monitor")).unwrap_err());
    assert!(text.contains("/no/such/monitor"), "{text}");
}

#[test]
fn a_dropped_guest_is_gone() {
    let guest = script("read forever");
    let process = format!("/proc/{}", guest.pid());
    assert!(Path::new(&process).exists());
    drop(guest);
    assert!(!Path::new(&process).exists());
}

#[test]
fn guests_end_with_the_thread_that_started_them() {
    let guest = thread::spawn(|| script("read forever")).join().unwrap();
    let mut guest = guest;
    let status = guest.process.wait_end(LIMIT).unwrap();
    assert_eq!(status.signal(), Some(Signal::KILL.as_raw()));
}
