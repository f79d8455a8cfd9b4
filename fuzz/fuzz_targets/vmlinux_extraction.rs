#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = ebb_vmlinux::extract_vmlinux(data);
});
