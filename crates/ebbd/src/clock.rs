//! The clock of snapshots.

use rustix::time::{ClockId, clock_gettime};

/// Milliseconds since the host's start, its sleep included (`CLOCK_BOOTTIME`).
pub fn now_ms() -> u64 {
    let now = clock_gettime(ClockId::Boottime);
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    1000 * seconds + u64::try_from(now.tv_nsec).unwrap_or(0) / 1_000_000
}
