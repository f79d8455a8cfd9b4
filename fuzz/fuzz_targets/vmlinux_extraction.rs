#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| { let _ = ebb_virtual_host::extract_vmlinux::extract_vmlinux(data); });
