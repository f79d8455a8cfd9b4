#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| ebb_vmm::fuzzing::fork_requests(data));
