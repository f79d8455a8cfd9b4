//! The metrics file: a line of JSON on request and once a minute, with Firecracker's names.

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value, json};

use crate::api::metrics::Metrics;
use crate::mmds::Counts;

/// Interval of lines without a request.
const INTERVAL: Duration = Duration::from_secs(60);

/// Counters of requests, and the file, once it is known.
#[derive(Debug, Default)]
pub(super) struct MetricsFile {
    file: Option<File>,
    next: Option<Instant>,
    /// By method: requests and refusals, by what they were for.
    requests: Map<String, Value>,
    /// Durations by name, in microseconds.
    latencies: Map<String, Value>,
}

impl MetricsFile {
    /// Opens a file or a pipe, which does not need a reader.
    pub(super) fn open(&mut self, path: &Path) -> Result<(), String> {
        if self.file.is_some() {
            return Err("Reinitialization of metrics not allowed.".to_owned());
        }
        let mut options = OpenOptions::new();
        options.create(true).read(true).append(true).custom_flags(libc::O_NONBLOCK);
        self.file = Some(options.open(path).map_err(|error| error.to_string())?);
        self.next = Some(Instant::now() + INTERVAL);
        Ok(())
    }

    /// Counts a request with the method and the name of what it was for: one of a fixed set.
    pub(super) fn count(&mut self, method: &'static str, name: &'static str, is_refused: bool) {
        let methods = self.requests.entry(method).or_insert_with(|| Value::Object(Map::new()));
        let Some(counters) = methods.as_object_mut() else { return };
        for (suffix, amount) in [("count", 1), ("fails", u64::from(is_refused))] {
            let counter = counters.entry(format!("{name}_{suffix}")).or_insert(json!(0));
            *counter = json!(counter.as_u64().unwrap_or(0) + amount);
        }
    }

    /// Records how long something took.
    pub(super) fn took(&mut self, name: &'static str, duration: Duration) {
        let microseconds = u64::try_from(duration.as_micros()).unwrap_or(u64::MAX);
        self.latencies.insert(name.to_owned(), json!(microseconds));
    }

    /// Whether a line is due, and when the next one is.
    pub(super) fn due(&mut self, now: Instant) -> (bool, Option<Instant>) {
        let Some(next) = self.next else { return (false, None) };
        if now < next {
            return (false, Some(next));
        }
        self.next = Some(now + INTERVAL);
        (true, self.next)
    }

    /// Writes a line. A pipe that is full loses it, as a client that reads nothing must not delay
    /// the API.
    pub(super) fn write(&mut self, metrics: &Metrics, metadata: Counts) -> io::Result<()> {
        let line = format!("{}\n", self.document(metrics, metadata));
        match self.file.as_mut().map(|file| file.write_all(line.as_bytes())) {
            Some(Err(error)) if error.kind() != io::ErrorKind::WouldBlock => Err(error),
            _ => Ok(()),
        }
    }

    fn document(&self, metrics: &Metrics, metadata: Counts) -> Value {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let mut document = self.requests.clone();
        let exits = |kind: &str| {
            metrics.vcpu_exits.iter().find(|exit| exit.kind == kind).map_or(0, |exit| exit.count)
        };
        let mut add = |name: &str, value: Value| drop(document.insert(name.to_owned(), value));
        add("utc_timestamp_ms", json!(u64::try_from(now.as_millis()).unwrap_or(u64::MAX)));
        add("latencies_us", Value::Object(self.latencies.clone()));
        add(
            "vcpu",
            json!({
                "exit_io_in": exits("port_in"),
                "exit_io_out": exits("port_out"),
                "exit_mmio_read": exits("mmio_read"),
                "exit_mmio_write": exits("mmio_write"),
            }),
        );
        if let Some(balloon) = &metrics.balloon {
            add(
                "balloon",
                json!({
                    "target_bytes": balloon.target_bytes,
                    "actual_bytes": balloon.actual_bytes,
                }),
            );
        }
        let delayed =
            metrics.delayed_requests.iter().map(|device| (device.kind.to_string(), device.count));
        for (device, count) in delayed {
            add(&device, json!({ "rate_limiter_throttled_events": count }));
        }
        add(
            "mmds",
            json!({
                "rx_count": metadata.answered,
                "rx_no_token": metadata.without_token,
                "rx_invalid_token": metadata.with_invalid_token,
                "connections_created": metadata.connections,
            }),
        );
        add(
            "ebb",
            json!({
                "guest_resident_bytes": metrics.guest_resident_bytes,
                "process_resident_bytes": metrics.process_resident_bytes,
            }),
        );
        Value::Object(document)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_have_the_counters() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("metrics");
        let mut metrics = MetricsFile::default();
        metrics.write(&Metrics::default(), Counts::default()).unwrap();
        assert!(metrics.open(&directory.path().join("none/metrics")).is_err());
        metrics.open(&path).unwrap();
        assert!(metrics.open(&path).is_err());
        metrics.count("put_api_requests", "actions", false);
        metrics.count("put_api_requests", "actions", true);
        metrics.took("pause_vm", Duration::from_millis(2));
        metrics.write(&Metrics::default(), Counts::default()).unwrap();
        metrics.write(&Metrics::default(), Counts::default()).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        let lines: Vec<Value> =
            text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines.len(), 2);
        assert_eq!(lines[1]["put_api_requests"]["actions_count"], 2);
        assert_eq!(lines[1]["put_api_requests"]["actions_fails"], 1);
        assert_eq!(lines[1]["latencies_us"]["pause_vm"], 2000);
        let now = Instant::now();
        assert!(!metrics.due(now).0);
        assert!(metrics.due(now + 2 * INTERVAL).0);
    }
}
