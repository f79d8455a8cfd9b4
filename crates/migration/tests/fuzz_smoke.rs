//! Runs the bodies of the engine's fuzz targets for a short while, without a fuzzer.

use ebb_migration::fuzzing::TARGETS;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

/// Bytes as a fuzzer comes up with them: all kinds, with small values more often, so that steps of
/// all kinds occur.
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
