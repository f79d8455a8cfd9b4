#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| ebb_migration::session::fuzzing::tls_files(data));
