#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| ebb_balloon::fuzzing::host_request(data));
