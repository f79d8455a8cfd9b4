//! Asks the companion for connections to the host's sockets, which no thread of the monitor can
//! open. The device's thread never waits for the answer.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use super::connection::Ports;
use crate::isolation::ConnectLink;
use crate::token_bucket::TokenBucket;

/// Most requests that the companion has at a time.
const MOST_ASKED: usize = 32;
/// Requests in a second, and at once: the guest must not keep the companion busy.
const ASKED_PER_SECOND: u64 = 1000;
const ASKED_AT_ONCE: u64 = 2000;

/// A connection that waits for its socket, by ports and serial number.
pub(super) type Waiting = (Ports, u64);

/// The connection to the companion.
#[derive(Debug)]
pub(super) struct Connector {
    /// `None` once it is closed.
    link: Option<ConnectLink>,
    /// The requests that it has, in order.
    asked: VecDeque<Waiting>,
    /// Those that it does not have yet. As many as there are connections at most, and a few that
    /// were given up.
    waiting: VecDeque<Waiting>,
    bucket: TokenBucket,
    /// When the next one may be sent, if only the rate is in the way.
    pub resume_at: Option<Instant>,
}

impl Connector {
    pub(super) fn new(link: ConnectLink, now: Instant) -> Self {
        Self {
            link: Some(link),
            asked: VecDeque::new(),
            waiting: VecDeque::new(),
            bucket: TokenBucket::new(ASKED_PER_SECOND, ASKED_AT_ONCE, now),
            resume_at: None,
        }
    }

    /// The descriptor to wait for.
    pub(super) fn as_fd(&self) -> Option<BorrowedFd<'_>> {
        self.link.as_ref().map(AsFd::as_fd)
    }

    /// Requests that are not sent yet.
    pub(super) fn backlog(&self) -> usize {
        self.waiting.len()
    }

    /// Adds a request, which [`send`](Self::send) sends.
    pub(super) fn ask(&mut self, waiting: Waiting) {
        self.waiting.push_back(waiting);
    }

    /// Sends what may be sent now, except for requests that are no longer `wanted`.
    pub(super) fn send(&mut self, now: Instant, wanted: impl Fn(Waiting) -> bool) {
        self.resume_at = None;
        while self.asked.len() < MOST_ASKED {
            let Some(next) = self.waiting.front().copied() else { return };
            if !wanted(next) {
                self.waiting.pop_front();
                continue;
            }
            let wait = self.bucket.wait(1, now);
            if !wait.is_zero() {
                self.resume_at = Some(now + wait.max(Duration::from_millis(1)));
                return;
            }
            let Some(link) = &self.link else { return };
            match link.request(next.0.host) {
                Ok(true) => {}
                // Its buffer is full: an answer comes first.
                Ok(false) => return,
                Err(error) => {
                    self.fail(&error);
                    return;
                }
            }
            self.bucket.take(1, now);
            self.waiting.pop_front();
            self.asked.push_back(next);
        }
    }

    /// The next answer: the socket, or none for a refusal. `None` if there is none now.
    pub(super) fn answer(&mut self) -> Option<(Waiting, Option<OwnedFd>)> {
        if let Some(link) = &self.link {
            match link.answer() {
                Ok(None) => return None,
                Ok(Some(answer)) => match self.asked.pop_front() {
                    Some(asked) => return Some((asked, answer.ok())),
                    None => self.fail(&"an answer that was not asked for"),
                },
                Err(error) => self.fail(&error),
            }
        }
        // Without a companion every request is refused.
        let refused = self.asked.pop_front().or_else(|| self.waiting.pop_front())?;
        Some((refused, None))
    }

    /// Whether the companion is gone, so that [`answer`](Self::answer) refuses what there is.
    pub(super) fn is_closed(&self) -> bool {
        self.link.is_none()
    }

    fn fail(&mut self, error: &dyn std::fmt::Display) {
        tracing::warn!(
            "the monitor's companion process does not connect the guest's vsock: {error}"
        );
        self.link = None;
    }

    /// Forgets what was not sent. Answers to what was sent still come.
    pub(super) fn clear(&mut self) {
        self.waiting.clear();
        self.resume_at = None;
    }
}
