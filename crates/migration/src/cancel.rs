//! Calling a migration off from another thread.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

type Callback = Box<dyn Fn() + Send>;

/// Calls a migration off. Clones are handles to the same migration.
#[derive(Clone, Default)]
pub struct Cancel(Arc<Inner>);

#[derive(Default)]
struct Inner {
    cancelled: AtomicBool,
    callbacks: Mutex<Vec<Callback>>,
}

impl Cancel {
    /// For a migration that is not cancelled yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Calls the migration off and runs the callbacks. Has no further effect the second time.
    ///
    /// It ends with an error soon; the guest at the source runs on. After the source has handed the
    /// guest over, nothing happens: see [`Switchover`](crate::Switchover).
    pub fn cancel(&self) {
        let callbacks = self.callbacks();
        if !self.0.cancelled.swap(true, Ordering::SeqCst) {
            callbacks.iter().for_each(|callback| callback());
        }
    }

    /// Whether [`cancel`](Self::cancel) was called.
    pub fn is_cancelled(&self) -> bool {
        self.0.cancelled.load(Ordering::SeqCst)
    }

    /// Has `callback` called by [`cancel`](Self::cancel), or at once if that has happened: to shut
    /// connections down, so that who waits for them wakes up. It must not call this object.
    pub fn on_cancel(&self, callback: impl Fn() + Send + 'static) {
        let mut callbacks = self.callbacks();
        if self.is_cancelled() {
            callback();
        } else {
            callbacks.push(Box::new(callback));
        }
    }

    fn callbacks(&self) -> MutexGuard<'_, Vec<Callback>> {
        self.0.callbacks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Cancel {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Cancel")
            .field("cancelled", &self.is_cancelled())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    #[test]
    fn callbacks_run_once_each_before_or_after() {
        let (cancel, calls) = (Cancel::new(), Arc::new(AtomicUsize::new(0)));
        let count = |calls: &Arc<AtomicUsize>| {
            let calls = Arc::clone(calls);
            move || {
                calls.fetch_add(1, Ordering::SeqCst);
            }
        };
        cancel.on_cancel(count(&calls));
        assert_eq!(calls.load(Ordering::SeqCst), 0);
        cancel.clone().cancel();
        cancel.cancel();
        assert!(cancel.is_cancelled());
        assert_eq!(calls.load(Ordering::SeqCst), 1);
        cancel.on_cancel(count(&calls));
        assert_eq!(calls.load(Ordering::SeqCst), 2);
    }
}
