//! The values of `/proc/meminfo` that guests report by default.

use serde::{Deserialize, Serialize};

/// State of a guest's memory, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemInfo {
    /// `MemTotal`: memory that the kernel manages.
    pub total_bytes: u64,
    /// `MemFree`: unused memory.
    pub free_bytes: u64,
    /// `MemAvailable`: estimate of the memory available to programs without swapping.
    pub available_bytes: u64,
    /// `Cached`: page cache, including shared memory.
    pub cached_bytes: u64,
    /// `AnonPages`: memory of programs.
    pub anonymous_bytes: u64,
    /// `Slab`: kernel objects.
    pub slab_bytes: u64,
    /// `SwapTotal`.
    pub swap_total_bytes: u64,
    /// `SwapFree`.
    pub swap_free_bytes: u64,
}

impl MemInfo {
    /// Parses the text of `/proc/meminfo`; values of missing lines are 0.
    pub fn parse(text: &str) -> Self {
        let mut info = Self::default();
        for (name, kib) in lines(text) {
            let bytes = kib.saturating_mul(1024);
            match name {
                "MemTotal" => info.total_bytes = bytes,
                "MemFree" => info.free_bytes = bytes,
                "MemAvailable" => info.available_bytes = bytes,
                "Cached" => info.cached_bytes = bytes,
                "AnonPages" => info.anonymous_bytes = bytes,
                "Slab" => info.slab_bytes = bytes,
                "SwapTotal" => info.swap_total_bytes = bytes,
                "SwapFree" => info.swap_free_bytes = bytes,
                _ => {}
            }
        }
        info
    }

    /// Reads the present state.
    pub fn read() -> std::io::Result<Self> {
        std::fs::read_to_string("/proc/meminfo").map(|text| Self::parse(&text))
    }
}

/// Names and values of the lines of `/proc/meminfo` (`Name:  12 kB`) or `/proc/vmstat`
/// (`name 12`).
pub fn lines(text: &str) -> impl Iterator<Item = (&str, u64)> {
    text.lines().filter_map(|line| {
        let mut words = line.split_ascii_whitespace();
        let name = words.next()?;
        Some((name.strip_suffix(':').unwrap_or(name), words.next()?.parse().ok()?))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_converted_to_bytes() {
        let info = MemInfo::parse(
            "MemTotal:  16 kB\nMemFree:\t2 kB\ngarbage\nSlab: x kB\nSwapFree: 1 kB\n",
        );
        let expected = MemInfo {
            total_bytes: 16384,
            free_bytes: 2048,
            swap_free_bytes: 1024,
            ..MemInfo::default()
        };
        assert_eq!(info, expected);
    }

    #[test]
    fn both_forms_of_lines_are_parsed() {
        assert_eq!(lines("a: 1 kB\nb 2\nc\n").collect::<Vec<_>>(), [("a", 1), ("b", 2)]);
    }

    #[test]
    fn meminfo_of_this_machine_is_read() {
        let info = MemInfo::read().unwrap();
        assert!(info.total_bytes > info.free_bytes && info.free_bytes > 0);
    }
}
