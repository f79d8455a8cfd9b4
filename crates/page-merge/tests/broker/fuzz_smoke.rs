//! Runs the bodies of the fuzz targets for a short while, without a fuzzer.

use ebb_page_merge::broker::fuzzing::TARGETS;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use crate::raw::{self, ANY, PREAMBLE};
use crate::support::page;

/// Pieces of valid traffic, and arbitrary bytes, so that inputs pass the first checks.
fn input() -> impl Strategy<Value = Vec<u8>> {
    let slot = |index| ebb_guest_ram::StableSlot { segment: 0, index };
    let hash = ebb_page_merge::PageHash::new(1);
    let pieces = vec![
        [PREAMBLE.to_vec(), raw::hello("web")].concat(),
        raw::hello("other"),
        raw::query(ANY, &[hash]),
        raw::publish(ANY, &page(1)),
        raw::publish(ANY, &[page(1), page(2)].concat()),
        raw::change(1, slot(0)),
        raw::change(2, slot(0)),
        raw::change(3, slot(1)),
        raw::change(4, slot(1)),
        raw::ask_notifications(),
        raw::frame(66, b"no"),
        raw::frame(67, &[0; 8]),
        raw::frame(68, &[0; 4]),
        raw::frame(69, &[1, 0, 0, 0, 0, 0, 0, 0, 0]),
        raw::frame(70, &[0; 8]),
        raw::frame(71, b"\x0c\0\0\0no room"),
        raw::frame(72, &[0; 12]),
        raw::frame(
            65,
            concat!(
                r#"{"secret":[0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0],"#,
                r#""nodes":[0],"limits":{"max_page_sharing":2,"#,
                r#""domain_pages":1,"reservations":1}}"#
            )
            .as_bytes(),
        ),
    ];
    let piece = prop_oneof![
        4 => prop::sample::select(pieces),
        1 => prop::collection::vec(prop_oneof![any::<u8>(), 0..16_u8], 0..40),
    ];
    prop::collection::vec(piece, 0..8).prop_map(|pieces| pieces.concat())
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
