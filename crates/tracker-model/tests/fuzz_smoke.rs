//! Runs the bodies of the fuzz targets for a short while, without a fuzzer.

use ebb_tracker_model::fuzzing::TARGETS;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

#[test]
fn no_input_makes_a_target_fail() {
    for (name, body) in TARGETS {
        let mut runner = TestRunner::new(Config { cases: 500, ..Config::default() });
        let bytes = prop::collection::vec(prop_oneof![any::<u8>(), 0..16_u8], 0..600);
        let result = runner.run(&bytes, |data| {
            body(&data);
            Ok(())
        });
        assert!(result.is_ok(), "{name}: {result:?}");
    }
}
