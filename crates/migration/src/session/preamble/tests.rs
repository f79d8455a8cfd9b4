use super::*;

fn data(stream: u16) -> Role {
    Role::Data { session: SessionId::from_bytes([7; 16]), stream }
}

#[test]
fn roles_survive_a_round_trip() {
    for role in [Role::Control, data(0), data(MOST_STREAMS - 1)] {
        assert_eq!(Role::parse(&role.preamble()), Ok(Some(role)));
    }
}

#[test]
fn the_layout_does_not_change() {
    let mut expected = b"EBB-MIG\n\x04\x00\x02\x00\x03\x00\x00\x00".to_vec();
    expected.extend([7; 16]);
    assert_eq!(data(3).preamble().as_slice(), expected);
    assert_eq!(
        Role::Control.preamble()[8..],
        [4, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    );
}

#[test]
fn a_part_of_a_preamble_needs_more() {
    let whole = data(1).preamble();
    for length in 0..whole.len() {
        assert_eq!(Role::parse(&whole[..length]), Ok(None), "{length} bytes");
    }
}

#[test]
fn the_first_wrong_byte_is_refused() {
    let whole = data(1).preamble();
    for wrong in 0..16 {
        let mut bytes = whole;
        bytes[wrong] ^= 0x80;
        let at_once = wrong < 8;
        let result = Role::parse(if at_once { &bytes[..=wrong] } else { &bytes });
        match wrong {
            8 => assert_eq!(result, Err(PreambleError::Version(0x84))),
            9 => assert_eq!(result, Err(PreambleError::Version(0x8004))),
            _ => assert!(
                matches!(result, Err(PreambleError::Foreign(_))),
                "byte {wrong}: {result:?}"
            ),
        }
    }
    // A control connection joins nothing.
    let mut bytes = Role::Control.preamble();
    bytes[31] = 1;
    assert!(matches!(Role::parse(&bytes), Err(PreambleError::Foreign(_))));
}

#[test]
fn other_protocols_are_described() {
    let foreign = |bytes: &[u8]| match Role::parse(bytes) {
        Err(PreambleError::Foreign(found)) => found,
        other => panic!("{other:?}"),
    };
    assert_eq!(foreign(&[22, 3, 1]), "it speaks TLS");
    assert_eq!(foreign(b"HTTP/1.1 400 Bad Request"), "it began with \"HTTP/1.1 400 Bad Request\"");
    assert_eq!(foreign(b"\x1b[2J"), "it began with \" [2J\"");
}

#[test]
fn ids_are_unique_and_secret() {
    let (a, b) = (SessionId::random().unwrap(), SessionId::random().unwrap());
    let copy = a;
    assert!(a != b && a == copy);
    let text = String::from(a);
    assert_eq!(text.len(), 32);
    assert!(!format!("{a:?}").contains(&text[..4]));
    assert_eq!(SessionId::try_from(text.clone()), Ok(a));
    for wrong in [&text[1..], &format!("{text}0"), &text.replace(&text[..1], "x"), &"é".repeat(16)]
    {
        assert!(SessionId::try_from(wrong.to_owned()).is_err(), "{wrong}");
    }
}
