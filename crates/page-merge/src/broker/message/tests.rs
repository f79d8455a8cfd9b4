use proptest::prelude::*;

use super::*;
use crate::broker::limits::{Limits, ToldLimits};
use crate::settings::Nodes;

fn slot() -> impl Strategy<Value = StableSlot> {
    any::<(u32, u32)>().prop_map(|(segment, index)| StableSlot { segment, index })
}

fn hash() -> impl Strategy<Value = PageHash> {
    any::<u64>().prop_map(PageHash::new)
}

fn answer() -> impl Strategy<Value = Answer> {
    prop_oneof![Just(Answer::Unknown), slot().prop_map(Answer::Stable), Just(Answer::Wanted)]
}

fn reply() -> impl Strategy<Value = Reply> {
    let limits = ToldLimits::from(&Limits::default());
    let welcome = (any::<[u8; 32]>(), prop::collection::vec(any::<u32>(), 0..9))
        .prop_map(move |(secret, nodes)| Reply::Welcome(Welcome { secret, nodes, limits }));
    let text = "[ -~]{0,80}";
    prop_oneof![
        welcome,
        text.prop_map(Reply::Refused),
        any::<(u32, u32)>().prop_map(|(number, pages)| Reply::Segment { number, pages }),
        prop::collection::vec(any::<u32>(), 0..9).prop_map(Reply::Closed),
        prop::collection::vec(answer(), 0..9).prop_map(Reply::Answers),
        prop::collection::vec(slot(), 0..9).prop_map(Reply::Slots),
        (any::<i32>(), text).prop_map(|(errno, reason)| Reply::NoRoom { errno, reason }),
        prop::collection::vec((any::<u32>().prop_map(Node), hash()), 0..9)
            .prop_map(Reply::Notifications),
        prop::collection::vec(any::<u8>(), 0..90).prop_map(Reply::Status),
    ]
}

fn request(contents: &[u8]) -> impl Strategy<Value = Request<'_>> {
    let change = prop::sample::select(vec![
        Change::Shared,
        Change::Released,
        Change::Unused,
        Change::Retired,
    ]);
    let node = any::<u32>().prop_map(Node);
    let hello = ("[A-Za-z0-9._-]{1,64}", any::<bool>()).prop_map(|(name, apart)| {
        let placement = if apart { Nodes::Apart } else { Nodes::Across };
        Request::Hello(Hello { domain: name.parse().unwrap(), placement })
    });
    prop_oneof![
        hello,
        (node.clone(), prop::collection::vec(hash(), 0..9))
            .prop_map(|(node, hashes)| Request::Query { node, hashes }),
        node.prop_map(move |node| Request::Publish { node, contents }),
        prop::collection::vec((change, slot()), 0..9).prop_map(Request::Updates),
        Just(Request::Notifications),
    ]
}

proptest! {
    #[test]
    fn messages_survive_encoding(request in request(&[7; 2 * PAGE]), reply in reply()) {
        for (bytes, is_request) in [(request.encode(), true), (reply.encode(), false)] {
            for length in 0..bytes.len() {
                prop_assert_eq!(split_frame(&bytes[..length]), Ok(None));
            }
            let (kind, body, length) = split_frame(&bytes).unwrap().unwrap();
            prop_assert_eq!(length, bytes.len());
            if is_request {
                prop_assert_eq!(Request::decode(kind, body), Ok(request.clone()));
                prop_assert_eq!(Reply::decode(kind, body), Err(FrameError::Direction(kind)));
            } else {
                prop_assert_eq!(Reply::decode(kind, body), Ok(reply.clone()));
                prop_assert_eq!(Request::decode(kind, body), Err(FrameError::Direction(kind)));
            }
        }
    }
}

#[test]
fn each_kind_of_frame_has_a_maximum_length() {
    for kind in Kind::ALL {
        let header = |bytes: usize| {
            let [a, b, c, d] = (bytes as u32).to_le_bytes();
            [a, b, c, d, kind as u8]
        };
        assert_eq!(parse_header(header(kind.longest_bytes())), Ok((kind, kind.longest_bytes())));
        let bytes = kind.longest_bytes() as u32 + 1;
        assert_eq!(
            parse_header(header(kind.longest_bytes() + 1)),
            Err(FrameError::Long { kind, bytes })
        );
    }
    assert_eq!(parse_header([0, 0, 0, 0, 0]), Err(FrameError::Kind(0)));
}

#[test]
fn broken_bodies_are_refused() {
    let bad = |kind, body: &[u8]| Request::decode(kind, body).unwrap_err();
    assert!(matches!(bad(Kind::Query, &[0; 3]), FrameError::Body { .. }));
    assert!(matches!(bad(Kind::Query, &[0; 11]), FrameError::Body { .. }));
    // Bits that no hash has.
    assert!(matches!(bad(Kind::Query, &[0xff; 12]), FrameError::Body { .. }));
    assert!(matches!(bad(Kind::Publish, &[0; 5]), FrameError::Body { .. }));
    assert!(matches!(bad(Kind::Updates, &[0; 9]), FrameError::Body { .. }));
    assert!(matches!(bad(Kind::Updates, &[1; 8]), FrameError::Body { .. }));
    assert!(matches!(bad(Kind::Hello, b"{}"), FrameError::Body { .. }));
    assert!(matches!(
        bad(Kind::Hello, br#"{"domain":"a/b","placement":"apart"}"#),
        FrameError::Body { .. }
    ));
    assert!(Reply::decode(Kind::Segment, &[0; 9]).is_err());
    let Ok(Reply::Refused(reason)) = Reply::decode(Kind::Refused, b"a\x1b[2Jb") else { panic!() };
    assert_eq!(reason, "a[2Jb");
}
