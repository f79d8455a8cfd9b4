//! Bodies of the fuzz targets: each takes arbitrary bytes, does with them what a hostile peer could
//! do, and panics on a fault. They also run as ordinary tests.
//!
//! A new target is a function here, a line in [`TARGETS`], and a file of two lines in
//! `fuzz/fuzz_targets`.

use std::fs::File;
use std::io::{self, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::hash::PageHash;
use crate::memory::Node;
use crate::store::StableStore;

use super::client::{BrokerStore, MemberConfig, SegmentUser};
use super::limits::Limits;
use super::message::{PAGE, Reply, Request, split_frame};
use super::server::{Broker, BrokerConfig};
use crate::settings::Nodes;

/// A fuzz target by name.
pub type MergeTarget = (&'static str, fn(&[u8]));

/// All targets.
pub const TARGETS: [MergeTarget; 3] =
    [("broker_frame", frame), ("broker_server", server), ("broker_client", client)];

/// Input that fits into a socket's buffer, so that no thread is needed to write it.
const LONGEST_INPUT_BYTES: usize = 64 << 10;

/// One frame of either side: a decoded frame survives encoding.
pub fn frame(data: &[u8]) {
    let Ok(Some((kind, body, length))) = split_frame(data) else { return };
    assert!(length <= data.len());
    if let Ok(request) = Request::decode(kind, body) {
        let bytes = request.encode();
        let Ok(Some((again, body, _))) = split_frame(&bytes) else {
            panic!("{request:?} does not decode")
        };
        assert_eq!((again, Request::decode(again, body)), (kind, Ok(request)));
    }
    if let Ok(reply) = Reply::decode(kind, body) {
        let bytes = reply.encode();
        let Ok(Some((again, body, _))) = split_frame(&bytes) else {
            panic!("{reply:?} does not decode")
        };
        assert_eq!((again, Reply::decode(again, body)), (kind, Ok(reply)));
    }
}

/// A whole broker, with a client that sends these bytes and then nothing more. It ends by itself,
/// and its counts are consistent.
pub fn server(data: &[u8]) {
    let place = Place::new();
    let limits = Limits { domain_pages: 64, published_pages: 32, ..Limits::default() };
    let config = BrokerConfig { path: place.0.clone(), domains: Vec::new(), limits };
    let Ok(mut broker) = Broker::bind(config) else { return };
    let Ok(mut hostile) = UnixStream::connect(&place.0) else { return };
    let _ = hostile.write_all(&data[..data.len().min(LONGEST_INPUT_BYTES)]);
    let _ = hostile.shutdown(Shutdown::Write);
    broker.serve_until_idle();
    let status = broker.status();
    assert_eq!(status.clients, 0);
    for domain in &status.domains {
        let stable: u64 = domain.nodes.iter().map(|node| node.stable_pages).sum();
        let holds: u64 = domain.nodes.iter().map(|node| node.sharers + node.reservations).sum();
        assert!(stable <= 32 && stable <= holds && status.lost_clients > 0, "{status:?}");
    }
}

/// A whole client, with a broker that sends these bytes. Whatever they are, every call returns.
pub fn client(data: &[u8]) {
    struct Nowhere(u32);
    impl SegmentUser for Nowhere {
        fn next_number(&mut self) -> Option<u32> {
            self.0 += 1;
            Some(self.0)
        }
        fn add(&mut self, _: u32, _: File) -> io::Result<()> {
            Ok(())
        }
        fn remove(&mut self, _: u32) {}
    }
    let place = Place::new();
    let Ok(listener) = UnixListener::bind(&place.0) else { return };
    let bytes = data[..data.len().min(LONGEST_INPUT_BYTES)].to_vec();
    let broker = std::thread::spawn(move || {
        let Ok((mut stream, _)) = listener.accept() else { return };
        let _ = stream.write_all(&bytes);
        let _ = stream.shutdown(Shutdown::Write);
        // Reads the client's messages until it disconnects.
        let _ = io::copy(&mut stream, &mut io::sink());
    });
    let Ok(domain) = "web".parse() else { return };
    let mut config = MemberConfig::new(place.0.clone(), domain, Nodes::Across);
    config.time_limit = Duration::from_secs(10);
    if let Ok(mut store) = BrokerStore::connect(&config, Nowhere(0)) {
        let (mut answers, mut slots, mut notifications) = (Vec::new(), Vec::new(), Vec::new());
        let hashes = [PageHash::new(1), PageHash::new(2)];
        let known = store.query(Node::ANY, &hashes, &mut answers);
        assert_eq!(answers.len(), if known.is_ok() { 2 } else { 0 });
        let made = store.publish(Node::ANY, &hashes, &[7; 2 * PAGE], &mut slots);
        assert_eq!(slots.len(), if made.is_ok() { 2 } else { 0 });
        for &slot in &slots {
            store.shared(slot);
        }
        store.take_notifications(&mut notifications);
        for &slot in &slots {
            store.release(slot);
        }
    }
    assert!(broker.join().is_ok());
}

/// A path for a socket; removed at the end.
struct Place(PathBuf);

impl Place {
    fn new() -> Self {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("ebb-broker-fuzz-{}-{number}", std::process::id());
        Self(std::env::temp_dir().join(name))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // A broker has already removed it.
        let _ = std::fs::remove_file(&self.0);
    }
}
