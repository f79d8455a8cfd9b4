use super::*;

fn hello() -> (Greeting, Vec<u8>) {
    let greeting = Greeting { monitor: "ebb 0.1.0".to_owned(), capabilities: Vec::new() };
    let mut bytes = Role::Control.preamble().to_vec();
    bytes.extend(Message::Hello(greeting.clone()).encode().unwrap());
    (greeting, bytes)
}

#[test]
fn no_byte_beyond_the_hello_is_requested() {
    let (greeting, bytes) = hello();
    for length in 0..bytes.len() {
        match examine(&bytes[..length]) {
            Ok(Intake::More(missing)) => {
                assert!((1..=bytes.len() - length).contains(&missing), "at {length}");
            }
            other => panic!("at {length}: {other:?}"),
        }
    }
    assert_eq!(examine(&bytes), Ok(Intake::Done(Arrival::Control(greeting))));
}

#[test]
fn a_data_stream_needs_only_its_preamble() {
    let session = SessionId::random().unwrap();
    let bytes = Role::Data { session, stream: 5 }.preamble();
    assert_eq!(examine(&bytes[..20]), Ok(Intake::More(12)));
    assert_eq!(examine(&bytes), Ok(Intake::Done(Arrival::Data { session, stream: 5 })));
}

#[test]
fn messages_other_than_a_hello_are_refused() {
    let control = |frame: &[u8]| {
        let mut bytes = Role::Control.preamble().to_vec();
        bytes.extend(frame);
        examine(&bytes).unwrap_err()
    };
    assert_eq!(control(&Message::Commit.encode().unwrap()), Unwanted::Message(MessageKind::Commit));
    assert_eq!(control(&[0, 0, 0, 0, 77]), Unwanted::Frame(FrameError::Kind(77)));
    // Refused because of its header, before any of its body is read.
    let long = control(&[0xff, 0xff, 0xff, 0xff, 1]);
    assert!(matches!(long, Unwanted::Frame(FrameError::Long { .. })), "{long:?}");
    let body = control(&[2, 0, 0, 0, 1, b'[', b']']);
    assert!(matches!(body, Unwanted::Frame(FrameError::Body { .. })), "{body:?}");
    assert!(matches!(examine(b"GET "), Err(Unwanted::Preamble(_))));
}
