//! When a balloon pulse goes on and when it ends: a pure function of the guest's statistics.

use ebb_abi::PAGE_SIZE_BYTES;
use ebb_balloon::StatisticsValues;

/// Least memory that programs must have taken, or caches grown, before it counts as a need: the
/// figures of Linux are estimates.
const NOISE_BYTES: u64 = 16 << 20;
/// Page faults with I/O during a pulse that count as a need: with Linux's fault-around, each reads
/// at least 16 pages, so this is 8 MiB of programs.
const MAX_MAJOR_FAULTS: u64 = 128;
/// Looks without progress after which memory on its way is not about to arrive. While it is, little
/// is available to the guest for a moment, though its programs take nothing. A host that is short of
/// memory is often short of processors, too: the guest's driver may not run for some looks.
const STARVED_LOOKS: u32 = 15;

/// Requests for statistics in a row that a guest may leave without an answer while its balloon does
/// not grow.
const MOST_UNANSWERED: u32 = 5;

/// The guest at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Sample {
    /// What it last reported.
    pub statistics: StatisticsValues,
    /// Size of its balloon.
    pub balloon_bytes: u64,
    /// Most memory on its way into the balloon: taken from the guest, and not part of its size yet.
    pub on_the_way_bytes: u64,
}

/// What to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Let the balloon grow to this size.
    Inflate(u64),
    /// Wait for the guest.
    Wait,
    /// The guest has no more than it keeps.
    Done,
    /// The guest needs its memory, for this reason.
    Needed(&'static str),
    /// The guest does not report this value.
    Unknown(&'static str),
}

/// Decides about a pulse that began at `first`, when its last statistics were `last` and are `now`.
/// `target_bytes` is the balloon's current target, and `keep_bytes` stay available to the guest.
/// There was [no progress](has_progressed) in the last `unchanged_looks`.
///
/// The guest is not trusted: whatever it reports, the result is one of the above, and the target
/// never grows beyond its own claim of what is available.
pub(super) fn next(
    first: &Sample,
    last: &Sample,
    now: &Sample,
    target_bytes: u64,
    keep_bytes: u64,
    unchanged_looks: u32,
) -> Next {
    let (Some(at_first), Some(available)) =
        (first.statistics.available_memory_bytes, now.statistics.available_memory_bytes)
    else {
        return Next::Unknown("available memory");
    };
    if let Some(reason) = need(first, last, now) {
        return Next::Needed(reason);
    }
    let taken = now.balloon_bytes.saturating_sub(first.balloon_bytes);
    let taken = taken.saturating_add(now.on_the_way_bytes);
    let used = at_first.saturating_sub(taken).saturating_sub(available);
    if used > NOISE_BYTES.max(keep_bytes / 2) {
        return Next::Needed("its programs allocate memory");
    }
    let is_stuck = unchanged_looks >= STARVED_LOOKS;
    if available < keep_bytes / 2 && now.on_the_way_bytes > 0 && is_stuck {
        return Next::Needed("its programs take what it keeps");
    }
    if now.balloon_bytes < target_bytes && now.on_the_way_bytes > 0 {
        // Nothing is discarded before it arrives.
        return Next::Wait;
    }
    let spare = available.saturating_sub(keep_bytes);
    if spare <= keep_bytes / 8 {
        return Next::Done;
    }
    if now.balloon_bytes < target_bytes {
        return Next::Wait;
    }
    let spare = spare / PAGE_SIZE_BYTES * PAGE_SIZE_BYTES;
    match now.balloon_bytes.checked_add(spare) {
        Some(target) if target > target_bytes => Next::Inflate(target),
        _ => Next::Done,
    }
}

/// Whether the guest is still busy with its balloon: its size has changed, or pages for it have been
/// taken.
pub(super) fn has_progressed(last: &Sample, now: &Sample) -> bool {
    let available = |sample: &Sample| sample.statistics.available_memory_bytes.unwrap_or(0);
    now.balloon_bytes != last.balloon_bytes
        || (now.on_the_way_bytes > 0 && available(now) < available(last))
}

/// Requests for statistics that a guest has left without an answer. A guest without processor time,
/// or one that is busy with its balloon, answers late; its target does not rise meanwhile.
pub(super) struct Unanswered {
    number: u32,
    balloon_bytes: u64,
}

impl Unanswered {
    /// None yet, with a balloon of this size.
    pub(super) fn new(balloon_bytes: u64) -> Self {
        Self { number: 0, balloon_bytes }
    }

    /// Counts another one; returns whether the guest is only late, and not to be given up.
    pub(super) fn is_late(&mut self, balloon_bytes: u64) -> bool {
        self.number = if balloon_bytes > self.balloon_bytes { 0 } else { self.number + 1 };
        self.balloon_bytes = balloon_bytes;
        self.number < MOST_UNANSWERED
    }
}

/// A sign that the guest is short of memory.
fn need(first: &Sample, last: &Sample, now: &Sample) -> Option<&'static str> {
    // A value that the guest does not report is no sign.
    let grown = |value: fn(&StatisticsValues) -> Option<u64>, since: &Sample| {
        let (now, since) = (value(&now.statistics), value(&since.statistics));
        now.unwrap_or(0).saturating_sub(since.unwrap_or(u64::MAX))
    };
    if grown(|values| values.oom_kills, first) > 0 {
        return Some("a program was killed for lack of memory");
    }
    if grown(|values| values.swap_in_bytes, first) > 0 {
        return Some("it swaps memory in");
    }
    if grown(|values| values.major_faults, first) > MAX_MAJOR_FAULTS {
        return Some("its programs are read again from the disk");
    }
    if grown(|values| values.disk_caches_bytes, last) > NOISE_BYTES {
        return Some("it reads files");
    }
    None
}

#[cfg(test)]
mod tests;
