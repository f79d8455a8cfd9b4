//! A broker at its limit of open descriptors.

use ebb_page_merge::Nodes;
use std::path::Path;
use std::time::Duration;

use ebb_page_merge::broker::{Broker, BrokerConfig, BrokerError, Limits, MemberConfig};
use ebb_page_merge::{Answer, Node, StableStore, StoreError};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::child::Process;
use crate::support::{Member, page};

/// A broker that is sent its limit of further descriptors.
pub fn serve(path: &Path) {
    let config =
        BrokerConfig { path: path.to_owned(), domains: Vec::new(), limits: Limits::default() };
    let mut broker = Broker::bind(config).unwrap();
    let (wait, _stop) = rustix::pipe::pipe().unwrap();
    std::thread::spawn(|| {
        println!("\nlistening");
        for line in std::io::stdin().lines() {
            limit(limit_with(line.unwrap().parse().unwrap()));
            println!("\nspare");
        }
    });
    broker.run(std::os::fd::AsFd::as_fd(&wait)).unwrap();
}

fn limit(descriptors: u64) {
    let limit = Rlimit { current: Some(descriptors), ..getrlimit(Resource::Nofile) };
    setrlimit(Resource::Nofile, limit).unwrap();
}

/// The limit below which `spare` numbers of descriptors are free. Takes no descriptor itself: if
/// the limit were raised for it, the broker would meanwhile accept a client that waits or has gone,
/// and its descriptors would count as taken.
fn limit_with(spare: usize) -> u64 {
    let is_open = |number| std::fs::symlink_metadata(format!("/proc/self/fd/{number}")).is_ok();
    (0..).filter(|&number| !is_open(number)).nth(spare).unwrap()
}

impl Process {
    fn spare(&mut self, descriptors: usize) {
        self.send_line(&descriptors.to_string());
        self.wait_for("spare");
    }
}

#[test]
fn without_descriptors_no_client_loses_pages_and_service_resumes_later() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("broker");
    let mut broker = Process::start("poor broker", &path);
    broker.wait_for("listening");
    let mut a = Member::join(&path, "web", Nodes::Across).unwrap();
    let mut b = Member::join(&path, "web", Nodes::Across).unwrap();
    let one = a.make(&[1])[0];

    // Existing pages can be shared with clients that do not have their file yet.
    broker.spare(0);
    assert_eq!(b.share(1), one);

    // A new domain has no file yet.
    broker.spare(20);
    let mut other = Member::join(&path, "other", Nodes::Across).unwrap();
    let mut made = 0;
    for spare in 0..8 {
        broker.spare(spare);
        let (hash, mut slots) = (other.hash(2), Vec::new());
        match other.store.publish(Node::ANY, &[hash], &page(2), &mut slots) {
            Ok(()) => {
                assert_eq!(other.read(slots[0]), page(2));
                other.store.unused(slots[0]);
                made += 1;
            }
            Err(StoreError::NoRoom { .. }) => assert!(slots.is_empty()),
            Err(error) => panic!("with {spare} descriptors: {error}"),
        }
        other.store.flush();
        assert_eq!(other.query(2), Answer::Unknown, "nothing is left of it");
    }
    assert!((1..8).contains(&made), "{made}");

    // New clients are refused and have to connect again.
    let mut config = MemberConfig::new(path.clone(), "web".parse().unwrap(), Nodes::Across);
    config.time_limit = Duration::from_millis(300);
    for spare in [0, 1] {
        broker.spare(spare);
        let error = Member::with_config(&config).err().unwrap();
        match (spare, &error) {
            (0, BrokerError::Late(_)) => {}
            (1, BrokerError::Refused { reason }) => assert!(reason.contains("no room"), "{reason}"),
            _ => panic!("with {spare} descriptors: {error}"),
        }
        assert_eq!(a.query(1), Answer::Stable(one));
        a.store.unused(one);
    }
    broker.spare(20);
    let mut late = Member::join(&path, "web", Nodes::Across).unwrap();
    assert_eq!(late.share(1), one);
}
