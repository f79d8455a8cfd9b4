#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| ebbd::fuzzing::libvirt_messages(data));
