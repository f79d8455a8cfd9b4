//! Sizes of the monitor's own process.

use std::io;

/// Resident memory of this process in bytes, guest memory included (Linux
/// Documentation/filesystems/proc.rst, `statm`).
pub(super) fn process_resident_bytes() -> io::Result<u64> {
    let statm = std::fs::read_to_string("/proc/self/statm")?;
    let pages: u64 = statm
        .split_ascii_whitespace()
        .nth(1)
        .and_then(|field| field.parse().ok())
        .ok_or_else(|| io::Error::other("/proc/self/statm has no second number"))?;
    // Pages of the host; x86_64 has one size of them.
    Ok(pages * ebb_abi::PAGE_SIZE_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn touched_memory_is_counted() {
        // Much more than the other tests of this process use and free meanwhile.
        const BYTES: usize = 256 << 20;
        let before = process_resident_bytes().unwrap();
        let touched = std::hint::black_box(vec![1u8; BYTES]);
        let after = process_resident_bytes().unwrap();
        assert!(after >= before + BYTES as u64 / 2, "{before} -> {after}");
        drop(touched);
    }
}
