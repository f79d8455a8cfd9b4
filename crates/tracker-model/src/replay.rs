//! Recordings of the module in a guest, replayed through the model.
//!
//! Each event changes the model's free lists and the state of its tracker, and must be one that the
//! model allows. The start is known: a recording begins with the free blocks of each zone, and
//! trackers are started within it. The model cannot know:
//!
//! - when pages that bypass the per-CPU lists get to the free lists. They are [`PageUse::Coming`]
//!   until an event shows that they have arrived, and so is every freed page of a per-CPU list,
//!   because the kernel takes the direct way when such a list is locked;
//! - who uses pages that are allocated in bulk from per-CPU lists, or that compaction isolates and
//!   uses: no tracepoint shows it;
//! - whether buddies of the order of a page block or more have been merged, which depends on their
//!   migrate types.
//!
//! In all of these it believes the recording. Therefore not every event is missed when it is left
//! out ([`replay_without_one`]): each `isolate`, `report`, `answer` and `putback` is, and each
//! `remove` and `free` whose pages have another event afterwards; hardly any `drain`, `alloc` or
//! `block` is. Memory must not be plugged, unplugged or poisoned during a recording: the model
//! refuses what follows from it.

mod arrays;
mod pages;
mod problem;
mod zone;

use std::collections::BTreeMap;

use thiserror::Error;

use crate::recording::{ArrayEvent, Event, PageEvent, Recording, Stage, What, ZoneNumber};
use crate::tracker::Kind;
use crate::units::Block;
use arrays::Arrays;
pub use pages::PageUse;
pub use problem::Problem;
use zone::{Told, Zone};

/// Where a recording departs from the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("event {number}: {problem}")]
pub struct Mismatch {
    /// The event, from 0; their number at the end of the recording. In the file it is on the line
    /// of this number and 2.
    pub number: usize,
    /// What is wrong.
    pub problem: Problem,
}

/// What a recording had in it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Replayed {
    /// Events of pages by kind.
    pub events: BTreeMap<PageEvent, u64>,
    /// Trackers that ran, in turn.
    pub trackers: Vec<Kind>,
}

/// Replays a recording.
///
/// # Errors
/// The first event that the model does not allow.
pub fn replay(recording: &Recording) -> Result<Replayed, Mismatch> {
    let mut guest = Guest::new(recording);
    guest.replay(&recording.events, 0)?;
    let mut replayed = Replayed::default();
    for event in &recording.events {
        match event.what {
            What::Pages(kind, ..) => *replayed.events.entry(kind).or_default() += 1,
            What::Tracker(Stage::Start, kind) => replayed.trackers.push(kind),
            _ => {}
        }
    }
    Ok(replayed)
}

/// What the model notices of recordings that lack one event of a kind.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Removals {
    /// Events that were left out, one at a time.
    pub tried: usize,
    /// Numbers of those without which the recording replays just as well.
    pub unnoticed: Vec<usize>,
}

/// Replays a recording without one event of a kind, for at most `sample` of them that are spread
/// over the recording.
///
/// # Errors
/// As [`replay`], for the whole recording.
pub fn replay_without_one(
    recording: &Recording,
    kind: PageEvent,
    sample: usize,
) -> Result<Removals, Mismatch> {
    let is_of_kind = |event: &Event| matches!(event.what, What::Pages(of, ..) if of == kind);
    let count = recording.events.iter().filter(|event| is_of_kind(event)).count();
    let step = count.div_ceil(sample.max(1)).max(1);
    let mut guest = Guest::new(recording);
    let mut removals = Removals::default();
    let mut seen = 0;
    for (number, event) in recording.events.iter().enumerate() {
        if is_of_kind(event) {
            if seen % step == 0 {
                removals.tried += 1;
                let rest = &recording.events[number + 1..];
                if guest.clone().replay(rest, number + 1).is_ok() {
                    removals.unnoticed.push(number);
                }
            }
            seen += 1;
        }
        guest.event(event).map_err(|problem| Mismatch { number, problem })?;
    }
    Ok(removals)
}

/// The guest, as far as its recording shows it.
#[derive(Clone, Debug)]
struct Guest {
    zones: BTreeMap<ZoneNumber, Zone>,
    running: Option<Kind>,
    arrays: Arrays,
    size: u32,
}

impl Guest {
    fn new(recording: &Recording) -> Self {
        Self {
            zones: BTreeMap::new(),
            running: None,
            arrays: Arrays::new(recording.percpu_entries),
            size: recording.percpu_entries,
        }
    }

    /// Replays events up to the end of a recording; the first of them has this number.
    fn replay(&mut self, events: &[Event], first: usize) -> Result<(), Mismatch> {
        for (number, event) in (first..).zip(events) {
            self.event(event).map_err(|problem| Mismatch { number, problem })?;
        }
        let number = first + events.len();
        self.check_nothing_held().map_err(|problem| Mismatch { number, problem })
    }

    fn event(&mut self, event: &Event) -> Result<(), Problem> {
        match event.what {
            What::Pages(kind, zone, block) => self.pages(kind, zone, block, event.cpu),
            What::Array(kind, entries) => self.array(kind, entries, event.cpu),
            What::Tracker(stage, kind) => self.tracker(stage, kind),
        }
    }

    fn require(&self, kind: Kind) -> Result<(), Problem> {
        if self.running == Some(kind) { Ok(()) } else { Err(Problem::NoTracker) }
    }

    fn pages(
        &mut self,
        kind: PageEvent,
        number: ZoneNumber,
        block: Block,
        cpu: u32,
    ) -> Result<(), Problem> {
        let zone = self.zones.entry(number).or_insert_with(|| {
            let mut zone = Zone::new();
            zone.set_bitmap(self.running == Some(Kind::Bitmap));
            zone
        });
        match kind {
            PageEvent::Block => zone.begin(block, false),
            PageEvent::Known => zone.begin(block, true),
            PageEvent::Remove => zone.remove(block),
            PageEvent::Drain => zone.drain(block),
            PageEvent::Take => zone.take(block),
            PageEvent::Give => zone.give(block),
            PageEvent::Isolate => match self.running {
                None => Err(Problem::NoTracker),
                Some(Kind::Percpu) => {
                    self.arrays.isolated(cpu, block)?;
                    zone.isolate(block)
                }
                Some(_) => zone.isolate(block),
            },
            PageEvent::Putback => zone.put_back(block, self.running == Some(Kind::Reporting)),
            PageEvent::Alloc => zone.allocate(block),
            PageEvent::Free => {
                if self.running == Some(Kind::Percpu) {
                    self.arrays.freed(cpu, block)?;
                }
                zone.free(block)
            }
            PageEvent::Report => zone.report(block),
            PageEvent::Answer => zone.answer(block, Told::Discarded),
            PageEvent::Failed => zone.answer(block, Told::Failed),
            PageEvent::Mark => zone.mark(block),
            PageEvent::Clear => zone.clear(block),
            PageEvent::Capture => {
                self.require(Kind::Percpu)?;
                self.arrays.captured(cpu, block)
            }
            PageEvent::Lost => {
                self.require(Kind::Percpu)?;
                self.arrays.lost(cpu, block)
            }
            PageEvent::Again => {
                self.require(Kind::Percpu)?;
                self.arrays.again(cpu, block)
            }
        }
    }

    fn array(&mut self, kind: ArrayEvent, entries: u32, cpu: u32) -> Result<(), Problem> {
        self.require(Kind::Percpu)?;
        self.arrays.changed(cpu, kind, entries)
    }

    fn tracker(&mut self, stage: Stage, kind: Kind) -> Result<(), Problem> {
        let is_in_turn = match stage {
            Stage::Start => self.running.is_none(),
            Stage::Started | Stage::Stop | Stage::Stopped => self.running == Some(kind),
        };
        if !is_in_turn {
            return Err(Problem::OutOfTurn);
        }
        match stage {
            Stage::Start => {
                self.running = Some(kind);
                self.arrays = Arrays::new(self.size);
                let is_bitmap = kind == Kind::Bitmap;
                self.zones.values_mut().for_each(|zone| zone.set_bitmap(is_bitmap));
            }
            Stage::Started => self.set_hooked(true),
            Stage::Stop => self.set_hooked(false),
            Stage::Stopped => {
                self.check_nothing_held()?;
                self.running = None;
                self.zones.values_mut().for_each(|zone| zone.set_bitmap(false));
            }
        }
        Ok(())
    }

    fn set_hooked(&mut self, is_hooked: bool) {
        self.arrays.set_hooked(is_hooked);
        self.zones.values_mut().for_each(|zone| zone.set_hooked(is_hooked));
    }

    fn check_nothing_held(&self) -> Result<(), Problem> {
        match self.zones.values().find_map(Zone::still_held) {
            None => Ok(()),
            Some(block) => Err(Problem::StillHeld(block)),
        }
    }
}
