//! The merging thread: steps and sleeps, and answers to other threads in between.

use std::{
    sync::{Arc, atomic::AtomicBool},
    time::Duration,
};

use crate::{
    control::{Control, Life, Next},
    hash::Secret,
    memory::Memory,
    merger::Merger,
    pace::{Calm, Effort},
    settings::Run,
    store::StableStore,
};

/// Maximum number of pages of one step, so that pausing and changing settings do not take long.
/// More pages than that between two sleeps are several steps without a sleep.
const STEP_PAGES: u64 = 4096;

/// Clocks of the merging thread.
pub trait Clock {
    /// Time since some fixed moment; never goes back.
    fn now(&self) -> Duration;
    /// Processor time of the calling thread.
    fn cpu(&self) -> Duration;
}

/// The kernel's clocks.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> Duration {
        since_zero(rustix::time::ClockId::Monotonic)
    }

    fn cpu(&self) -> Duration {
        since_zero(rustix::time::ClockId::ThreadCPUTime)
    }
}

fn since_zero(clock: rustix::time::ClockId) -> Duration {
    let time = rustix::time::clock_gettime(clock);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Makes another store, and its secret, if there is one to be used now.
pub type Renew<S> = dyn FnMut(Option<&str>, &Arc<AtomicBool>) -> Option<(S, Secret)> + Send;

/// A [`Merger`] that paces itself by its settings, on a thread of its own.
pub struct Worker<M, S> {
    merger: Merger<M, S>,
    control: Arc<Control>,
    /// Asked for another store.
    renew: Box<Renew<S>>,
    /// Begin of the pass; `None` if none has begun, or if it was interrupted.
    pass: Option<Duration>,
    /// Effort since the last sleep.
    effort: Effort,
    calm: Calm,
}

impl<M: Memory, S: StableStore> Worker<M, S> {
    /// Makes a worker of `merger`, and its control for other threads.
    pub fn new(mut merger: Merger<M, S>) -> (Self, Arc<Control>) {
        let control = Control::new(merger.settings().clone());
        merger.store_mut().hurry_while(control.hurry());
        let worker = Self {
            merger,
            control: Arc::clone(&control),
            renew: Box::new(|_, _| None),
            pass: None,
            effort: Effort::default(),
            calm: Calm::default(),
        };
        worker.publish();
        (worker, control)
    }

    fn publish(&self) {
        let merger = &self.merger;
        let why_gone = merger.store().why_gone();
        self.control.publish(merger.statistics(), merger.last_error(), why_gone);
    }

    /// Sets what is asked for another store before each pass. It is given the reason for which the
    /// present one is lost, if it is, and a flag: while that is set it must not wait.
    pub fn renew_with(&mut self, renew: Box<Renew<S>>) {
        self.renew = renew;
    }

    fn renew_store(&mut self) {
        let hurry = self.control.hurry();
        let lost = self.merger.store().why_gone();
        if lost.is_some() {
            self.calm.end();
        }
        if let Some((store, secret)) = (self.renew)(lost, &hurry) {
            self.merger.renew(store, secret);
            self.merger.store_mut().hurry_while(hurry);
            self.calm.end();
        }
    }

    /// The merger.
    pub fn merger_mut(&mut self) -> &mut Merger<M, S> {
        &mut self.merger
    }

    /// Works until [`Control::stop`]. Pages stay merged at the end.
    pub fn run(&mut self, clock: &impl Clock) {
        self.control.set_life(Life::Runs);
        let mut sleep = Some(Duration::ZERO);
        loop {
            match self.control.next(sleep) {
                Next::Stop => break,
                Next::Change(ticket, settings) => {
                    let answer = self.merger.change(settings);
                    self.pass = None;
                    // Work done at the old pace must not be compensated by sleep at the new one.
                    self.effort = Effort::default();
                    self.calm.end();
                    self.publish();
                    self.control.answer(ticket, self.merger.settings(), answer);
                    sleep = Some(Duration::ZERO);
                }
                Next::Step => sleep = self.turn(clock),
            }
        }
        self.control.set_life(Life::Ended);
    }

    /// Runs one step; returns the length of the following sleep, `None` for until an event.
    /// ([`run`](Self::run) calls it; call it directly only without `run`.)
    pub fn turn(&mut self, clock: &impl Clock) -> Option<Duration> {
        if self.pass.is_none() && self.merger.settings().run == Run::Merge {
            self.renew_store();
            if self.calm.waits() {
                return Some(Duration::from_millis(self.merger.settings().min_pass_millisecs));
            }
        }
        let (begin, cpu) = (clock.now(), clock.cpu());
        let pass = *self.pass.get_or_insert(begin);
        let (settings, pages) = (self.merger.settings().clone(), self.merger.pages_of_a_pass());
        let wanted = settings.pages_at_a_time(pages);
        let left = wanted.saturating_sub(self.effort.pages).clamp(1, STEP_PAGES);
        let step = self.merger.step(left);
        let (end, cpu_end) = (clock.now(), clock.cpu());
        self.effort.pages += step.pages;
        self.effort.written += step.written;
        self.effort.cpu += cpu_end.saturating_sub(cpu);
        self.effort.elapsed += end.saturating_sub(begin);
        let sleep = match settings.run {
            Run::Stop => None,
            Run::Unmerge if step.finished_pass => None,
            // Failed unmerging is retried.
            Run::Unmerge => Some(Duration::from_millis(u64::from(step.pages == 0))),
            Run::Merge if step.finished_pass => {
                self.pass = None;
                self.calm.note_pass(&self.merger.statistics());
                let next_pass = pass + Duration::from_millis(settings.min_pass_millisecs);
                let sleep = settings.sleep_after(std::mem::take(&mut self.effort), pages);
                Some(sleep.max(next_pass.saturating_sub(end)))
            }
            Run::Merge if self.effort.pages >= wanted => {
                Some(settings.sleep_after(std::mem::take(&mut self.effort), pages))
            }
            Run::Merge => Some(Duration::ZERO),
        };
        self.publish();
        sleep
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use ebb_abi::{PageRange, Pfn};

    use super::*;
    use crate::testing::World;
    use crate::{Secret, Settings, StablePages};

    /// Years of sleep would follow from the effort at the new rate.
    #[test]
    fn effort_at_the_old_pace_is_forgotten() {
        let world = World::new();
        let guest = world.guest(&[PageRange::new(Pfn(0), 100)]);
        let store = StablePages::new(world.slots(0));
        // A stopped worker keeps its effort.
        let settings = Settings { run: Run::Stop, ..Settings::default() };
        let merger = Merger::new(guest.memory(), store, Secret([3; 32]), settings).unwrap();
        let (mut worker, control) = Worker::new(merger);
        worker.effort.pages = 1 << 40;
        thread::scope(|scope| {
            let thread = scope.spawn(move || {
                worker.run(&SystemClock);
                worker.effort
            });
            // Answered when the worker has made the change.
            control.change(|settings| settings.pages_per_second = Some(1)).unwrap();
            control.stop();
            assert!(thread.join().unwrap().pages < 1 << 40);
        });
    }
}
