//! Runs the fuzz targets briefly, without a fuzzer.

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use super::*;

/// Pieces of valid input and random bytes, so that inputs reach later stages.
fn input() -> impl Strategy<Value = Vec<u8>> {
    let request = |path: &str, body: &str| {
        let length = body.len();
        format!("PUT {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n{body}")
    };
    // A request in one piece or in two, each with its length and a number of descriptors.
    let piece = |text: &str, count: u8| [&[text.len() as u8, count], text.as_bytes()].concat();
    let snapshot = request("/vm/snapshot", r#"{"path":"/x"}"#);
    let migrate = request("/vm/migrate", r#"{"to":"tcp:192.0.2.1:1","streams":2}"#);
    let (begin, end) = snapshot.split_at(30);
    let mut pieces: Vec<Vec<u8>> = vec![
        piece(begin, 1),
        piece(end, 0),
        piece(&request("/vm/pause", ""), 1),
        piece("nonsense\r\n\r\n", 2),
    ];
    pieces.extend((0..4).map(|count| piece(&snapshot, count)));
    pieces.extend((2..8).map(|count| piece(&migrate, count)));
    for text in [
        "bandwidth=1M,ops=7",
        "bandwidth=1,bandwidth_burst=4M,ops_burst=0,ops=2",
        r#"{"device":"disk0","bandwidth":5,"ops":0}"#,
        "path=/x,memory_max=1G,cpu_weight=10",
        "ebb\nebb:x:997:996::/:/bin/false\n",
        "1000:100",
        "{\"error\":null}",
        "{\"error\":\"no\"}",
        "\"publish\"",
        "{\"remove\":{\"index\":0}}",
        "/proc/self",
        ",",
    ] {
        pieces.push(text.as_bytes().to_vec());
    }
    let piece = prop_oneof![
        1 => prop::sample::select(pieces),
        1 => prop::collection::vec(prop_oneof![any::<u8>(), 0..16_u8], 0..60),
    ];
    prop::collection::vec(piece, 0..6).prop_map(|pieces| pieces.concat())
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

/// `EBB_CHAINS=100000000` for a long run; the number of chains is printed.
#[test]
fn hostile_chains_against_vsock() {
    let wanted = std::env::var("EBB_CHAINS").ok().and_then(|text| text.parse().ok());
    let wanted: u64 = wanted.unwrap_or(200_000);
    let (mut chains, mut state, mut data) = (0, 0x9e37_79b9_7f4a_7c15_u64, vec![0; 4096]);
    while chains < wanted {
        for part in data.chunks_mut(8) {
            // xorshift64 (Marsaglia 2003).
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            part.copy_from_slice(&state.to_le_bytes());
        }
        chains += hostile_chains(&data);
    }
    println!("{chains} chains");
}
