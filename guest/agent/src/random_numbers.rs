//! Reads random numbers of the kernel all the time, and notes when: what machines that were forked
//! from one another have in common.

use std::fs::File;
use std::io::{self, Write as _};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use rustix::rand::{GetRandomFlags, getrandom};
use rustix::time::ClockId;
use serde::{Deserialize, Serialize};

use crate::clock;
use crate::vsock;

/// Most numbers that are kept, which take 8 MiB; the reader ends with an error then.
const MOST_NUMBERS: usize = 1 << 18;
/// Of Linux's driver for the VM generation id (drivers/virt/vmgenid.c).
const GENERATION_DRIVER: &str = "/sys/bus/acpi/drivers/vmgenid";
/// Interval of looking for the next number.
const LOOK: Duration = Duration::from_millis(1);

/// A number of 16 bytes, and when reading it began.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Number {
    /// CLOCK_MONOTONIC right before, in ns.
    pub ns: u64,
    /// Its bytes, as two numbers.
    pub value: [u64; 2],
}

/// What a client is sent.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NumbersReport {
    /// CLOCK_MONOTONIC when the client had come, in ns. The last number was begun later.
    pub asked_ns: u64,
    /// Whether the kernel has a driver for the VM generation id.
    pub generation_driver: bool,
    /// All numbers, in the order of reading.
    pub numbers: Vec<Number>,
}

/// All numbers so far.
#[derive(Clone, Default)]
struct Numbers(Arc<Mutex<Vec<Number>>>);

impl Numbers {
    /// Reads the next one; returns how many there are.
    fn read_next(&self) -> io::Result<usize> {
        let ns = clock::read(ClockId::Monotonic);
        let mut bytes = [[0; 8]; 2];
        // Requests of up to 256 bytes are filled completely (getrandom(2)).
        getrandom(bytes.as_flattened_mut(), GetRandomFlags::empty())?;
        let mut numbers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        numbers.push(Number { ns, value: bytes.map(u64::from_ne_bytes) });
        Ok(numbers.len())
    }

    /// All numbers up to one that was begun after this call.
    fn report(&self) -> NumbersReport {
        let asked_ns = clock::read(ClockId::Monotonic);
        loop {
            let numbers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            if numbers.last().is_some_and(|last| last.ns > asked_ns) {
                let generation_driver = Path::new(GENERATION_DRIVER).exists();
                return NumbersReport { asked_ns, generation_driver, numbers: numbers.clone() };
            }
            drop(numbers);
            thread::sleep(LOOK);
        }
    }
}

/// Reads numbers with a pause after each, and sends a [`NumbersReport`] as JSON to each client of a
/// port of AF_VSOCK; returns only with an error.
///
/// # Errors
/// Those of the port and of getrandom(2), and too many numbers.
pub fn run(port: u32, pause: Duration) -> io::Result<()> {
    let listener = vsock::listen(port)?;
    let numbers = Numbers::default();
    let all = numbers.clone();
    let _served_until_the_end = thread::Builder::new().spawn(move || {
        while let Ok(stream) = rustix::net::accept(&listener) {
            if let Ok(report) = serde_json::to_vec(&all.report()) {
                // A client that has gone does not want them.
                let _ = File::from(stream).write_all(&report);
            }
        }
    })?;
    while numbers.read_next()? < MOST_NUMBERS {
        thread::sleep(pause);
    }
    Err(io::Error::other(format!("{MOST_NUMBERS} numbers have been read")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_number_was_begun_after_the_request() {
        let numbers = Numbers::default();
        let stop = Arc::new(());
        thread::scope(|scope| {
            let (numbers, running) = (&numbers, Arc::downgrade(&stop));
            scope.spawn(move || {
                while running.strong_count() > 0 {
                    numbers.read_next().unwrap();
                }
            });
            let first = numbers.report();
            let second = numbers.report();
            drop(stop);
            assert!(first.numbers.last().unwrap().ns > first.asked_ns);
            assert_eq!(second.numbers[..first.numbers.len()], first.numbers[..]);
            assert!(second.numbers.is_sorted_by_key(|number| number.ns));
            let values: std::collections::BTreeSet<_> =
                second.numbers.iter().map(|number| number.value).collect();
            assert_eq!(values.len(), second.numbers.len());
        });
    }
}
