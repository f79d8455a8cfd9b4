//! Runs the engine's fuzz targets briefly, without a fuzzer.

use ebb_migration::fuzzing::TARGETS;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

/// Random bytes, with small values more often, so that all kinds of steps occur.
fn input() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(prop_oneof![any::<u8>(), 0..16_u8], 0..600)
}

#[test]
fn no_input_makes_a_target_fail() {
    for (name, body) in TARGETS {
        let mut runner = TestRunner::new(Config { cases: 1000, ..Config::default() });
        let result = runner.run(&input(), |data| {
            body(&data);
            Ok(())
        });
        assert!(result.is_ok(), "{name}: {result:?}");
    }
}
