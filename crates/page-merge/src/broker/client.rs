//! The client side of the broker.

use crate::settings::Nodes;
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use ebb_guest_ram::{StableSegments, StableSlot};

use crate::hash::{PageHash, Secret};
use crate::memory::Node;
use crate::store::{Answer, StableStore, StoreCounts, StoreError};

use super::error::BrokerError;
use super::hello::{Hello, Role, Welcome};
use super::limits::{BATCH_HASHES, BATCH_NOTIFICATIONS, BATCH_PAGES, BATCH_UPDATES, ToldLimits};
use super::link::Link;
use super::message::{Change, PAGE, Reply, Request};
use super::name::DomainName;

/// A broker that has not answered for this many times the time limit counts as gone.
const LIMITS_UNTIL_GONE: u32 = 60;

/// Maximum number of notification messages taken per call; further ones wait.
const MOST_NOTIFICATIONS: usize = 64;

/// Settings with which a process joins a domain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberConfig {
    /// The broker's socket.
    pub path: PathBuf,
    /// The trust domain.
    pub domain: DomainName,
    /// Whether pages of different nodes are merged.
    pub placement: Nodes,
    /// Maximum wait for the broker per call. After that the broker is late: calls fail immediately
    /// until it has answered, and after a while it counts as gone.
    pub time_limit: Duration,
}

impl MemberConfig {
    /// Settings with the default time limit.
    pub const fn new(path: PathBuf, domain: DomainName, placement: Nodes) -> Self {
        Self { path, domain, placement, time_limit: Duration::from_secs(1) }
    }
}

/// Receives the segments of a client.
pub trait SegmentUser {
    /// A number for another segment, higher than all that there have been, also those of other
    /// stores; `None` if there are no more.
    fn next_number(&mut self) -> Option<u32>;
    /// Adds a segment that later answers refer to.
    fn add(&mut self, number: u32, file: File) -> io::Result<()>;
    /// Removes a segment without shared pages.
    fn remove(&mut self, number: u32);
}

impl SegmentUser for Arc<StableSegments> {
    fn next_number(&mut self) -> Option<u32> {
        StableSegments::next_number(self)
    }

    fn add(&mut self, number: u32, file: File) -> io::Result<()> {
        Ok(StableSegments::add(self, number, file)?)
    }

    fn remove(&mut self, number: u32) {
        StableSegments::remove(self, number);
    }
}

/// The stable pages of a domain, owned by a broker.
///
/// Each call waits for the broker for at most [`MemberConfig::time_limit`]. Calls do not wait for a
/// late broker, and use it again once it has answered; reservations in late answers are returned. A
/// broker that is gone does not come back, but there may be another store for the next one
/// ([`Merger::renew`](crate::Merger::renew)). Mapped stable pages stay valid.
///
/// The numbers of segments are this process's own: the stores of two brokers do not get the same.
///
/// The broker frees a client's holds only when its process has ended: the one that calls
/// [`connect`](Self::connect) or [`over`](Self::over). So a process that has stable pages mapped
/// must not pass its memory on to another (fork(2)).
///
/// System calls after [`connect`](Self::connect), and all of [`over`](Self::over): `sendmsg`,
/// `recvmsg`, `ppoll`, `close`, and those of the segments' user.
#[derive(Debug)]
pub struct BrokerStore<U> {
    link: Option<Link>,
    why_gone: String,
    /// Time since which a send or an answer has been pending.
    late_since: Option<Instant>,
    /// A request is unanswered.
    unanswered: bool,
    segments: U,
    secret: Secret,
    nodes: Vec<u32>,
    limits: ToldLimits,
    placement: Nodes,
    updates: Vec<(Change, StableSlot)>,
    /// Notifications received outside of [`take_notifications`](StableStore::take_notifications).
    notifications: Vec<(Node, PageHash)>,
    /// Shares of this client's pages by slot.
    shares: HashMap<StableSlot, u32>,
    /// The segments that the broker has announced, by their numbers here.
    known: HashMap<u32, Known>,
    /// Their numbers here, by those of the broker.
    numbers: HashMap<u32, u32>,
}

/// A segment.
#[derive(Debug)]
struct Known {
    /// Its number at the broker.
    number: u32,
    /// This client's shares and reservations.
    holds: u64,
}

impl<U: SegmentUser> BrokerStore<U> {
    /// Joins a domain. `segments` receives the memory files with the domain's stable pages.
    ///
    /// System calls: `socket`, `connect`, `getsockopt`, `geteuid`, and those of all other calls.
    pub fn connect(config: &MemberConfig, segments: U) -> Result<Self, BrokerError> {
        Self::join(Link::connect(&config.path, config.time_limit)?, config, segments)
    }

    /// The same over a [connection](super::connect) that another process has made for this one. It
    /// does not wait while `hurry` is set.
    pub fn over(
        connection: OwnedFd,
        config: &MemberConfig,
        segments: U,
        hurry: Arc<AtomicBool>,
    ) -> Result<Self, BrokerError> {
        let mut link = Link::over(connection, config.time_limit);
        link.hurry_while(hurry);
        Self::join(link, config, segments)
    }

    fn join(mut link: Link, config: &MemberConfig, segments: U) -> Result<Self, BrokerError> {
        let hello = Hello { domain: config.domain.clone(), placement: config.placement };
        let mut bytes = Role::Member.preamble().to_vec();
        bytes.extend(Request::Hello(hello).encode());
        link.begin(&bytes)?;
        let welcome = match link.reply()? {
            Reply::Welcome(welcome) => welcome,
            other => return Err(unexpected(&other)),
        };
        let Welcome { secret, nodes, limits } = welcome;
        Ok(Self {
            link: Some(link),
            why_gone: String::new(),
            late_since: None,
            unanswered: false,
            segments,
            secret: Secret(secret),
            nodes,
            limits,
            placement: config.placement,
            updates: Vec::new(),
            notifications: Vec::new(),
            shares: HashMap::new(),
            known: HashMap::new(),
            numbers: HashMap::new(),
        })
    }

    /// The secret of the domain's hashes.
    pub const fn secret(&self) -> Secret {
        self.secret
    }

    /// Maximum number of sharers of one stable page, over all clients.
    pub const fn max_page_sharing(&self) -> u32 {
        self.limits.max_page_sharing
    }

    /// Whether nodes are kept apart.
    pub const fn placement(&self) -> Nodes {
        self.placement
    }

    /// Sends pending shares and releases to the broker. The other calls do so, too.
    pub fn flush(&mut self) {
        while !self.updates.is_empty() && self.catch_up().is_ok() {
            let count = self.updates.len().min(BATCH_UPDATES);
            let request = Request::Updates(self.updates.drain(..count).collect()).encode();
            let sent = self.link.as_mut().map_or(Ok(()), |link| link.begin(&request));
            // Unsent updates are sent later, or the connection is over.
            let _ = self.judge(sent);
        }
    }

    fn update(&mut self, change: Change, slot: StableSlot) {
        let known = self.known.get(&slot.segment);
        let (Some(known), true) = (known, self.link.is_some()) else { return };
        self.updates.push((change, StableSlot { segment: known.number, ..slot }));
        if self.updates.len().is_multiple_of(BATCH_UPDATES) {
            self.flush();
        }
    }

    /// Sends a request and processes the broker's messages up to the answer.
    fn ask(&mut self, request: &Request<'_>) -> Result<Reply, StoreError> {
        self.flush();
        self.catch_up()?;
        let Some(link) = &mut self.link else {
            return Err(StoreError::Gone(self.why_gone.clone()));
        };
        self.unanswered = true;
        let sent = link.begin(&request.encode());
        let answer = sent.and_then(|()| self.answer());
        self.judge(answer)
    }

    /// Processes the broker's messages up to an answer.
    fn answer(&mut self) -> Result<Reply, BrokerError> {
        loop {
            let Some(link) = &mut self.link else {
                return Err(BrokerError::Gone(self.why_gone.clone()));
            };
            match link.reply()? {
                Reply::Segment { number, .. } => {
                    let file = link.descriptor()?;
                    self.add_segment(number, file)?;
                }
                Reply::Closed(numbers) => {
                    for number in numbers {
                        let Some(ours) = self.numbers.get(&number).copied() else { continue };
                        // Shares of it could never be given back.
                        if self.known.get(&ours).is_some_and(|known| known.holds > 0) {
                            let why = format!("it has closed segment {number}, which is in use");
                            return Err(BrokerError::Gone(why));
                        }
                        self.forget_segment(ours);
                    }
                }
                answer => {
                    self.unanswered = false;
                    return self.localize(answer);
                }
            }
        }
    }

    fn add_segment(&mut self, number: u32, file: OwnedFd) -> Result<(), BrokerError> {
        let unusable = |why: &dyn std::fmt::Display| {
            BrokerError::Gone(format!("its segment {number} cannot be used: {why}"))
        };
        if self.numbers.contains_key(&number) {
            return Err(unusable(&"it has announced it before"));
        }
        let Some(ours) = self.segments.next_number() else {
            return Err(unusable(&"there are no more numbers"));
        };
        self.segments.add(ours, File::from(file)).map_err(|error| unusable(&error))?;
        self.numbers.insert(number, ours);
        self.known.insert(ours, Known { number, holds: 0 });
        Ok(())
    }

    /// An answer with this process's numbers of segments.
    fn localize(&self, mut answer: Reply) -> Result<Reply, BrokerError> {
        match &mut answer {
            Reply::Slots(slots) => {
                for slot in slots {
                    slot.segment = self.number_of(slot.segment)?;
                }
            }
            Reply::Answers(answers) => {
                for answer in answers {
                    if let Answer::Stable(slot) = answer {
                        slot.segment = self.number_of(slot.segment)?;
                    }
                }
            }
            _ => {}
        }
        Ok(answer)
    }

    fn number_of(&self, number: u32) -> Result<u32, BrokerError> {
        self.numbers.get(&number).copied().ok_or_else(|| {
            BrokerError::Gone(format!("it has not announced segment {number}, which it names"))
        })
    }

    /// Checks whether a late broker has caught up. Does not wait for it.
    fn catch_up(&mut self) -> Result<(), StoreError> {
        if self.late_since.is_none() {
            return Ok(());
        }
        let Some(link) = &mut self.link else {
            return Err(StoreError::Gone(self.why_gone.clone()));
        };
        let limit = link.limit();
        link.stop_waiting();
        let mut result = link.flush();
        if result.is_ok() && self.unanswered {
            result = self.answer().map(|answer| self.give_back(answer));
        }
        self.judge(result)?;
        // A wait that was cut short is not worth a line.
        let since = self.late_since.take();
        if since.is_some_and(|since| since.elapsed() >= limit) {
            tracing::info!("the merge broker responds again");
        }
        Ok(())
    }

    /// Returns the reservations of an answer that no call waits for.
    fn give_back(&mut self, answer: Reply) {
        let slots: Vec<StableSlot> = match answer {
            Reply::Slots(slots) => slots,
            Reply::Answers(answers) => answers.into_iter().filter_map(Answer::slot).collect(),
            Reply::Notifications(late) => {
                self.notifications.extend(late);
                return;
            }
            _ => return,
        };
        for slot in slots {
            // The caller sends it.
            if let Some(known) = self.known.get(&slot.segment) {
                let slot = StableSlot { segment: known.number, ..slot };
                self.updates.push((Change::Unused, slot));
            }
        }
    }

    /// Judges the result of an exchange: a broker that is late may answer later, any other failure
    /// ends the connection.
    fn judge<T>(&mut self, result: Result<T, BrokerError>) -> Result<T, StoreError> {
        match result {
            Ok(value) => Ok(value),
            Err(BrokerError::Late(limit)) => {
                let since = *self.late_since.get_or_insert_with(Instant::now);
                let until_gone = limit * LIMITS_UNTIL_GONE;
                if since.elapsed() >= until_gone {
                    return Err(self.lose(&BrokerError::Gone(format!(
                        "it did not answer within {until_gone:?}"
                    ))));
                }
                Err(StoreError::Late(limit))
            }
            Err(error) => Err(self.lose(&error)),
        }
    }

    /// Ends the use of the broker.
    fn lose(&mut self, error: &BrokerError) -> StoreError {
        let why = match error {
            BrokerError::Gone(why) => why.clone(),
            other => other.to_string(),
        };
        tracing::warn!("the merge broker is gone and no further pages are shared: {why}");
        self.link = None;
        self.updates = Vec::new();
        self.notifications = Vec::new();
        (self.late_since, self.unanswered) = (None, false);
        self.why_gone.clone_from(&why);
        // The broker announces unused segments no longer.
        let unused: Vec<u32> = self
            .known
            .iter()
            .filter(|(_, known)| known.holds == 0)
            .map(|(&number, _)| number)
            .collect();
        for number in unused {
            self.forget_segment(number);
        }
        StoreError::Gone(why)
    }

    fn forget_segment(&mut self, number: u32) {
        if let Some(known) = self.known.remove(&number) {
            self.numbers.remove(&known.number);
            self.segments.remove(number);
        }
    }

    /// Counts a reservation of this client.
    fn note_hold(&mut self, slot: StableSlot) {
        if let Some(known) = self.known.get_mut(&slot.segment) {
            known.holds += 1;
        }
    }

    /// Counts the end of a share or a reservation of this client.
    fn drop_hold(&mut self, slot: StableSlot) {
        let Some(known) = self.known.get_mut(&slot.segment) else { return };
        known.holds = known.holds.saturating_sub(1);
        if known.holds == 0 && self.link.is_none() {
            self.forget_segment(slot.segment);
        }
    }

    fn check_node(&self, node: Node) -> Result<(), StoreError> {
        let known = match self.placement {
            Nodes::Across => node == Node::ANY,
            Nodes::Apart => self.nodes.contains(&node.0),
        };
        if known {
            return Ok(());
        }
        let reason = match self.placement {
            Nodes::Across => "this client of the broker merges across nodes".to_owned(),
            Nodes::Apart => format!("the host's nodes with memory are {:?}", self.nodes),
        };
        Err(StoreError::NoRoom { node, source: io::Error::new(io::ErrorKind::NotFound, reason) })
    }

    fn publish_batch(
        &mut self,
        node: Node,
        contents: &[u8],
        slots: &mut Vec<StableSlot>,
    ) -> Result<(), StoreError> {
        match self.ask(&Request::Publish { node, contents })? {
            Reply::Slots(made) if made.len() == contents.len() / PAGE => {
                for &slot in &made {
                    self.note_hold(slot);
                }
                slots.extend(made);
                Ok(())
            }
            Reply::NoRoom { errno, reason } => {
                let kind = io::Error::from_raw_os_error(errno).kind();
                Err(StoreError::NoRoom { node, source: io::Error::new(kind, reason) })
            }
            other => Err(self.lose(&unexpected(&other))),
        }
    }
}

impl<U: SegmentUser> StableStore for BrokerStore<U> {
    fn hurry_while(&mut self, hurry: Arc<AtomicBool>) {
        if let Some(link) = &mut self.link {
            link.hurry_while(hurry);
        }
    }

    fn query(
        &mut self,
        node: Node,
        hashes: &[PageHash],
        answers: &mut Vec<Answer>,
    ) -> Result<(), StoreError> {
        self.check_node(node)?;
        let before = answers.len();
        for batch in hashes.chunks(BATCH_HASHES) {
            let reply = self.ask(&Request::Query { node, hashes: batch.to_vec() });
            let result = match reply {
                Ok(Reply::Answers(found)) if found.len() == batch.len() => {
                    for answer in &found {
                        if let Answer::Stable(slot) = answer {
                            self.note_hold(*slot);
                        }
                    }
                    answers.extend(found);
                    Ok(())
                }
                Ok(other) => Err(self.lose(&unexpected(&other))),
                Err(error) => Err(error),
            };
            if let Err(error) = result {
                for answer in answers.drain(before..).collect::<Vec<_>>() {
                    if let Answer::Stable(slot) = answer {
                        self.unused(slot);
                    }
                }
                return Err(error);
            }
        }
        Ok(())
    }

    fn publish(
        &mut self,
        node: Node,
        _hashes: &[PageHash],
        contents: &[u8],
        slots: &mut Vec<StableSlot>,
    ) -> Result<(), StoreError> {
        let node = match self.placement {
            // It is new on the host: the broker does not know it.
            Nodes::Across if !self.nodes.contains(&node.0) => Node::ANY,
            Nodes::Across => node,
            Nodes::Apart => self.check_node(node).map(|()| node)?,
        };
        let before = slots.len();
        for batch in contents.chunks(BATCH_PAGES * PAGE) {
            if let Err(error) = self.publish_batch(node, batch, slots) {
                for slot in slots.drain(before..).collect::<Vec<_>>() {
                    self.unused(slot);
                }
                return Err(error);
            }
        }
        Ok(())
    }

    fn shared(&mut self, slot: StableSlot) {
        *self.shares.entry(slot).or_default() += 1;
        self.update(Change::Shared, slot);
    }

    fn unused(&mut self, slot: StableSlot) {
        self.update(Change::Unused, slot);
        self.drop_hold(slot);
    }

    fn release(&mut self, slot: StableSlot) {
        if let Some(shares) = self.shares.get_mut(&slot) {
            *shares -= 1;
            if *shares == 0 {
                self.shares.remove(&slot);
            }
        }
        self.update(Change::Released, slot);
        self.drop_hold(slot);
    }

    fn retire(&mut self, slot: StableSlot) {
        self.update(Change::Retired, slot);
    }

    fn why_gone(&self) -> Option<&str> {
        self.link.is_none().then_some(self.why_gone.as_str())
    }

    fn counts(&self) -> StoreCounts {
        let entry = size_of::<(StableSlot, u32)>() + 1;
        StoreCounts {
            pages_shared: self.shares.len() as u64,
            metadata_bytes: (self.shares.capacity() * entry) as u64,
            ..StoreCounts::default()
        }
    }

    fn take_notifications(&mut self, notifications: &mut Vec<(Node, PageHash)>) {
        for _ in 0..MOST_NOTIFICATIONS {
            let reply = self.ask(&Request::Notifications);
            notifications.append(&mut self.notifications);
            match reply {
                Ok(Reply::Notifications(found)) => {
                    let more = found.len() >= BATCH_NOTIFICATIONS;
                    notifications.extend(found);
                    if !more {
                        return;
                    }
                }
                Ok(other) => {
                    self.lose(&unexpected(&other));
                    return;
                }
                Err(_) => return,
            }
        }
    }
}

impl<U> Drop for BrokerStore<U> {
    /// Sends pending updates if the broker takes them immediately. Remaining holds are freed when
    /// the process ends.
    fn drop(&mut self) {
        let Some(link) = &mut self.link else { return };
        for batch in self.updates.chunks(BATCH_UPDATES) {
            link.part_with(&Request::Updates(batch.to_vec()).encode());
        }
    }
}

/// The error for an answer that was not asked for.
pub(super) fn unexpected(reply: &Reply) -> BrokerError {
    match reply {
        Reply::Refused(reason) => BrokerError::Refused { reason: reason.clone() },
        _ => BrokerError::Gone("it sent the answer to another request".to_owned()),
    }
}

#[cfg(test)]
mod tests;
