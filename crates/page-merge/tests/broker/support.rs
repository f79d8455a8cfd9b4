//! A broker on a thread of this process, and clients of it.

use ebb_page_merge::Nodes;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use ebb_guest_ram::{StableSegments, StableSlot};
use ebb_page_merge::broker::{
    Broker, BrokerConfig, BrokerError, BrokerStatus, BrokerStore, DomainRule, DomainStatus, Limits,
    MemberConfig, NodeStatus, SegmentUser, ask_status,
};
use ebb_page_merge::{Answer, Node, PageHash, PageHasher, StableStore};
use tempfile::TempDir;

pub const PAGE: usize = 4096;

/// More than any answer takes on a busy machine.
pub const LONG: Duration = Duration::from_secs(60);

/// A broker that serves until it is dropped.
pub struct Running {
    folder: TempDir,
    stop: OwnedFd,
    thread: Option<JoinHandle<Result<(), BrokerError>>>,
}

impl Running {
    pub fn new(limits: Limits) -> Self {
        Self::with_rules(limits, Vec::new())
    }

    pub fn with_rules(limits: Limits, domains: Vec<DomainRule>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let config = BrokerConfig { path: folder.path().join("broker"), domains, limits };
        let (wait, stop) = rustix::pipe::pipe().unwrap();
        let mut broker = Broker::bind(config).unwrap();
        let thread = std::thread::spawn(move || broker.run(wait.as_fd()));
        Self { folder, stop, thread: Some(thread) }
    }

    pub fn path(&self) -> PathBuf {
        self.folder.path().join("broker")
    }

    pub fn status(&self) -> BrokerStatus {
        ask_status(&self.path(), LONG).unwrap()
    }

    pub fn member(&self, domain: &str) -> Member {
        Member::join(&self.path(), domain, Nodes::Across).unwrap()
    }

    /// Counts of a domain that does not keep nodes apart.
    pub fn pages_of(&self, domain: &str) -> NodeStatus {
        let status = self.status();
        let domain = status.domains.iter().find(|found| found.name.as_str() == domain);
        domain.and_then(|domain| domain.nodes.first()).cloned().unwrap_or(NOTHING)
    }

    pub fn domain(&self, domain: &str) -> Option<DomainStatus> {
        self.status().domains.into_iter().find(|found| found.name.as_str() == domain)
    }
}

/// No pages at all.
pub const NOTHING: NodeStatus =
    NodeStatus { node: None, stable_pages: 0, sharers: 0, reservations: 0, remembered_hashes: 0 };

impl Drop for Running {
    fn drop(&mut self) {
        rustix::io::write(&self.stop, &[0]).unwrap();
        let ended = self.thread.take().unwrap().join();
        // A failed test has reported its reason already.
        if !std::thread::panicking() {
            ended.unwrap().unwrap();
            assert!(!self.path().exists(), "the socket is left");
        }
    }
}

/// The segments of a client, and their files for tests of forbidden accesses.
#[derive(Clone, Debug)]
pub struct Segments {
    pub mapped: Arc<StableSegments>,
    pub files: Arc<std::sync::Mutex<std::collections::BTreeMap<u32, File>>>,
}

impl Segments {
    pub fn new() -> Self {
        Self { mapped: StableSegments::new(), files: Arc::default() }
    }

    pub fn numbers(&self) -> Vec<u32> {
        self.files.lock().unwrap().keys().copied().collect()
    }
}

impl SegmentUser for Segments {
    fn next_number(&mut self) -> Option<u32> {
        SegmentUser::next_number(&mut self.mapped)
    }

    fn add(&mut self, number: u32, file: File) -> io::Result<()> {
        self.files.lock().unwrap().insert(number, file.try_clone()?);
        SegmentUser::add(&mut self.mapped, number, file)
    }

    fn remove(&mut self, number: u32) {
        self.files.lock().unwrap().remove(&number);
        SegmentUser::remove(&mut self.mapped, number);
    }
}

/// A client.
pub struct Member {
    pub store: BrokerStore<Segments>,
    pub segments: Segments,
    hasher: PageHasher,
    pub node: Node,
}

impl Member {
    pub fn join(path: &Path, domain: &str, placement: Nodes) -> Result<Self, BrokerError> {
        let mut config = MemberConfig::new(path.to_owned(), domain.parse().unwrap(), placement);
        config.time_limit = LONG;
        Self::with_config(&config)
    }

    pub fn with_config(config: &MemberConfig) -> Result<Self, BrokerError> {
        let segments = Segments::new();
        let store = BrokerStore::connect(config, segments.clone())?;
        Ok(Self::of(store, segments, config.placement))
    }

    /// Over a connection that another process has made.
    pub fn join_over(connection: OwnedFd, path: &Path, domain: &str) -> Result<Self, BrokerError> {
        let (domain, placement) = (domain.parse().unwrap(), Nodes::Across);
        let config = MemberConfig::new(path.to_owned(), domain, placement);
        let segments = Segments::new();
        let store = BrokerStore::over(connection, &config, segments.clone(), Arc::default())?;
        Ok(Self::of(store, segments, placement))
    }

    fn of(store: BrokerStore<Segments>, segments: Segments, placement: Nodes) -> Self {
        let hasher = PageHasher::new(&store.secret());
        let node = match placement {
            Nodes::Across => Node::ANY,
            Nodes::Apart => Node(0),
        };
        Self { store, segments, hasher, node }
    }

    pub fn hash(&self, number: u64) -> PageHash {
        self.hasher.hash(&page(number))
    }

    pub fn query(&mut self, number: u64) -> Answer {
        let mut answers = Vec::new();
        let hash = self.hash(number);
        self.store.query(self.node, &[hash], &mut answers).unwrap();
        answers[0]
    }

    pub fn publish(&mut self, numbers: &[u64]) -> Vec<StableSlot> {
        let contents: Vec<u8> = numbers.iter().flat_map(|&number| page(number)).collect();
        let hashes: Vec<PageHash> = numbers.iter().map(|&number| self.hash(number)).collect();
        let mut slots = Vec::new();
        self.store.publish(self.node, &hashes, &contents, &mut slots).unwrap();
        slots
    }

    /// Publishes pages and shares each once.
    pub fn make(&mut self, numbers: &[u64]) -> Vec<StableSlot> {
        let slots = self.publish(numbers);
        for &slot in &slots {
            self.store.shared(slot);
        }
        self.store.flush();
        slots
    }

    /// Shares an existing page.
    pub fn share(&mut self, number: u64) -> StableSlot {
        let Answer::Stable(slot) = self.query(number) else { panic!("page {number} is not there") };
        assert_eq!(self.read(slot), page(number));
        self.store.shared(slot);
        self.store.flush();
        slot
    }

    /// A stable page as seen by this client.
    pub fn read(&self, slot: StableSlot) -> Vec<u8> {
        let mut content = vec![0; PAGE];
        let slot = StableSlot { segment: slot.segment, index: slot.index };
        self.segments.mapped.read(slot, &mut content).unwrap();
        content
    }

    pub fn take_notifications(&mut self) -> Vec<(Node, PageHash)> {
        let mut notifications = Vec::new();
        self.store.take_notifications(&mut notifications);
        notifications
    }
}

/// A page whose content encodes a number.
pub fn page(number: u64) -> Vec<u8> {
    let mut page = vec![0xa5; PAGE];
    page[100..108].copy_from_slice(&number.to_le_bytes());
    page
}

/// Waits until a condition holds.
pub fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begin = std::time::Instant::now();
    while !is_so() {
        assert!(begin.elapsed() < LONG, "timeout while waiting for {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}
