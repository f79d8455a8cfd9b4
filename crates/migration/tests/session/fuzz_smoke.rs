//! Runs the fuzz targets briefly, without a fuzzer.

use ebb_migration::session::fuzzing::TARGETS;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

/// The first byte of a target, and texts of the same length.
fn padded(texts: &[&str]) -> Vec<u8> {
    let longest = texts.iter().map(|text| text.len()).max().unwrap_or_default();
    let texts = texts.iter().map(|text| format!("{text:longest$}"));
    format!("x{}", texts.collect::<String>()).into_bytes()
}

/// Pieces of valid traffic and random bytes, so that inputs reach later stages.
fn input() -> impl Strategy<Value = Vec<u8>> {
    let frame = |kind: u8, body: &[u8]| {
        let mut bytes = (body.len() as u32).to_le_bytes().to_vec();
        bytes.push(kind);
        bytes.extend(body);
        bytes
    };
    // Files for TLS that are valid, and their parts in several orders.
    let key = rcgen::KeyPair::generate().unwrap();
    let certificate = rcgen::CertificateParams::new(vec!["a.example".to_owned()]).unwrap();
    let certificate = certificate.self_signed(&key).unwrap();
    let (key, certificate) = (key.serialize_pem(), certificate.pem());
    let mut preamble = b"EBB-MIG\n\x01\x00\x01\x00".to_vec();
    preamble.extend([0; 20]);
    let pieces = vec![
        preamble,
        b"EBB-MIG\n\x01\x00\x02\x00".to_vec(),
        frame(1, br#"{"monitor":"m","capabilities":[]}"#),
        frame(2, br#"{"streams":1,"machine":7}"#),
        frame(6, &[0; 4]),
        frame(7, b"state"),
        frame(8, b""),
        frame(9, b""),
        frame(10, b""),
        frame(11, b"\"failed\""),
        frame(12, b"\"aborted\""),
        b"tcp:[::1]:44".to_vec(),
        b"unix:/a".to_vec(),
        certificate.clone().into_bytes(),
        padded(&[&certificate, &key, &certificate]),
        padded(&[&certificate, &key, ""]),
        padded(&[&key, &certificate, &key]),
    ];
    let piece = prop_oneof![
        3 => prop::sample::select(pieces),
        1 => prop::collection::vec(prop_oneof![any::<u8>(), 0..16_u8], 0..40),
    ];
    let first = prop_oneof![Just(Vec::new()), (0..8_u8).prop_map(|byte| vec![byte])];
    (first, prop::collection::vec(piece, 0..6)).prop_map(|(mut bytes, pieces)| {
        bytes.extend(pieces.concat());
        bytes
    })
}

#[test]
fn no_input_makes_a_target_fail() {
    for (name, body) in TARGETS {
        let mut runner = TestRunner::new(Config { cases: 200, ..Config::default() });
        let result = runner.run(&input(), |data| {
            body(&data);
            Ok(())
        });
        assert!(result.is_ok(), "{name}: {result:?}");
    }
}
