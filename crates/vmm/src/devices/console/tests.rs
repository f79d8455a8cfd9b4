use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use super::*;
use crate::size::ByteSize;

const SOON: Duration = Duration::from_secs(60);

fn pipe() -> (File, ConsoleOutput) {
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    let (output, thread) = ConsoleOutput::to(Target::Stream(writer), RateLimits::default());
    thread.spawn("console", || {}).unwrap();
    (reader.into(), output)
}

fn file(path: &Path, max: u64) -> ConsoleOutput {
    let config = SerialConfig::File {
        path: path.to_owned(),
        max: ByteSize::from_bytes(max),
        limits: RateLimits::default(),
    };
    let (output, thread) = ConsoleOutput::open(&config).unwrap();
    thread.unwrap().spawn("console", || {}).unwrap();
    output
}

#[test]
fn a_stuck_reader_costs_only_output() {
    let (mut reader, mut console) = pipe();
    let pipe_bytes = rustix::pipe::fcntl_getpipe_size(&reader).unwrap();
    let total = (pipe_bytes + 3 * BACKLOG_BYTES).next_multiple_of(1024);
    // No call waits for the reader.
    for _ in 0..total / 1024 {
        assert_eq!(console.write(&[b'x'; 1024]).unwrap(), 1024);
    }
    assert!(console.dropped_bytes() > 0);
    console.finish(Duration::from_millis(10));
    // Output that was not dropped arrives as the reader reads.
    let kept = total as u64 - console.dropped_bytes();
    let (mut received, mut buffer) = (0, [0; 4096]);
    while received < kept {
        received += reader.read(&mut buffer).unwrap() as u64;
    }
    assert_eq!(received, kept);
}

#[test]
fn limited_output_waits_until_the_limit_allows_it_or_the_end() {
    let (mut reader, writer) = rustix::pipe::pipe().map(|(r, w)| (File::from(r), w)).unwrap();
    let limits = RateLimits { bandwidth: Some(1), ..RateLimits::default() };
    let (mut console, thread) = ConsoleOutput::to(Target::Stream(writer), limits);
    thread.spawn("console", || {}).unwrap();
    let mut received = [0; 100];
    // More than the burst, which leaves a debt of minutes.
    console.write_all(&[b'x'; 100]).unwrap();
    reader.read_exact(&mut received).unwrap();
    let throttle = console.throttle().unwrap().clone();
    let wait_delayed = |count| {
        while throttle.delayed() < count {
            thread::yield_now();
        }
    };
    console.write_all(&[b'y'; 100]).unwrap();
    wait_delayed(1);
    throttle.set(RateLimits::default(), Instant::now());
    console.wake();
    reader.read_exact(&mut received).unwrap();
    assert_eq!(received, [b'y'; 100]);
    throttle.set(limits, Instant::now());
    for _ in 0..2 {
        console.write_all(&[b'z'; 50]).unwrap();
        reader.read_exact(&mut received[..25]).unwrap();
    }
    console.finish(SOON);
    reader.read_exact(&mut received[..50]).unwrap();
    assert_eq!(console.dropped_bytes(), 0);
}

#[test]
fn a_reader_that_is_gone_costs_nothing() {
    let (reader, mut console) = pipe();
    drop(reader);
    console.write_all(b"after the reader left").unwrap();
    console.finish(SOON);
    console.write_all(b"more").unwrap();
    assert_eq!(console.dropped_bytes(), 25);
}

#[test]
fn a_file_receives_all_output_and_is_private() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("console");
    let mut console = file(&path, 1 << 20);
    console.write_all(&[b'y'; 10_000]).unwrap();
    console.finish(SOON);
    assert_eq!(fs::read(&path).unwrap(), vec![b'y'; 10_000]);
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(console.dropped_bytes(), 0);
}

#[test]
fn two_files_in_turn_bound_the_output() {
    let directory = tempfile::tempdir().unwrap();
    let (path, other) = (directory.path().join("console"), directory.path().join("console.1"));
    let mut all = Vec::new();
    // Also over several starts, each of which continues where the last one ended.
    for start in 0..5_u8 {
        let mut console = file(&path, 1000);
        let part: Vec<u8> = (0..700_u32).map(|byte| byte as u8 ^ start).collect();
        console.write_all(&part).unwrap();
        console.finish(SOON);
        all.extend(part);
        let (first, second) = (fs::read(&path).unwrap(), fs::read(&other).unwrap());
        assert!(first.len() <= 1000 && second.len() <= 1000);
        let kept = [[&first[..], &second[..]].concat(), [&second[..], &first[..]].concat()];
        assert!(kept.iter().any(|kept| all.ends_with(kept)), "start {start}");
        assert!(kept[0].len() >= all.len().min(1000), "start {start}");
    }
}

/// /dev/full has no room, ever; a file may have later.
#[test]
fn a_full_disk_drops_output_and_is_tried_again() {
    let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let (mut console, thread) =
        ConsoleOutput::to(Target::Stream(full.into()), RateLimits::default());
    thread.spawn("console", || {}).unwrap();
    for _ in 0..2 {
        console.write_all(&[b'z'; 100]).unwrap();
    }
    console.finish(SOON);
    assert_eq!(console.dropped_bytes(), 200);
    assert!(!console.writer.unwrap().lock().closed);
}

#[test]
fn a_console_that_is_not_a_file_is_refused() {
    let error = ConsoleOutput::open(&SerialConfig::File {
        path: "/dev/tty0".into(),
        max: ByteSize::from_bytes(1000),
        limits: RateLimits::default(),
    });
    assert!(error.is_err());
}
