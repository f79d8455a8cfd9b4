//! Runs the real agent as an ordinary process and controls it over its standard streams.

#![allow(clippy::unwrap_used)]

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command as Program, Stdio};

use ebb_agent::churn::ChurnReport;
use ebb_agent::clock::ClockReading;
use ebb_agent::clock_watch::WatchReport;
use ebb_agent::count::CountReport;
use ebb_agent::page_faults::{FaultKind, FaultReport, TaskKind};
use ebb_agent::protocol::{COMMAND_LIMIT_BYTES, Command, Event, JOB_LIMIT, Request};
use ebb_agent::timed_reads::ReadReport;
use serde_json::Value;

struct Agent {
    process: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Agent {
    fn start() -> Self {
        let mut process = Program::new(env!("CARGO_BIN_EXE_ebb-agent"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let input = process.stdin.take();
        let output = BufReader::new(process.stdout.take().unwrap());
        let mut agent = Self { process, input, output };
        match agent.event() {
            Event::Ready { cpus, memory, kernel, .. } => {
                assert!(cpus > 0 && memory.total_bytes > 0 && !kernel.is_empty());
            }
            other => panic!("{other:?}"),
        }
        agent
    }

    fn send(&mut self, id: u64, command: Command) {
        self.write(&Request { id, command }.to_line().unwrap());
    }

    fn write(&mut self, bytes: &[u8]) {
        self.input.as_mut().unwrap().write_all(bytes).unwrap();
    }

    fn event(&mut self) -> Event {
        let mut line = Vec::new();
        self.output.read_until(b'\n', &mut line).unwrap();
        Event::from_line(&line).unwrap_or_else(|| panic!("{:?}", String::from_utf8_lossy(&line)))
    }

    fn run(&mut self, command: Command) -> Result<Value, String> {
        self.send(7, command);
        let first = self.event();
        // Said only of what runs in a process of its own.
        let end = if first == (Event::Started { id: 7 }) { self.event() } else { first };
        match end {
            Event::Done { id: 7, result, .. } => Ok(result),
            Event::Failed { id: 7, error } => Err(error),
            other => panic!("{other:?}"),
        }
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn workloads_run_and_report() {
    let mut agent = Agent::start();
    for command in
        [Command::AllocTouchExit { bytes: 20 << 20 }, Command::Memhog { bytes: 25 << 20 }]
    {
        agent.run(command).unwrap();
    }
    assert!(agent.run(Command::AllocTouchExit { bytes: u64::MAX }).unwrap_err().contains("bytes"));
    let text = agent
        .run(Command::Exec { argv: vec!["/bin/sh".into(), "-c".into(), "echo x; exit 3".into()] });
    let result = text.unwrap();
    assert_eq!((result["stdout"].as_str(), result["code"].as_i64()), (Some("x\n"), Some(3)));
    assert!(
        agent
            .run(Command::Exec { argv: vec!["/no/such".into()] })
            .unwrap_err()
            .contains("/no/such")
    );
}

#[test]
fn page_faults_are_counted() {
    let mut agent = Agent::start();
    let faults = |kind, tasks| Command::PageFaults {
        kind,
        tasks,
        threads: TaskKind::Processes,
        seconds: 1,
        mapping_bytes: 1 << 20,
    };
    for kind in [FaultKind::Fault1, FaultKind::Fault3] {
        let report: FaultReport =
            serde_json::from_value(agent.run(faults(kind, 2)).unwrap()).unwrap();
        assert_eq!((report.samples.len(), report.tasks.len()), (1, 2), "{report:?}");
        assert_eq!(report.tasks.iter().sum::<u64>(), report.ops_total, "{report:?}");
        assert!(report.ops_per_s > 0.0, "{report:?}");
    }
    assert!(agent.run(faults(FaultKind::Fault2, 65)).unwrap_err().contains("1 to 64"));
    // Cancelling the command kills all tasks: otherwise their pipe would keep the agent from
    // answering.
    agent.send(8, faults(FaultKind::Fault1, 3));
    assert_eq!(agent.event(), Event::Started { id: 8 });
    agent.send(9, Command::Cancel { id: 8 });
    let mut failed = false;
    while !failed {
        failed = matches!(agent.event(), Event::Failed { id: 8, .. });
    }
}

#[test]
fn churned_memory_is_right() {
    let mut agent = Agent::start();
    let churn = |operations, seconds| Command::Churn {
        bytes: 24 << 20,
        tasks: 2,
        seed: 9,
        operations,
        seconds,
    };
    let mut run =
        |command| serde_json::from_value::<ChurnReport>(agent.run(command).unwrap()).unwrap();
    let first = run(churn(Some(501), None));
    assert_eq!((first.operations, first.wrong_pages, first.refused), (501, 0, 0), "{first:?}");
    assert!(first.forks > 0 && first.pages_verified > first.pages_written, "{first:?}");
    assert_eq!(run(churn(Some(501), None)), first, "the seed determines the operations");
    let timed = run(churn(None, Some(1)));
    assert!(timed.operations > 0 && timed.wrong_pages == 0, "{timed:?}");
    assert!(agent.run(churn(None, None)).unwrap_err().contains("never end"));
}

#[test]
fn incremented_pages_are_right() {
    let mut agent = Agent::start();
    let count = |tasks| Command::Count {
        bytes: 2 << 20,
        tasks,
        kinds: 16,
        burst_pages: 64,
        pause_us: 100,
        seconds: 1,
    };
    let report: CountReport = serde_json::from_value(agent.run(count(2)).unwrap()).unwrap();
    assert!(report.sweeps > 0 && report.increments >= 512 * report.sweeps, "{report:?}");
    assert_eq!((report.wrong_pages, report.first_wrong), (0, None));
    assert!(agent.run(count(0)).unwrap_err().contains("tasks: 0"));
}

#[test]
fn held_memory_is_kept_and_verified() {
    let mut agent = Agent::start();
    for pattern in [1, u64::MAX] {
        agent.run(Command::Hold { bytes: 4 << 20, pattern }).unwrap();
    }
    let verified = agent.run(Command::VerifyHeld).unwrap();
    assert_eq!(
        (verified["held_bytes"].as_u64(), verified["wrong_pages"].as_u64()),
        (Some(8 << 20), Some(0))
    );
    let read = agent.run(Command::ReadHeld { passes: 3, seed: 1 }).unwrap();
    let report: ReadReport = serde_json::from_value(read).unwrap();
    assert_eq!((report.pages, report.ns_per_read.len()), (2048, 3));
    let released = agent.run(Command::Release).unwrap();
    assert_eq!(released["released_bytes"].as_u64(), Some(8 << 20));
    assert_eq!(agent.run(Command::VerifyHeld).unwrap()["held_bytes"].as_u64(), Some(0));
    assert!(agent.run(Command::ReadHeld { passes: 3, seed: 1 }).unwrap_err().contains("no memory"));
}

#[test]
fn files_and_counters_are_read_and_written() {
    let mut agent = Agent::start();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("file").to_string_lossy().into_owned();
    agent.run(Command::WriteFile { path: path.clone(), text: "täxt\n\u{1e}".to_owned() }).unwrap();
    let read = agent.run(Command::read_file(&path)).unwrap();
    assert_eq!(read["text"].as_str(), Some("täxt\n\u{1e}"));
    let command =
        Command::ReadFile { path: path.clone(), words: vec!["TEXT".into(), "tä".into()] };
    assert_eq!(agent.run(command).unwrap()["text"].as_str(), Some("täxt\n"));
    assert_eq!(
        agent.run(Command::TouchFile { path, bytes: 3 }).unwrap()["read_bytes"].as_u64(),
        Some(3)
    );
    assert!(agent.run(Command::MemInfo).unwrap()["MemTotal"].as_u64() > Some(0));
    assert!(agent.run(Command::VmStat).unwrap()["pgfault"].as_u64() > Some(0));
    assert!(agent.run(Command::read_file("/no/such")).unwrap_err().contains("/no/such"));
}

#[test]
fn invalid_lines_are_answered_and_harmless() {
    let mut agent = Agent::start();
    let long = vec![b'x'; COMMAND_LIMIT_BYTES + 1];
    for (line, word) in [
        (b"garbage".as_slice(), "not a command"),
        (b"{\"id\":1,\"command\":\"dance\"}", "dance"),
        (b"{\"id\":-1,\"command\":\"mem_info\"}", "not a command"),
        (&long, "longer than"),
    ] {
        agent.write(line);
        agent.write(b"\n");
        match agent.event() {
            Event::Failed { id: 0, error } => assert!(error.contains(word), "{error}"),
            other => panic!("{other:?}"),
        }
    }
    agent.run(Command::MemInfo).unwrap();
}

#[test]
fn commands_run_concurrently_up_to_a_limit_and_can_be_cancelled() {
    let mut agent = Agent::start();
    let count = JOB_LIMIT as u64;
    for id in 1..=count {
        agent.send(id, Command::Sleep { ms: 600_000 });
        assert_eq!(agent.event(), Event::Started { id });
    }
    agent.send(count + 1, Command::Sleep { ms: 600_000 });
    match agent.event() {
        Event::Failed { id, error } => {
            assert!(id == count + 1 && error.contains("already running"), "{error}");
        }
        other => panic!("{other:?}"),
    }
    agent.send(100, Command::Cancel { id: 5 });
    let mut ended = [agent.event(), agent.event()].map(|event| match event {
        Event::Done { id, .. } => id,
        Event::Failed { id, error } => {
            assert!(error.contains("signal 9"), "{error}");
            id
        }
        other => panic!("{other:?}"),
    });
    ended.sort_unstable();
    assert_eq!(ended, [5, 100]);
    for id in (1..=count).filter(|id| *id != 5) {
        agent.send(200 + id, Command::Cancel { id });
        let mut gone = false;
        while !gone {
            gone = matches!(agent.event(), Event::Failed { id: ended, .. } if ended == id);
        }
    }
}

#[test]
fn samples_are_sent_until_they_are_stopped() {
    let mut agent = Agent::start();
    agent.run(Command::Samples { interval_ms: 5 }).unwrap();
    for _ in 0..3 {
        assert!(matches!(agent.event(), Event::Sample { .. }));
    }
    agent.send(9, Command::Samples { interval_ms: 0 });
    while !matches!(agent.event(), Event::Done { id: 9, .. }) {}
    agent.run(Command::MemInfo).unwrap();
}

#[test]
fn clocks_are_read() {
    let mut agent = Agent::start();
    let mut read =
        || serde_json::from_value::<ClockReading>(agent.run(Command::Clock).unwrap()).unwrap();
    let (first, second) = (read(), read());
    assert!(
        first.monotonic_ns < second.monotonic_ns && first.tsc_after < second.tsc,
        "{first:?} {second:?}"
    );
    assert!(!first.clocksource.is_empty());
}

#[test]
fn clocks_are_watched_while_commands_run() {
    let mut agent = Agent::start();
    assert!(agent.run(Command::ClockWatchRead).unwrap_err().contains("not watched"));
    let start = |burst_readings| Command::ClockWatchStart { burst_readings, pause_us: 500 };
    assert!(agent.run(start(0)).unwrap_err().contains("burst of 0"));
    let cpus = agent.run(start(100)).unwrap()["cpus"].as_array().unwrap().len();
    assert!(agent.run(start(100)).unwrap_err().contains("already"));

    let report = |value| serde_json::from_value::<WatchReport>(value).unwrap();
    let mut last = report(agent.run(Command::ClockWatchRead).unwrap());
    assert_eq!(last.cpus.len(), cpus);
    for _ in 0..3 {
        // Each reader makes progress, however busy this machine is.
        loop {
            let next = report(agent.run(Command::ClockWatchRead).unwrap());
            let grows = last.cpus.iter().zip(&next.cpus).all(|(last, next)| {
                next.readings > last.readings
                    && next.monotonic_ns > last.monotonic_ns
                    && next.tsc > last.tsc
            });
            if grows {
                last = next;
                break;
            }
        }
        agent.run(Command::MemInfo).unwrap();
    }
    for cpu in &last.cpus {
        // Other programs may set real time, but not the monotonic clock.
        assert_eq!((cpu.backward.count, cpu.warps.count), (0, 0), "{cpu:?}");
        assert!(cpu.largest_gap_ns >= cpu.largest_burst_gap_ns.max(500_000), "{cpu:?}");
    }
    let end = report(agent.run(Command::ClockWatchStop).unwrap());
    assert!(end.readings() >= last.readings());
    assert!(agent.run(Command::ClockWatchStop).unwrap_err().contains("not watched"));
    agent.run(start(1)).unwrap();
}

#[test]
fn the_kernels_log_is_read_or_refused() {
    let mut agent = Agent::start();
    // The log may be empty or its reading forbidden, but there is no other outcome.
    let nowhere = Command::KernelLog { words: vec!["no such \u{1} words".to_owned()] };
    match (agent.run(Command::KernelLog { words: Vec::new() }), agent.run(nowhere)) {
        (Ok(all), Ok(none)) => {
            assert!(all["text"].is_string());
            assert_eq!(none["text"].as_str(), Some(""));
        }
        (Err(first), Err(second)) => {
            assert!(first.contains("kernel's log") && first == second, "{first}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_end_of_input_and_power_off_end_an_ordinary_process() {
    let mut agent = Agent::start();
    agent.send(1, Command::PowerOff);
    assert!(agent.process.wait().unwrap().success());
    let mut other = Agent::start();
    other.input.take();
    assert!(other.process.wait().unwrap().success());
}
