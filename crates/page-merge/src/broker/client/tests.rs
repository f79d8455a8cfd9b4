use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;

use super::super::hello::Welcome;
use super::super::limits::Limits;
use super::super::message::PAGE;
use super::super::socket;
use super::*;

/// Numbers of the segments that are in use.
#[derive(Debug, Default)]
struct Segments(Vec<u32>);

impl SegmentUser for Segments {
    fn next_number(&mut self) -> Option<u32> {
        Some(self.0.len() as u32 + 1)
    }

    fn add(&mut self, number: u32, _: File) -> io::Result<()> {
        self.0.push(number);
        Ok(())
    }

    fn remove(&mut self, number: u32) {
        self.0.retain(|other| *other != number);
    }
}

#[test]
fn a_broker_that_closes_what_is_in_use_is_given_up() {
    let (broker, client) = UnixStream::pair().unwrap();
    let send = |reply: &Reply, file: Option<&File>| {
        let bytes = reply.encode();
        let sent = socket::send(&broker, &bytes, file.map(|file| file.as_fd())).unwrap();
        assert_eq!(sent, bytes.len());
    };
    let limits = (&Limits::default()).into();
    send(&Reply::Welcome(Welcome { secret: [1; 32], nodes: vec![0], limits }), None);
    let config = MemberConfig::new("".into(), "web".parse().unwrap(), Nodes::Across);
    let mut store =
        BrokerStore::over(client.into(), &config, Segments::default(), Arc::default()).unwrap();

    // Two segments, with a share in one of them.
    let file = tempfile::tempfile().unwrap();
    for number in [5, 6] {
        send(&Reply::Segment { number, pages: 8 }, Some(&file));
    }
    send(&Reply::Slots(vec![StableSlot { segment: 6, index: 3 }]), None);
    let mut slots = Vec::new();
    store.publish(Node::ANY, &[PageHash::new(1)], &[7; PAGE], &mut slots).unwrap();
    store.shared(slots[0]);
    assert_eq!(store.segments.0, [1, 2]);

    // The one without a share may go.
    let mut query = |closed: u32| {
        send(&Reply::Closed(vec![closed]), None);
        send(&Reply::Answers(vec![Answer::Unknown]), None);
        let answer = store.query(Node::ANY, &[PageHash::new(2)], &mut Vec::new());
        (answer, store.segments.0.clone())
    };
    let (answer, segments) = query(5);
    assert!(answer.is_ok() && segments == [2], "{answer:?} {segments:?}");
    let (answer, segments) = query(6);
    assert!(matches!(&answer, Err(StoreError::Gone(why)) if why.contains("in use")), "{answer:?}");
    assert_eq!(segments, [2], "its pages are mapped");
}
