//! Control of the merging thread by other threads.

use std::{
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use crate::{
    settings::{Settings, SettingsError},
    statistics::Statistics,
};

/// Time limit for an answer of the merging thread: it answers between two steps, each of which
/// takes milliseconds.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);

#[derive(Debug, Default)]
struct State {
    settings: Settings,
    statistics: Statistics,
    last_error: Option<String>,
    why_gone: Option<String>,
    /// Requested settings, and the number of the request.
    wanted: Option<(u64, Settings)>,
    answer: Option<(u64, Result<(), SettingsError>)>,
    tickets: u64,
    pauses: usize,
    stands_still: bool,
    stopping: bool,
    life: Life,
}

/// State of the merging thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Life {
    #[default]
    NotBegun,
    Runs,
    Ended,
}

/// Settings, statistics, and pausing of a merging thread ([`Worker`](crate::Worker)). Any thread
/// may use it.
#[derive(Debug, Default)]
pub struct Control {
    state: Mutex<State>,
    worker: Condvar,
    clients: Condvar,
    /// Held while settings are changed, so that there is one request at a time.
    changing: Mutex<()>,
    /// The thread is to pause or to end: its step must not wait for other processes.
    hurry: Arc<AtomicBool>,
}

/// The next action of the merging thread.
#[derive(Debug)]
pub(crate) enum Next {
    /// Run a step.
    Step,
    /// Try these settings, and answer.
    Change(u64, Settings),
    /// End.
    Stop,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // After a panic with the lock held: the state is plain values, each of which is valid on its
    // own.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Control {
    /// Creates the control of a thread that begins with `settings`.
    pub fn new(settings: Settings) -> Arc<Self> {
        Arc::new(Self {
            state: Mutex::new(State { settings, ..State::default() }),
            ..Self::default()
        })
    }

    /// The current settings.
    pub fn settings(&self) -> Settings {
        lock(&self.state).settings.clone()
    }

    /// The statistics as of the last step.
    pub fn statistics(&self) -> Statistics {
        lock(&self.state).statistics.clone()
    }

    /// Most recent error of the store or the memory.
    pub fn last_error(&self) -> Option<String> {
        lock(&self.state).last_error.clone()
    }

    /// Reason for the loss of the store, while it is lost.
    pub fn why_gone(&self) -> Option<String> {
        lock(&self.state).why_gone.clone()
    }

    /// Whether the thread runs (also while it is paused).
    pub fn is_running(&self) -> bool {
        lock(&self.state).life == Life::Runs
    }

    /// Changes the settings: `change` receives the current ones. Waits for the thread's answer,
    /// which follows its current step. With [`Run::Unmerge`](crate::Run::Unmerge) unmerging has
    /// only begun by then; it is complete when `merged_pages` is 0 in the statistics.
    pub fn change(&self, change: impl FnOnce(&mut Settings)) -> Result<Settings, SettingsError> {
        let _one = lock(&self.changing);
        let mut state = lock(&self.state);
        let mut settings = state.settings.clone();
        change(&mut settings);
        settings.check()?;
        state.tickets += 1;
        let ticket = state.tickets;
        state.wanted = Some((ticket, settings.clone()));
        self.worker.notify_all();
        let deadline = Instant::now() + ANSWER_WITHIN;
        loop {
            if state.answer.as_ref().is_some_and(|(answered, _)| *answered == ticket)
                && let Some((_, answer)) = state.answer.take()
            {
                return answer.map(|()| settings);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || state.stopping || state.life == Life::Ended {
                state.wanted = None;
                return Err(SettingsError::NoAnswer);
            }
            state =
                self.clients.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Pauses the thread: when this returns, no step is running, and none begins before the guard
    /// is dropped. Settings can still be changed.
    pub fn pause(self: &Arc<Self>) -> Paused {
        let mut state = lock(&self.state);
        state.pauses += 1;
        self.hurry.store(true, Ordering::Relaxed);
        self.worker.notify_all();
        while state.life == Life::Runs && !state.stands_still {
            state = self.clients.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        Paused(Arc::clone(self))
    }

    /// Stops the thread after its current step. Pages stay merged.
    pub fn stop(&self) {
        lock(&self.state).stopping = true;
        self.hurry.store(true, Ordering::Relaxed);
        self.worker.notify_all();
        self.clients.notify_all();
    }

    /// Set while the thread is to pause or to end.
    pub(crate) fn hurry(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.hurry)
    }

    /// Sets the thread's state.
    pub(crate) fn set_life(&self, life: Life) {
        let mut state = lock(&self.state);
        state.life = life;
        state.stands_still = life != Life::Runs;
        self.clients.notify_all();
    }

    /// Publishes the results of the thread's last step.
    pub(crate) fn publish(
        &self,
        statistics: Statistics,
        last_error: Option<&str>,
        why_gone: Option<&str>,
    ) {
        let mut state = lock(&self.state);
        state.statistics = statistics;
        if state.why_gone.as_deref() != why_gone {
            state.why_gone = why_gone.map(str::to_owned);
        }
        if state.last_error.as_deref() != last_error {
            state.last_error = last_error.map(str::to_owned);
        }
    }

    /// Answers a [`Next::Change`].
    pub(crate) fn answer(
        &self,
        ticket: u64,
        settings: &Settings,
        answer: Result<(), SettingsError>,
    ) {
        let mut state = lock(&self.state);
        state.settings.clone_from(settings);
        state.answer = Some((ticket, answer));
        self.clients.notify_all();
    }

    /// Waits while there is nothing to do: for `sleep` (`None`: until an event).
    pub(crate) fn next(&self, sleep: Option<Duration>) -> Next {
        let deadline = sleep.map(|sleep| Instant::now() + sleep);
        let mut state = lock(&self.state);
        loop {
            if state.stopping {
                return Next::Stop;
            }
            if let Some((ticket, settings)) = state.wanted.take() {
                return Next::Change(ticket, settings);
            }
            if state.pauses > 0 && !state.stands_still {
                state.stands_still = true;
                self.clients.notify_all();
            }
            if state.pauses == 0 {
                let left =
                    deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
                if left.is_some_and(|left| left.is_zero()) {
                    state.stands_still = false;
                    return Next::Step;
                }
                state = match left {
                    Some(left) => {
                        self.worker
                            .wait_timeout(state, left)
                            .unwrap_or_else(PoisonError::into_inner)
                            .0
                    }
                    None => self.worker.wait(state).unwrap_or_else(PoisonError::into_inner),
                };
            } else {
                state = self.worker.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }
}

/// The merging thread is paused until this is dropped.
#[derive(Debug)]
#[must_use]
pub struct Paused(Arc<Control>);

impl Drop for Paused {
    fn drop(&mut self) {
        let mut state = lock(&self.0.state);
        state.pauses -= 1;
        self.0.hurry.store(state.pauses > 0 || state.stopping, Ordering::Relaxed);
        drop(state);
        self.0.worker.notify_all();
    }
}
