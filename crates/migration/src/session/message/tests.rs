use proptest::prelude::*;

use super::*;

fn decode(frame: &[u8]) -> Result<Message, FrameError> {
    let (header, body) = frame.split_first_chunk().expect("a whole header");
    let (kind, bytes) = parse_header(*header)?;
    assert_eq!(bytes, body.len());
    Message::decode(kind, body.to_vec())
}

fn messages() -> Vec<Message> {
    let greeting =
        Greeting { monitor: "ebb 0.1.0".to_owned(), capabilities: vec!["hints".to_owned()] };
    vec![
        Message::Hello(greeting),
        Message::Setup(b"{}".to_vec()),
        Message::Accept(Acceptance { session: SessionId::random().unwrap(), streams: 4 }),
        Message::Refuse("no avx".into()),
        Message::Descriptors(3),
        Message::RoundDone(u32::MAX),
        Message::State(vec![0xff; 100_000]),
        Message::Ready,
        Message::Commit,
        Message::Running,
        Message::Failed("no disk".into()),
        Message::Abort("cancelled".into()),
    ]
}

#[test]
fn every_message_survives_a_round_trip() {
    let messages = messages();
    assert_eq!(messages.iter().map(Message::kind).collect::<Vec<_>>(), MessageKind::ALL);
    for message in messages {
        let frame = message.encode().unwrap();
        assert_eq!(decode(&frame).unwrap(), message);
    }
}

#[test]
fn numbers_of_messages_do_not_change() {
    assert_eq!(MessageKind::ALL.map(|kind| kind as u8), [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]);
    assert_eq!(Message::Commit.encode().unwrap(), [0, 0, 0, 0, 9]);
    assert_eq!(Message::RoundDone(0x0102).encode().unwrap(), [4, 0, 0, 0, 6, 2, 1, 0, 0]);
}

#[test]
fn lengths_are_bounded_by_kind() {
    let header = |bytes: u32, kind: u8| {
        let [a, b, c, d] = bytes.to_le_bytes();
        parse_header([a, b, c, d, kind])
    };
    for kind in MessageKind::ALL {
        let longest = kind.longest_bytes() as u32;
        assert_eq!(header(longest, kind as u8), Ok((kind, longest as usize)));
        assert_eq!(
            header(longest + 1, kind as u8),
            Err(FrameError::Long { kind, bytes: longest + 1 })
        );
    }
    assert_eq!(header(0, 0), Err(FrameError::Kind(0)));
    assert_eq!(header(0, 13), Err(FrameError::Kind(13)));
    let reason = Message::Abort("x".repeat(1_000_000).into());
    assert!(reason.encode().is_ok(), "a reason is truncated to the longest frame");
    assert!(Message::State(vec![0; LARGE_BYTES + 1]).encode().is_err());
}

#[test]
fn bodies_of_the_wrong_kind_are_refused() {
    for (kind, body) in [
        (MessageKind::Hello, &b"{}"[..]),
        (MessageKind::Hello, b""),
        (MessageKind::Accept, br#"{"session":"00","streams":1}"#),
        (MessageKind::Accept, br#"{"session":"000102030405060708090a0b0c0d0e0f","streams":70000}"#),
        (MessageKind::Refuse, b"no quotes"),
        (MessageKind::Descriptors, b"1"),
        (MessageKind::RoundDone, b"12345"),
        (MessageKind::Abort, b"\"\xff\""),
    ] {
        let error = Message::decode(kind, body.to_vec()).unwrap_err();
        assert!(matches!(error, FrameError::Body { .. }), "{kind}: {error}");
    }
}

#[test]
fn texts_of_the_other_side_are_printable() {
    let text = format!("\u{1b}[2J{}", "é".repeat(10_000));
    let frame = Message::decode(MessageKind::Abort, serde_json::to_vec(&text).unwrap()).unwrap();
    let Message::Abort(reason) = frame else { panic!("{frame:?}") };
    let reason = reason.to_string();
    assert!(reason.chars().count() == 2000 && !reason.contains('\u{1b}'), "{reason}");
    assert_eq!(Reason::from("").to_string(), "no reason given");

    let hello =
        serde_json::json!({ "monitor": "evil\n\u{7}monitor", "capabilities": [], "later": 1 });
    let hello = Message::decode(MessageKind::Hello, serde_json::to_vec(&hello).unwrap()).unwrap();
    assert!(
        matches!(&hello, Message::Hello(hello) if hello.monitor == "evil  monitor"),
        "{hello:?}"
    );
}

proptest! {
    #[test]
    fn no_body_panics(kind in 1_u8..13, body in proptest::collection::vec(any::<u8>(), 0..200)) {
        let kind = MessageKind::from_number(kind).unwrap();
        if let Ok(message) = Message::decode(kind, body) {
            prop_assert_eq!(message.kind(), kind);
            // A message without a body ignores one only here: its header must give a length of 0.
            prop_assert_eq!(decode(&message.encode().unwrap()).unwrap(), message);
        }
    }
}
