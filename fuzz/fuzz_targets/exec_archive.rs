#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| ebb_guest_agent::fuzzing::archive(data));
