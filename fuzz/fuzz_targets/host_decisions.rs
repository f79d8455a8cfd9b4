#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| ebb_host_policy::fuzzing::decisions(data));
