//! The workloads and queries that implement the commands.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;
use std::process::{Command as Program, Stdio};
use std::time::Instant;

use ebb_agent::kernel_log;
use ebb_agent::meminfo::{MemInfo, lines};
use ebb_agent::memory::{MEMHOG_STEP_BYTES, Mapping};
use ebb_agent::text::select_lines;
use serde_json::{Map, Value, json};

/// Debian's memhog.
const MEMHOG: &str = "/usr/bin/memhog";
/// Maximum length of a text in a result.
const TEXT_LIMIT_BYTES: u64 = 64 << 10;
/// Bytes to allocate between two checks of `MemAvailable`.
const FILL_STEP_BYTES: u64 = 4 << 20;
/// Size of a read into the page cache.
const READ_BYTES: usize = 1 << 20;

/// Result of a command.
pub type Outcome = Result<Value, String>;

/// Formats an error with the failed action.
pub fn describe(what: impl std::fmt::Display) -> impl FnOnce(io::Error) -> String {
    move |error| format!("{what}: {error}")
}

fn milliseconds(since: Instant) -> u64 {
    since.elapsed().as_millis() as u64
}

/// Allocates memory and writes all of it once; it is freed with the process.
pub fn alloc_touch(bytes: u64) -> Outcome {
    let mut mapping = Mapping::new(bytes).map_err(describe(format!("{bytes} bytes")))?;
    let started = Instant::now();
    mapping.fill(1, usize::MAX, |_| true);
    Ok(json!({ "touch_ms": milliseconds(started) }))
}

/// Runs the real memhog, or a built-in equivalent.
pub fn memhog(bytes: u64) -> Outcome {
    if Path::new(MEMHOG).exists() {
        let status = Program::new(MEMHOG)
            .arg(bytes.to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .status()
            .map_err(describe(MEMHOG))?;
        return if status.success() {
            Ok(json!({ "program": MEMHOG }))
        } else {
            Err(format!("{MEMHOG}: {status}"))
        };
    }
    let mut mapping = Mapping::new(bytes).map_err(describe(format!("{bytes} bytes")))?;
    let started = Instant::now();
    mapping.fill(0xff, MEMHOG_STEP_BYTES, |_| true);
    Ok(json!({ "program": "built-in", "touch_ms": milliseconds(started) }))
}

/// Allocates and writes until no more than `leave_bytes` are available.
pub fn fill_until(leave_bytes: u64) -> Outcome {
    let mut kept = Vec::new();
    let mut allocated_bytes = 0_u64;
    loop {
        let available_bytes = MemInfo::read().map_err(describe("/proc/meminfo"))?.available_bytes;
        if available_bytes <= leave_bytes {
            return Ok(
                json!({ "allocated_bytes": allocated_bytes, "available_bytes": available_bytes }),
            );
        }
        let step = FILL_STEP_BYTES.min(available_bytes - leave_bytes);
        let mut mapping =
            Mapping::new(step).map_err(describe(format!("after {allocated_bytes} bytes")))?;
        allocated_bytes += mapping.fill(1, usize::MAX, |_| true) as u64;
        kept.push(mapping);
    }
}

/// Reads up to `bytes` of a file or device.
pub fn touch_file(path: &str, bytes: u64) -> Outcome {
    let mut file = File::open(path).map_err(describe(path))?.take(bytes);
    let mut buffer = vec![0; READ_BYTES];
    let mut read_bytes = 0_u64;
    loop {
        match file.read(&mut buffer) {
            Ok(0) => return Ok(json!({ "read_bytes": read_bytes })),
            Ok(length) => read_bytes += length as u64,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(describe(path)(error)),
        }
    }
}

/// Runs a program and returns its exit status and output.
pub fn exec(argv: &[String]) -> Outcome {
    use std::os::unix::process::ExitStatusExt;
    let (name, arguments) = argv.split_first().ok_or("no program given")?;
    let output =
        Program::new(name).args(arguments).stdin(Stdio::null()).output().map_err(describe(name))?;
    let text = |bytes: &[u8]| {
        String::from_utf8_lossy(&bytes[..bytes.len().min(TEXT_LIMIT_BYTES as usize)]).into_owned()
    };
    Ok(json!({
        "code": output.status.code(),
        "signal": output.status.signal(),
        "stdout": text(&output.stdout),
        "stderr": text(&output.stderr),
    }))
}

/// Names and values of a file of `/proc`.
pub fn counters(path: &str) -> Outcome {
    let text = fs::read_to_string(path).map_err(describe(path))?;
    let map: Map<String, Value> =
        lines(&text).map(|(name, number)| (name.to_owned(), number.into())).collect();
    Ok(Value::Object(map))
}

/// Reads the start of a file's text, and of that the lines with one of `words`, or all lines.
pub fn read_file(path: &str, words: &[String]) -> Outcome {
    let mut bytes = Vec::new();
    File::open(path)
        .and_then(|file| file.take(TEXT_LIMIT_BYTES).read_to_end(&mut bytes))
        .map_err(describe(path))?;
    let text = String::from_utf8_lossy(&bytes);
    if words.is_empty() {
        return Ok(json!({ "text": text }));
    }
    Ok(json!({ "text": select_lines(&text, words, TEXT_LIMIT_BYTES as usize) }))
}

/// Writes a file, including those of `/proc` and `/sys`.
pub fn write_file(path: &str, text: &str) -> Outcome {
    fs::write(path, text).map_err(describe(path))?;
    Ok(Value::Null)
}

/// Reads lines of the kernel's log: the last ones if they exceed the limit.
pub fn kernel_log(words: &[String]) -> Outcome {
    let log = kernel_log::read().map_err(describe("the kernel's log"))?;
    Ok(json!({ "text": select_lines(&log, words, TEXT_LIMIT_BYTES as usize) }))
}
