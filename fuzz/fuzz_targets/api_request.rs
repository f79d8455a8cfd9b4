#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = ebb_vmm::api::parse_and_route(data);
});
