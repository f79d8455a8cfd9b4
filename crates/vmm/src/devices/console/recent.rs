//! Recent output of a serial line, for a client that connects with it while the machine runs.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::{Mutex, MutexGuard, PoisonError};

use vmm_sys_util::eventfd::EventFd;

/// Most bytes of recent output; a client that reads slowly misses what is older.
pub(crate) const RECENT_BYTES: usize = 16 << 10;

/// Recent output, and the client that has asked for it.
#[derive(Debug)]
pub(crate) struct Recent {
    state: Mutex<State>,
    /// Signalled for a new client, and for output that a client waits for.
    wake: EventFd,
}

#[derive(Debug, Default)]
struct State {
    bytes: VecDeque<u8>,
    /// Bytes of output so far, which is the position of the next one.
    end: u64,
    /// A client has received everything.
    waits: bool,
    /// A client that is not served yet.
    client: Option<OwnedFd>,
}

impl State {
    /// Position of the oldest byte.
    fn start(&self) -> u64 {
        self.end - self.bytes.len() as u64
    }
}

impl Recent {
    pub(super) fn new(wake: EventFd) -> Self {
        Self { state: Mutex::default(), wake }
    }

    /// Adds output.
    pub(super) fn add(&self, bytes: &[u8]) {
        let mut state = self.lock();
        state.bytes.extend(bytes);
        let excess = state.bytes.len().saturating_sub(RECENT_BYTES);
        state.bytes.drain(..excess);
        state.end += bytes.len() as u64;
        if std::mem::take(&mut state.waits) {
            self.wake();
        }
    }

    /// Passes `socket` on to the thread that serves clients, in place of an earlier one. Returns
    /// how much output it receives first.
    pub(crate) fn attach(&self, socket: OwnedFd) -> u64 {
        let mut state = self.lock();
        state.client = Some(socket);
        self.wake();
        state.bytes.len() as u64
    }

    /// A client that has come since the last call.
    pub(crate) fn new_client(&self) -> Option<OwnedFd> {
        self.lock().client.take()
    }

    /// Output from `position` on, or from the oldest, at most `length` bytes, and the position
    /// behind it. After an empty one, the next output is signalled.
    pub(crate) fn read(&self, position: u64, length: usize) -> (Vec<u8>, u64) {
        let mut state = self.lock();
        let from = position.max(state.start());
        let offset = (from - state.start()) as usize;
        let bytes: Vec<u8> = state.bytes.iter().skip(offset).take(length).copied().collect();
        state.waits = bytes.is_empty();
        let end = from + bytes.len() as u64;
        (bytes, end)
    }

    fn wake(&self) {
        // A full counter has woken the reader already.
        let _ = self.wake.write(1);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn recent() -> Recent {
        Recent::new(EventFd::new(libc::EFD_NONBLOCK).unwrap())
    }

    #[test]
    fn a_reader_without_more_is_woken_once() {
        let recent = recent();
        recent.add(b"early");
        assert!(recent.wake.read().is_err(), "there is no reader");
        assert_eq!(recent.read(0, 3), (b"ear".to_vec(), 3));
        assert_eq!(recent.read(3, 100), (b"ly".to_vec(), 5));
        recent.add(b"!");
        assert!(recent.wake.read().is_err(), "the reader has not caught up yet");
        assert_eq!(recent.read(5, 100), (b"!".to_vec(), 6));
        assert_eq!(recent.read(6, 100), (Vec::new(), 6));
        recent.add(b"a");
        recent.add(b"b");
        assert_eq!(recent.wake.read().unwrap(), 1);
        assert_eq!(recent.read(6, 100), (b"ab".to_vec(), 8));
    }

    #[test]
    fn a_later_client_takes_the_place() {
        let recent = recent();
        recent.add(b"login: ");
        let (first, _one) = std::os::unix::net::UnixStream::pair().unwrap();
        let (second, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let expected = std::os::fd::AsRawFd::as_raw_fd(&second);
        assert_eq!(recent.attach(first.into()), 7);
        assert_eq!(recent.attach(second.into()), 7);
        let client = recent.new_client().unwrap();
        assert_eq!(std::os::fd::AsRawFd::as_raw_fd(&client), expected);
        assert!(recent.new_client().is_none());
    }

    proptest! {
        /// A reader sees the end of what was written, in order; memory has a bound.
        #[test]
        fn readers_miss_only_what_is_old(
            steps in prop::collection::vec((0_usize..20_000, 0_usize..30_000), 1..20),
        ) {
            let recent = recent();
            let (mut all, mut position, mut seen) = (Vec::new(), 0, Vec::new());
            for (written, read) in steps {
                let bytes: Vec<u8> = (0..written).map(|i| (all.len() + i) as u8).collect();
                recent.add(&bytes);
                all.extend(bytes);
                prop_assert!(recent.lock().bytes.len() <= RECENT_BYTES);
                let (bytes, end) = recent.read(position, read);
                let start = end as usize - bytes.len();
                prop_assert!(start as u64 >= position || bytes.is_empty());
                prop_assert_eq!(&all[start..end as usize], &bytes[..]);
                if start as u64 > position {
                    prop_assert_eq!(start, all.len() - RECENT_BYTES);
                }
                position = end;
                seen.extend(bytes);
            }
        }
    }
}
