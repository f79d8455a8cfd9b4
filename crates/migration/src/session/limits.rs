//! How long each wait may take.

use std::time::Duration;

/// Limits on every wait of a session. Nothing in a session waits without one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TimeLimits {
    /// Source: until a connection stands (each one), name resolution excepted.
    pub connect: Duration,
    /// Either: from a connection to the other side's hello, TLS included. A stranger can hold one
    /// place of the destination for this long.
    pub greeting: Duration,
    /// Destination: from the hello to the source's setup. Without TLS, whoever says hello can hold
    /// the destination for this long.
    pub setup: Duration,
    /// Source: from the setup to the destination's answer, which takes the building of a machine.
    pub answer: Duration,
    /// Destination: from its acceptance until all data streams have come.
    pub streams: Duration,
    /// Either: the longest time without a byte while memory is transferred, on each stream and on
    /// the control connection.
    pub progress: Duration,
    /// Source: from the last byte of the state until the destination is ready.
    pub restore: Duration,
    /// Destination: from being ready to the source's decision. After it the destination ends.
    pub commit: Duration,
    /// Source: from its decision until the destination says that the guest runs. After it the
    /// outcome is unknown.
    pub running: Duration,
    /// Either: what is taken at the end so that the other side learns the reason of a failure.
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
    /// The same limit for everything.
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
