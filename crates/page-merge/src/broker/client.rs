//! The broker as its clients see it.

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::SocketAddrUnix;

use crate::memory::{Node, PageHash, Secret};
use crate::store::{Answer, Slot, StableStore, StoreCounts, StoreError};

use super::error::BrokerError;
use super::hello::{Hello, Placement, Role, Welcome};
use super::limits::{BATCH_HASHES, BATCH_NEWS, BATCH_PAGES, BATCH_UPDATES, ToldLimits};
use super::message::{Change, PAGE, Reply, Request, split_frame};
use super::name::DomainName;
use super::pages::SegmentUser;
use super::socket::{receive, send, stream, wait};
use super::status::BrokerStatus;

/// What is read at a time.
const PIECE_BYTES: usize = 64 << 10;

/// How a process joins a domain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberConfig {
    /// The broker's socket.
    pub path: PathBuf,
    /// The trust domain.
    pub domain: DomainName,
    /// Whether pages of different nodes are merged.
    pub placement: Placement,
    /// The longest that one call may wait for the broker. After it the broker counts as gone.
    pub time_limit: Duration,
}

impl MemberConfig {
    /// With the usual time limit.
    pub const fn new(path: PathBuf, domain: DomainName, placement: Placement) -> Self {
        Self { path, domain, placement, time_limit: Duration::from_secs(1) }
    }
}

/// The stable pages of a domain, owned by a broker.
///
/// Each call waits for the broker at most for [`MemberConfig::time_limit`]. Once the broker is gone it stays so: connections
/// cannot be made again behind a monitor's system call filters. What is mapped of stable pages stays valid.
///
/// The broker frees a client's holds when its process has ended, not before. So a process that has stable pages mapped must not
/// leave its memory to another (fork(2)).
///
/// System calls after [`connect`](Self::connect): `sendmsg`, `recvmsg`, `ppoll`, `close`, and those of the segments' user.
#[derive(Debug)]
pub struct BrokerStore<U> {
    link: Option<Link>,
    why_gone: String,
    segments: U,
    secret: Secret,
    nodes: Vec<u32>,
    limits: ToldLimits,
    placement: Placement,
    updates: Vec<(Change, Slot)>,
    news: VecDeque<(Node, PageHash)>,
    /// Shares of this client's pages by slot.
    shares: HashMap<Slot, u32>,
    /// Shares and reservations by segment, of all segments that the broker has announced.
    holds: HashMap<u32, u64>,
}

impl<U: SegmentUser> BrokerStore<U> {
    /// Joins a domain. `segments` gets the memory files that the domain's stable pages are in.
    ///
    /// System calls: `socket`, `connect`, `getsockopt`, `geteuid`, and those of all other calls.
    pub fn connect(config: &MemberConfig, segments: U) -> Result<Self, BrokerError> {
        let mut link = Link::connect(&config.path, config.time_limit)?;
        let hello = Hello { domain: config.domain.clone(), placement: config.placement };
        let mut bytes = Role::Member.preamble().to_vec();
        bytes.extend(Request::Hello(hello).encode());
        link.send(&bytes)?;
        let welcome = match link.reply()? {
            Reply::Welcome(welcome) => welcome,
            other => return Err(unexpected(&other)),
        };
        let Welcome { secret, nodes, limits } = welcome;
        Ok(Self {
            link: Some(link),
            why_gone: String::new(),
            segments,
            secret: Secret(secret),
            nodes,
            limits,
            placement: config.placement,
            updates: Vec::new(),
            news: VecDeque::new(),
            shares: HashMap::new(),
            holds: HashMap::new(),
        })
    }

    /// What the domain's hashes depend on.
    pub const fn secret(&self) -> Secret {
        self.secret
    }

    /// The most sharers of one stable page, over all clients.
    pub const fn max_page_sharing(&self) -> u32 {
        self.limits.max_page_sharing
    }

    /// Whether nodes are kept apart.
    pub const fn placement(&self) -> Placement {
        self.placement
    }

    /// Why there are no further shares, once the broker is gone.
    pub fn why_gone(&self) -> Option<&str> {
        self.link.is_none().then_some(self.why_gone.as_str())
    }

    /// Tells the broker what has been shared and given up. The other calls do so, too.
    pub fn flush(&mut self) {
        while !self.updates.is_empty() {
            let count = self.updates.len().min(BATCH_UPDATES);
            let request = Request::Updates(self.updates.drain(..count).collect()).encode();
            if self.with_link(|link| link.send(&request)).is_err() {
                // Nobody is interested any more.
                self.updates = Vec::new();
            }
        }
    }

    fn update(&mut self, change: Change, slot: Slot) {
        if self.link.is_none() {
            return;
        }
        self.updates.push((change, slot));
        if self.updates.len() >= BATCH_UPDATES {
            self.flush();
        }
    }

    /// Asks, and takes what the broker has to say until the answer.
    fn ask(&mut self, request: &Request<'_>) -> Result<Reply, StoreError> {
        self.flush();
        let (segments, holds) = (&mut self.segments, &mut self.holds);
        let link = self.link.as_mut().ok_or_else(|| StoreError::Gone(self.why_gone.clone()))?;
        let answer = link.send(&request.encode()).and_then(|()| {
            loop {
                match link.reply()? {
                    Reply::Segment { number, .. } => {
                        let file = link.descriptor()?;
                        segments.add(number, File::from(file)).map_err(|error| {
                            BrokerError::Gone(format!("its segment {number} cannot be used: {error}"))
                        })?;
                        holds.insert(number, 0);
                    }
                    Reply::Closed(numbers) => {
                        for number in numbers {
                            holds.remove(&number);
                            segments.remove(number);
                        }
                    }
                    answer => return Ok(answer),
                }
            }
        });
        answer.map_err(|error| self.lose(&error))
    }

    fn with_link(
        &mut self,
        action: impl FnOnce(&mut Link) -> Result<(), BrokerError>,
    ) -> Result<(), StoreError> {
        let link = self.link.as_mut().ok_or_else(|| StoreError::Gone(self.why_gone.clone()))?;
        action(link).map_err(|error| self.lose(&error))
    }

    /// The broker is not asked any more.
    fn lose(&mut self, error: &BrokerError) -> StoreError {
        let why = match error {
            BrokerError::Gone(why) => why.clone(),
            other => other.to_string(),
        };
        tracing::warn!("the merge broker is gone, there are no further shared pages: {why}");
        self.link = None;
        self.updates = Vec::new();
        self.news = VecDeque::new();
        self.why_gone.clone_from(&why);
        // Nobody says any more when a segment is not needed.
        let unused: Vec<u32> =
            self.holds.iter().filter(|(_, holds)| **holds == 0).map(|(&number, _)| number).collect();
        for number in unused {
            self.forget_segment(number);
        }
        StoreError::Gone(why)
    }

    fn forget_segment(&mut self, number: u32) {
        self.holds.remove(&number);
        self.segments.remove(number);
    }

    /// This client has got a reservation.
    fn note_hold(&mut self, slot: Slot) {
        *self.holds.entry(slot.segment).or_default() += 1;
    }

    /// This client has given up a share or a reservation.
    fn drop_hold(&mut self, slot: Slot) {
        let Some(holds) = self.holds.get_mut(&slot.segment) else { return };
        *holds = holds.saturating_sub(1);
        if *holds == 0 && self.link.is_none() {
            self.forget_segment(slot.segment);
        }
    }

    fn check_node(&self, node: Node) -> Result<(), StoreError> {
        let known = match self.placement {
            Placement::Across => node == Node::ANY,
            Placement::Apart => self.nodes.contains(&node.0),
        };
        if known {
            return Ok(());
        }
        let reason = match self.placement {
            Placement::Across => "this client of the broker merges across nodes".to_owned(),
            Placement::Apart => format!("the host's nodes with memory are {:?}", self.nodes),
        };
        Err(StoreError::NoRoom { node, source: io::Error::new(io::ErrorKind::NotFound, reason) })
    }

    fn publish_batch(
        &mut self,
        node: Node,
        contents: &[u8],
        slots: &mut Vec<Slot>,
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
        slots: &mut Vec<Slot>,
    ) -> Result<(), StoreError> {
        self.check_node(node)?;
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

    fn shared(&mut self, slot: Slot) {
        *self.shares.entry(slot).or_default() += 1;
        self.update(Change::Shared, slot);
    }

    fn unused(&mut self, slot: Slot) {
        self.drop_hold(slot);
        self.update(Change::Unused, slot);
    }

    fn release(&mut self, slot: Slot) {
        if let Some(shares) = self.shares.get_mut(&slot) {
            *shares -= 1;
            if *shares == 0 {
                self.shares.remove(&slot);
            }
        }
        self.drop_hold(slot);
        self.update(Change::Released, slot);
    }

    fn retire(&mut self, slot: Slot) {
        self.update(Change::Retired, slot);
    }

    fn counts(&self) -> StoreCounts {
        let entry = size_of::<(Slot, u32)>() + 1;
        StoreCounts {
            pages_shared: self.shares.len() as u64,
            metadata_bytes: (self.shares.capacity() * entry) as u64,
            ..StoreCounts::default()
        }
    }

    fn news(&mut self, news: &mut Vec<(Node, PageHash)>) {
        loop {
            match self.ask(&Request::News) {
                Ok(Reply::News(found)) => {
                    let more = found.len() >= BATCH_NEWS;
                    news.extend(found);
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
    /// Says what has not been said yet, if the broker takes it at once. What is still held is freed when the process ends.
    fn drop(&mut self) {
        let Some(link) = &mut self.link else { return };
        link.limit = Duration::ZERO;
        for batch in self.updates.chunks(BATCH_UPDATES) {
            if link.send(&Request::Updates(batch.to_vec()).encode()).is_err() {
                return;
            }
        }
    }
}

/// The state of the broker that listens at `path`.
pub fn ask_status(path: &Path, time_limit: Duration) -> Result<BrokerStatus, BrokerError> {
    let mut link = Link::connect(path, time_limit)?;
    link.send(&Role::Status.preamble())?;
    match link.reply()? {
        Reply::Status(document) => serde_json::from_slice(&document)
            .map_err(|error| BrokerError::Gone(format!("its state does not parse: {error}"))),
        other => Err(unexpected(&other)),
    }
}

fn unexpected(reply: &Reply) -> BrokerError {
    match reply {
        Reply::Refused(reason) => BrokerError::Refused { reason: reason.clone() },
        _ => BrokerError::Gone("it gave an answer to another question".to_owned()),
    }
}

/// A connection to a broker, on which every wait has an end.
#[derive(Debug)]
struct Link {
    socket: OwnedFd,
    limit: Duration,
    /// When the exchange that is under way must be over.
    deadline: Instant,
    incoming: Vec<u8>,
    descriptors: VecDeque<OwnedFd>,
}

impl Link {
    fn connect(path: &Path, limit: Duration) -> Result<Self, BrokerError> {
        let failed = |errno: Errno| BrokerError::Connect { path: path.to_owned(), source: errno.into() };
        let address = SocketAddrUnix::new(path).map_err(failed)?;
        let socket = stream().map_err(BrokerError::system("create a socket"))?;
        rustix::net::connect(&socket, &address).map_err(failed)?;
        let credentials = rustix::net::sockopt::socket_peercred(&socket)
            .map_err(BrokerError::system("find out who the broker is"))?;
        let ours = rustix::process::geteuid();
        if credentials.uid != ours && !credentials.uid.is_root() {
            let (theirs, ours) = (credentials.uid.as_raw(), ours.as_raw());
            return Err(BrokerError::ForeignUser { path: path.to_owned(), theirs, ours });
        }
        let deadline = Instant::now() + limit;
        Ok(Self { socket, limit, deadline, incoming: Vec::new(), descriptors: VecDeque::new() })
    }

    /// Begins an exchange.
    fn send(&mut self, bytes: &[u8]) -> Result<(), BrokerError> {
        self.deadline = Instant::now() + self.limit;
        let mut sent = 0;
        while sent < bytes.len() {
            match send(&self.socket, &bytes[sent..], None) {
                Ok(count) => sent += count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.wait(PollFlags::OUT)?,
                Err(error) => return Err(self.last_words(&error)),
            }
        }
        Ok(())
    }

    /// The next message of the broker.
    fn reply(&mut self) -> Result<Reply, BrokerError> {
        let garbage = |error| BrokerError::Gone(format!("it sent {error}"));
        loop {
            if let Some((kind, body, length)) = split_frame(&self.incoming).map_err(garbage)? {
                let reply = Reply::decode(kind, body).map_err(garbage)?;
                self.incoming.drain(..length);
                return match reply {
                    Reply::Refused(reason) => Err(BrokerError::Refused { reason }),
                    reply => Ok(reply),
                };
            }
            let before = self.incoming.len();
            self.incoming.resize(before + PIECE_BYTES, 0);
            let received = receive(&self.socket, &mut self.incoming[before..], &mut self.descriptors);
            self.incoming.truncate(before + received.as_ref().unwrap_or(&0));
            match received {
                Ok(0) => return Err(BrokerError::Gone("it has ended the connection".to_owned())),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.wait(PollFlags::IN)?,
                Err(error) => return Err(BrokerError::Gone(error.to_string())),
            }
        }
    }

    /// The descriptor of the announcement that was just read.
    fn descriptor(&mut self) -> Result<OwnedFd, BrokerError> {
        self.descriptors
            .pop_front()
            .ok_or_else(|| BrokerError::Gone("it announced a segment without its descriptor".to_owned()))
    }

    fn wait(&self, for_what: PollFlags) -> Result<(), BrokerError> {
        if Instant::now() >= self.deadline {
            return Err(BrokerError::Gone(format!("it did not answer within {:?}", self.limit)));
        }
        wait(&mut [PollFd::new(&self.socket, for_what)], Some(self.deadline))
            .map_err(|source| BrokerError::System { what: "wait for the broker", source })
    }

    /// A broker that ends a connection may have said why.
    fn last_words(&mut self, error: &io::Error) -> BrokerError {
        self.limit = Duration::ZERO;
        self.deadline = Instant::now();
        loop {
            match self.reply() {
                Err(refused @ BrokerError::Refused { .. }) => return refused,
                Ok(_) => {}
                Err(_) => return BrokerError::Gone(error.to_string()),
            }
        }
    }
}
