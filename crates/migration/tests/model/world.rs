//! A guest of a few pages, its driver, the monitor, and the dirty logs.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ebb_abi::{PageRange, Pfn};
use ebb_guest_ram::PageBitmap;
use ebb_migration::{BoxError, DirtySource, HintReceiver};

/// Size of the model.
#[derive(Clone, Copy, Debug)]
pub struct Scope {
    pub pages: usize,
    pub workers: usize,
    /// Whether the monitor discards or writes pages.
    pub monitor_changes: bool,
}

/// A way to break the rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutant {
    None,
    LateHint,
    HintAfterStop,
    HintClearsLog,
    ArmedLate,
    NoDone,
    ClearInWindow,
    ClearNeighbours,
    ClearAfterRead,
    NoteFirst,
}

/// Owner of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// The guest; its content matters.
    Used,
    Free,
    /// The driver, which has hinted it as free.
    Held,
}

/// State of a sending thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Worker {
    Idle,
    /// The page was taken and not read yet.
    Taken(usize),
    /// The page is being read; the part read so far is current if `clean`.
    Reading {
        page: usize,
        clean: bool,
    },
}

/// Request that a hint answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// The current one.
    Current,
    /// An earlier one: the device's thread was delayed.
    Earlier,
}

#[derive(Clone, Copy, Debug)]
pub struct Page {
    pub usage: Use,
    /// The destination has the same content.
    pub same: bool,
    /// Mark in the vCPUs' log.
    pub marked: bool,
    /// Mark in the monitor's log.
    pub logged: bool,
    /// The monitor has done the first of two steps to change it.
    pub changing: bool,
    /// A hint is in transit.
    pub hint: bool,
    pub earlier_hint: bool,
    /// Read, and its mark not yet cleared ([`Mutant::ClearAfterRead`]).
    pub to_clear: bool,
}

/// Everything but the tracker.
#[derive(Debug)]
pub struct World {
    pub mutant: Mutant,
    pub scope: Scope,
    pub pages: Vec<Page>,
    pub workers: Vec<Worker>,
    pub armed: bool,
    pub stopped: bool,
    pub receiver: Option<HintReceiver>,
    pub earlier_receiver: Option<HintReceiver>,
}

/// A shared handle to the world.
#[derive(Clone, Debug)]
pub struct Shared(Arc<Mutex<World>>);

impl Shared {
    pub fn new(scope: Scope, mutant: Mutant) -> Self {
        let page = Page {
            usage: Use::Used,
            same: false,
            marked: false,
            logged: false,
            changing: false,
            hint: false,
            earlier_hint: false,
            to_clear: false,
        };
        Self(Arc::new(Mutex::new(World {
            mutant,
            scope,
            pages: vec![page; scope.pages],
            workers: vec![Worker::Idle; scope.workers],
            armed: false,
            stopped: false,
            receiver: None,
            earlier_receiver: None,
        })))
    }

    pub fn get(&self) -> MutexGuard<'_, World> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub fn range_of(page: usize) -> PageRange {
    PageRange::new(Pfn(page as u64), 1)
}

impl World {
    /// The content of a page changes.
    fn change(&mut self, page: usize) {
        self.pages[page].same = false;
        for worker in &mut self.workers {
            if let Worker::Reading { page: reading, clean } = worker
                && *reading == page
            {
                *clean = false;
            }
        }
    }

    /// A vCPU writes to a page and owns it from then on.
    pub fn write(&mut self, page: usize) {
        self.change(page);
        self.pages[page].marked |= self.armed;
        self.pages[page].usage = Use::Used;
    }

    /// The driver allocates a page and hints it.
    pub fn name(&mut self, page: usize) {
        self.pages[page].usage = Use::Held;
        self.pages[page].hint = true;
    }

    /// The monitor discards or writes a page: the first or the second of two steps.
    pub fn monitor_step(&mut self, page: usize) {
        let first = !self.pages[page].changing;
        self.pages[page].changing = first;
        if first == (self.mutant == Mutant::NoteFirst) {
            self.pages[page].logged |= self.armed;
        } else {
            self.change(page);
        }
    }

    /// A hint reaches the engine.
    pub fn handle(&mut self, page: usize, request: Request) {
        let (hint, receiver) = match request {
            Request::Current => (&mut self.pages[page].hint, &self.receiver),
            Request::Earlier => (&mut self.pages[page].earlier_hint, &self.earlier_receiver),
        };
        *hint = false;
        let Some(receiver) = receiver else { return };
        let whenever =
            self.mutant == Mutant::LateHint || self.mutant == Mutant::HintAfterStop && self.stopped;
        if whenever {
            receiver.hint_whenever(&[range_of(page)]);
        } else {
            receiver.hint(&[range_of(page)]);
        }
        if self.mutant == Mutant::HintClearsLog {
            self.pages[page].marked = false;
        }
    }

    /// The driver is notified that it may use its pages again.
    pub fn done(&mut self) {
        self.earlier_receiver = self.receiver.take();
        for page in &mut self.pages {
            page.earlier_hint |= std::mem::take(&mut page.hint);
            if page.usage == Use::Held && self.mutant != Mutant::NoDone {
                page.usage = Use::Free;
            }
        }
    }

    /// vCPUs and devices stop; a change that the monitor has begun is finished.
    pub fn stop(&mut self) {
        for page in 0..self.pages.len() {
            if self.pages[page].changing {
                self.monitor_step(page);
            }
        }
        self.stopped = true;
    }

    pub fn take(&mut self, worker: usize, page: usize) {
        self.workers[worker] = Worker::Taken(page);
    }

    /// A thread continues with its page: it begins to read it, or has read and sent it.
    pub fn work(&mut self, worker: usize) {
        self.workers[worker] = match self.workers[worker] {
            Worker::Idle => Worker::Idle,
            Worker::Taken(page) => Worker::Reading { page, clean: true },
            Worker::Reading { page, clean } => {
                self.pages[page].same = clean;
                self.pages[page].to_clear = self.mutant == Mutant::ClearAfterRead;
                Worker::Idle
            }
        };
    }

    /// Returns the violation if the guest continued at the destination now.
    pub fn violation(&self) -> Option<&'static str> {
        if self.pages.iter().any(|page| page.usage == Use::Used && !page.same) {
            return Some("a used page differs at the destination");
        }
        let held = self.pages.iter().any(|page| page.usage == Use::Held);
        held.then_some("the driver holds pages that are never returned")
    }

    /// Appends the whole state as bits, at least six per page.
    pub fn key(&self, key: &mut Vec<u8>) {
        for page in &self.pages {
            let flags = [
                page.same,
                page.marked,
                page.logged,
                page.changing,
                page.hint,
                page.earlier_hint,
                page.to_clear,
            ];
            key.push(flags.iter().fold(0, |bits, flag| bits << 1 | u8::from(*flag)));
            key.push(page.usage as u8);
        }
        for worker in &self.workers {
            key.push(match *worker {
                Worker::Idle => 0,
                Worker::Taken(page) => 1 + page as u8,
                Worker::Reading { page, clean } => 32 + 2 * page as u8 + u8::from(clean),
            });
        }
        let flags =
            [self.armed, self.receiver.is_some(), self.earlier_receiver.is_some(), self.stopped];
        key.push(flags.iter().fold(0, |bits, flag| bits << 1 | u8::from(*flag)));
    }
}

/// Both dirty logs.
pub struct Dirty(pub Shared);

impl DirtySource for Dirty {
    fn arm(&mut self) -> Result<(), BoxError> {
        let mut world = self.0.get();
        world.armed = world.mutant != Mutant::ArmedLate;
        Ok(())
    }

    fn sync(&mut self, found: &mut PageBitmap) -> Result<(), BoxError> {
        let mut world = self.0.get();
        world.armed = true;
        for (page, state) in world.pages.iter_mut().enumerate() {
            if state.marked || std::mem::take(&mut state.logged) {
                found.insert(range_of(page));
            }
        }
        Ok(())
    }

    fn clear(&mut self, range: PageRange) -> Result<(), BoxError> {
        let mut world = self.0.get();
        let mutant = world.mutant;
        for (page, state) in world.pages.iter_mut().enumerate() {
            let clears = match mutant {
                // Later, see `machine`.
                Mutant::ClearAfterRead => false,
                Mutant::ClearNeighbours => true,
                _ => range.contains(Pfn(page as u64)),
            };
            state.marked &= !clears;
        }
        Ok(())
    }

    fn disarm(&mut self) -> Result<(), BoxError> {
        self.0.get().armed = false;
        Ok(())
    }
}
