#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| ebb_page_merge::broker::fuzzing::server(data));
