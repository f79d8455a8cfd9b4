//! Runs the body of the fuzz target for a short while, without a fuzzer.

use ebb_host_policy::fuzzing::TARGETS;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

#[test]
fn no_input_makes_a_target_fail() {
    for (name, body) in TARGETS {
        let mut runner = TestRunner::new(Config { cases: 2000, ..Config::default() });
        let result = runner.run(&prop::collection::vec(any::<u8>(), 0..800), |data| {
            body(&data);
            Ok(())
        });
        assert!(result.is_ok(), "{name}: {result:?}");
    }
}
