//! Why something is done to a machine, or nothing.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::action::Action;
use crate::level::Level;
use crate::trust::Doubt;

/// A decision about one machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Explanation {
    /// The machine.
    pub machine: String,
    /// What is to be done.
    pub action: Option<Action>,
    /// The rule that applied, with its inputs.
    pub rule: Rule,
    /// The limit that the rule has reached.
    pub clamp: Option<Clamp>,
    /// Why the guest's statistics were not used, if they were not.
    pub doubt: Option<Doubt>,
    /// Since when the rule is the same, on the snapshot's clock.
    pub since_ms: u64,
}

/// The rule that has decided, and its inputs. All sizes are in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "name")]
pub enum Rule {
    /// Nothing is to be done.
    Enough {
        /// The host's level.
        level: Level,
    },
    /// An operator holds it.
    Held,
    /// Another machine of the snapshot has the same name.
    SameName,
    /// Its guest has too little memory: the balloon is released whole.
    GuestShort {
        /// What its programs can still get.
        available_bytes: u64,
        /// The least that they should have.
        least_bytes: u64,
        /// Processes that the guest has killed since the last decision.
        oom_kills: u64,
    },
    /// The lease of its balloon has ended.
    LeaseEnded {
        /// Age of the balloon, in milliseconds.
        held_ms: u64,
    },
    /// The host has enough memory: the balloon is released whole.
    Released {
        /// The host's level.
        level: Level,
    },
    /// Its profile's ceiling is below its size.
    Ceiling {
        /// The ceiling.
        ceiling_bytes: u64,
        /// What the guest uses.
        used_bytes: u64,
    },
    /// Memory that is free in its guest is resident.
    Reclaim {
        /// Memory that the host needs.
        needed_bytes: u64,
        /// The amount.
        stale_bytes: u64,
    },
    /// It is idle, and has caches.
    Park {
        /// Memory that the host needs.
        needed_bytes: u64,
        /// What it is expected to give.
        gain_bytes: u64,
        /// How long it has been idle, in milliseconds.
        idle_ms: u64,
        /// The least idle time at this level, in milliseconds.
        idle_at_least_ms: u64,
    },
    /// The same with a balloon alone: it inflates, and is released when it has its size.
    Pulse {
        /// Memory that the host needs.
        needed_bytes: u64,
        /// What it is expected to give.
        gain_bytes: u64,
        /// How long it has been idle, in milliseconds.
        idle_ms: u64,
    },
    /// A pulse is under way, or ends.
    Pulsing {
        /// The balloon's size.
        actual_bytes: u64,
        /// What was asked for.
        target_bytes: u64,
    },
    /// It is idle, the host is pressed, and there is no cheaper means: zero pages are discarded.
    Trim {
        /// Memory that the host needs.
        needed_bytes: u64,
        /// What it occupies.
        resident_bytes: u64,
        /// How long it has been idle, in milliseconds.
        idle_ms: u64,
    },
    /// Its class is parked, and the host is pressed: it is saved to a file and stopped.
    Stop {
        /// Memory that the host needs.
        needed_bytes: u64,
        /// What it occupies.
        resident_bytes: u64,
    },
    /// The host is pressed, and the machine pays few shares for its memory.
    Shares {
        /// Memory that the host needs.
        needed_bytes: u64,
        /// What is taken from this one.
        taken_bytes: u64,
        /// What its guest uses.
        used_bytes: u64,
        /// Its shares.
        shares: u64,
        /// What a byte of it costs, in thousandths of one that is used.
        cost_milli: u64,
    },
    /// It grows fast, and would take what others can claim: it is paused.
    Delay {
        /// By how much it has grown.
        growth_bytes: u64,
        /// What it can still take.
        claim_bytes: u64,
        /// What the host has above the limit of an emergency, without the claims of machines that
        /// go on before it.
        room_bytes: u64,
        /// What is expected back: from machines that have grown and stopped, and from those that
        /// were asked for memory.
        expected_bytes: u64,
        /// The number of machines that go on, or have grown and stopped.
        running: u64,
        /// For how long it was paused already, in milliseconds.
        paused_ms: u64,
    },
    /// Its pause ends.
    Resumed {
        /// What it can still take.
        claim_bytes: u64,
        /// What the host has above the limit of an emergency.
        room_bytes: u64,
        /// For how long it was paused, in milliseconds.
        paused_ms: u64,
        /// The longest pause.
        longest_ms: u64,
    },
    /// It is paused, but not from here.
    PausedElsewhere,
    /// A wait after an attempt, which is longer if that returned little or did harm.
    Backoff {
        /// The rest of the wait, in milliseconds.
        for_ms: u64,
    },
}

/// A limit that a rule has reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Clamp {
    /// What the guest uses, and the reserve of its profile.
    Reserve {
        /// Memory that is kept.
        kept_bytes: u64,
    },
    /// The floor of its profile.
    Floor {
        /// Memory that is kept.
        kept_bytes: u64,
    },
}

impl Rule {
    /// Its name, as in its document.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Enough { .. } => "enough",
            Self::Held => "held",
            Self::SameName => "same_name",
            Self::GuestShort { .. } => "guest_short",
            Self::LeaseEnded { .. } => "lease_ended",
            Self::Released { .. } => "released",
            Self::Ceiling { .. } => "ceiling",
            Self::Reclaim { .. } => "reclaim",
            Self::Park { .. } => "park",
            Self::Pulse { .. } => "pulse",
            Self::Pulsing { .. } => "pulsing",
            Self::Trim { .. } => "trim",
            Self::Stop { .. } => "stop",
            Self::Shares { .. } => "shares",
            Self::Delay { .. } => "delay",
            Self::Resumed { .. } => "resumed",
            Self::PausedElsewhere => "paused_elsewhere",
            Self::Backoff { .. } => "backoff",
        }
    }
}

/// A size in whole MiB.
struct Size(u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} MiB", self.0 >> 20)
    }
}

/// A duration in seconds.
struct Time(u64);

impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{} s", self.0 / 1000, self.0 % 1000 / 100)
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Plenty => "plenty",
            Self::Tight => "tight",
            Self::Pressed => "pressed",
            Self::Emergency => "emergency",
        })
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Enough { level } => write!(f, "nothing to do: the host is {level}"),
            Self::Held => f.write_str("held by an operator"),
            Self::SameName => f.write_str("another machine has its name; rename one of them"),
            Self::GuestShort { available_bytes, least_bytes, oom_kills } => write!(
                f,
                "its guest has {} available, at least {} wanted, and has killed {oom_kills} \
                 processes: all is given back",
                Size(available_bytes),
                Size(least_bytes)
            ),
            Self::LeaseEnded { held_ms } => {
                write!(f, "its balloon was not renewed after {}", Time(held_ms))
            }
            Self::Released { level } => write!(f, "given back: the host is {level}"),
            Self::Ceiling { ceiling_bytes, used_bytes } => write!(
                f,
                "its profile allows {}; its guest uses {}",
                Size(ceiling_bytes),
                Size(used_bytes)
            ),
            Self::Reclaim { needed_bytes, stale_bytes } => write!(
                f,
                "the host needs {}; of its memory {} are free in the guest",
                Size(needed_bytes),
                Size(stale_bytes)
            ),
            Self::Park { needed_bytes, gain_bytes, idle_ms, idle_at_least_ms } => write!(
                f,
                "the host needs {}; it can give {}, and has been idle for {} (at least {})",
                Size(needed_bytes),
                Size(gain_bytes),
                Time(idle_ms),
                Time(idle_at_least_ms)
            ),
            Self::Pulse { needed_bytes, gain_bytes, idle_ms } => write!(
                f,
                "the host needs {}; its balloon can take {} and be given back; idle for {}",
                Size(needed_bytes),
                Size(gain_bytes),
                Time(idle_ms)
            ),
            Self::Pulsing { actual_bytes, target_bytes } => write!(
                f,
                "its balloon has reached {} of {}",
                Size(actual_bytes),
                Size(target_bytes)
            ),
            Self::Trim { needed_bytes, resident_bytes, idle_ms } => write!(
                f,
                "the host needs {}; of its {} some may be zero; idle for {}",
                Size(needed_bytes),
                Size(resident_bytes),
                Time(idle_ms)
            ),
            Self::Stop { needed_bytes, resident_bytes } => write!(
                f,
                "the host needs {}; its class is parked, and it occupies {}",
                Size(needed_bytes),
                Size(resident_bytes)
            ),
            Self::Shares { needed_bytes, taken_bytes, used_bytes, shares, cost_milli } => write!(
                f,
                "the host needs {}, {} of it from here: its guest uses {}, {shares} shares, a byte \
                 costs {cost_milli}/1000",
                Size(needed_bytes),
                Size(taken_bytes),
                Size(used_bytes)
            ),
            Self::Delay {
                growth_bytes,
                claim_bytes,
                room_bytes,
                expected_bytes,
                running,
                paused_ms,
            } => write!(
                f,
                "it has grown by {} and can still take {}; {running} others leave {}, and {} are \
                 expected back; paused for {} so far",
                Size(growth_bytes),
                Size(claim_bytes),
                Size(room_bytes),
                Size(expected_bytes),
                Time(paused_ms)
            ),
            Self::Resumed { claim_bytes, room_bytes, paused_ms, longest_ms } => write!(
                f,
                "it goes on after {} (at most {}): it can still take {}, and the host has {}",
                Time(paused_ms),
                Time(longest_ms),
                Size(claim_bytes),
                Size(room_bytes)
            ),
            Self::PausedElsewhere => f.write_str("its processors stand still by another order"),
            Self::Backoff { for_ms } => write!(
                f,
                "no further attempt for {}, to see what the last one has returned",
                Time(for_ms)
            ),
        }
    }
}
