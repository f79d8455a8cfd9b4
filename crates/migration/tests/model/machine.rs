//! Runs the engine's tracker along a path of steps.

use ebb_abi::PageRange;
use ebb_guest_ram::PageBitmap;
use ebb_migration::{PageFeed, Tracker};

use crate::world::{Dirty, Mutant, Request, Scope, Shared, Use, Worker, World, range_of};

/// A step of the guest, the monitor or the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// A vCPU writes to a page that it uses, or uses a free page, or one that the driver holds.
    Write(usize),
    /// The driver allocates a page and hints it.
    Name(usize),
    /// The monitor discards or writes a page, or logs that.
    Monitor(usize),
    /// A hint reaches the engine.
    Handle(usize, Request),
    /// The engine opens a window and requests hints.
    Open,
    /// The engine begins a round without hints.
    Begin,
    /// A thread of the engine takes a page.
    Take(usize),
    /// A thread continues with its page.
    Work(usize),
    /// The round is over; its window, if any, is closed.
    End,
    /// The driver is notified of the end.
    Done,
    /// The engine syncs the log.
    Sync,
    /// The guest is paused, and the log is synced.
    Stop,
    /// The rest is sent and the guest handed over.
    HandOver,
}

/// Stage of the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Armed, or after a sync of the log.
    Ready,
    /// In a round with hints.
    Window,
    /// In a round without.
    Round,
    /// After the window, with the driver not notified yet.
    Closed,
    /// After a round.
    Sent,
    Stopped,
    Over,
}

/// The state at the end of a path.
pub struct Node {
    pub key: Vec<u8>,
    pub next: Vec<Step>,
    pub violation: Option<&'static str>,
}

/// Follows a path from the initial state.
pub fn follow(scope: Scope, mutant: Mutant, path: &[Step]) -> Node {
    let world = Shared::new(scope, mutant);
    let mut dirty = Dirty(world.clone());
    let all = [PageRange::new(range_of(0).start, scope.pages as u64)];
    let mut tracker = Tracker::arm(&mut dirty, &all).unwrap();
    let mut machine = Machine { world, synced: false, stage: Stage::Ready };
    let mut steps = path.iter().copied();
    while let Some(step) = steps.next() {
        match step {
            Step::Open => {
                let window = tracker.hint_window().unwrap();
                machine.world.get().receiver = Some(window.receiver());
                machine.stage = Stage::Window;
                if let Some(node) = machine.round(&window, &mut steps) {
                    return node;
                }
                window.close();
                machine.stage = Stage::Closed;
            }
            Step::Begin => {
                machine.stage = Stage::Round;
                if let Some(node) = machine.round(&tracker.round(), &mut steps) {
                    return node;
                }
                machine.stage = Stage::Sent;
            }
            Step::Done => {
                machine.world.get().done();
                machine.stage = Stage::Sent;
            }
            Step::Sync => {
                tracker.sync().unwrap();
                (machine.synced, machine.stage) = (true, Stage::Ready);
            }
            Step::Stop => {
                machine.world.get().stop();
                tracker.sync().unwrap();
                machine.stage = Stage::Stopped;
            }
            Step::HandOver => {
                send_rest(&tracker.last_round(), &mut machine.world.get());
                machine.stage = Stage::Over;
            }
            step => surroundings(&mut machine.world.get(), step),
        }
    }
    machine.node(&tracker.pages_to_send())
}

/// A step that is not the engine's.
fn surroundings(world: &mut World, step: Step) {
    match step {
        Step::Write(page) => world.write(page),
        Step::Name(page) => world.name(page),
        Step::Monitor(page) => world.monitor_step(page),
        Step::Handle(page, request) => world.handle(page, request),
        step => panic!("{step:?} is not possible here"),
    }
}

fn send_rest(feed: &dyn PageFeed, world: &mut World) {
    let mut taken = Vec::new();
    feed.take(64, &mut taken).unwrap();
    for page in taken.iter().flat_map(|range| range.start.0..range.end().0) {
        world.pages[page as usize].same = true;
    }
}

struct Machine {
    world: Shared,
    /// The log was synced.
    synced: bool,
    stage: Stage,
}

impl Machine {
    /// Follows the path up to the end of a round. Returns the state if the path ends before.
    fn round(&self, feed: &dyn PageFeed, steps: &mut dyn Iterator<Item = Step>) -> Option<Node> {
        loop {
            match steps.next() {
                None => return Some(self.node(&feed.pages_to_send())),
                Some(Step::End) => {
                    self.late_clear();
                    return None;
                }
                Some(Step::Take(worker)) => {
                    self.late_clear();
                    let mut taken = Vec::new();
                    feed.take(1, &mut taken).unwrap();
                    let mut world = self.world.get();
                    world.take(worker, taken[0].start.0 as usize);
                    if world.mutant == Mutant::ClearInWindow && self.stage == Stage::Window {
                        world.pages.iter_mut().for_each(|page| page.marked = false);
                    }
                }
                Some(Step::Work(worker)) => self.world.get().work(worker),
                Some(step) => surroundings(&mut self.world.get(), step),
            }
        }
    }

    /// Clears the marks of pages that were read already, as [`Mutant::ClearAfterRead`] does.
    fn late_clear(&self) {
        for page in &mut self.world.get().pages {
            if std::mem::take(&mut page.to_clear) && self.stage == Stage::Round {
                page.marked = false;
            }
        }
    }

    fn node(&self, to_send: &PageBitmap) -> Node {
        let world = self.world.get();
        let mut key = vec![self.stage as u8, u8::from(self.synced)];
        key.extend(
            (0..world.scope.pages).map(|page| u8::from(to_send.contains(range_of(page).start))),
        );
        world.key(&mut key);
        let over = self.stage == Stage::Over;
        let violation = if over { world.violation() } else { None };
        Node { key, next: self.next_steps(&world, to_send), violation }
    }

    /// Returns the possible next steps.
    fn next_steps(&self, world: &World, to_send: &PageBitmap) -> Vec<Step> {
        let mut next = Vec::new();
        if self.stage == Stage::Over {
            return next;
        }
        for (page, state) in world.pages.iter().enumerate() {
            if state.hint {
                next.push(Step::Handle(page, Request::Current));
            }
            if state.earlier_hint {
                next.push(Step::Handle(page, Request::Earlier));
            }
            if self.stage == Stage::Stopped {
                continue;
            }
            next.push(Step::Write(page));
            let asked = world.receiver.is_some();
            if asked && state.usage != Use::Held && !state.hint {
                next.push(Step::Name(page));
            }
            if world.scope.monitor_changes {
                next.push(Step::Monitor(page));
            }
        }
        match self.stage {
            Stage::Ready => {
                next.extend([Step::Open, Step::Begin]);
                if self.synced {
                    next.push(Step::Stop);
                }
            }
            Stage::Window | Stage::Round => round_steps(world, to_send, &mut next),
            Stage::Closed => next.push(Step::Done),
            Stage::Sent => next.push(Step::Sync),
            Stage::Stopped => next.push(Step::HandOver),
            Stage::Over => {}
        }
        next
    }
}

fn round_steps(world: &World, to_send: &PageBitmap, next: &mut Vec<Step>) {
    for (worker, state) in world.workers.iter().enumerate() {
        match state {
            Worker::Idle if !to_send.is_empty() => next.push(Step::Take(worker)),
            Worker::Idle => {}
            Worker::Taken(_) | Worker::Reading { .. } => next.push(Step::Work(worker)),
        }
    }
    // Also with pages left: a round ends early at the time limit.
    if world.workers.iter().all(|worker| *worker == Worker::Idle) {
        next.push(Step::End);
    }
}
