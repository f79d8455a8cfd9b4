#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| ebb_tracker_model::fuzzing::recording(data));
