//! Time limits of the waits of a session.

use std::time::Duration;

/// Time limits of a session. Every wait has one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TimeLimits {
    /// Source: until a connection is established (each one), name resolution excluded.
    pub connect: Duration,
    /// Either: from a connection to the other side's hello, including TLS. A stranger can occupy
    /// one slot of the destination for this long; time in which the destination waits for no
    /// connection does not count.
    pub greeting: Duration,
    /// Destination: from the hello to the source's setup. Without TLS, anyone that sends a hello
    /// can occupy the destination for this long.
    pub setup: Duration,
    /// Source: from the setup to the destination's answer. The destination creates the machine in
    /// this time.
    pub answer: Duration,
    /// Destination: from its acceptance until all data streams have joined. Connections may be
    /// silent for as long.
    pub streams: Duration,
    /// Either: the longest time without a byte while memory is transferred, on each stream and on
    /// the control connection.
    pub progress: Duration,
    /// Source: from the last byte of the state until the destination is ready.
    pub restore: Duration,
    /// Destination: from its ready message to the source's decision. The destination ends when it
    /// expires.
    pub commit: Duration,
    /// Source: from its decision until the destination reports that the guest runs. The outcome is
    /// unknown when it expires.
    pub running: Duration,
    /// Either: time spent at the end of a session so that the other side receives the reason of a
    /// failure.
    pub farewell: Duration,
}

impl Default for TimeLimits {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(10),
            greeting: Duration::from_secs(5),
            setup: Duration::from_secs(20),
            answer: Duration::from_secs(60),
            streams: Duration::from_secs(20),
            progress: Duration::from_secs(60),
            restore: Duration::from_secs(60),
            commit: Duration::from_secs(30),
            running: Duration::from_secs(30),
            farewell: Duration::from_secs(2),
        }
    }
}

impl TimeLimits {
    /// Uses the same limit for every wait.
    pub const fn all(limit: Duration) -> Self {
        Self {
            connect: limit,
            greeting: limit,
            setup: limit,
            answer: limit,
            streams: limit,
            progress: limit,
            restore: limit,
            commit: limit,
            running: limit,
            farewell: limit,
        }
    }
}
