//! Runs the bodies of the fuzz targets for a short while, without a fuzzer.

use ebb_balloon::fuzzing::TARGETS;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

/// Bytes like a fuzzer's: all values, with small ones more often, so that steps of all kinds occur.
fn input() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(prop_oneof![any::<u8>(), 0..16_u8], 0..600)
}

#[test]
fn no_input_makes_a_target_fail() {
    for (name, body) in TARGETS {
        let mut runner = TestRunner::new(Config { cases: 150, ..Config::default() });
        let result = runner.run(&input(), |data| {
            body(&data);
            Ok(())
        });
        assert!(result.is_ok(), "{name}: {result:?}");
    }
}
