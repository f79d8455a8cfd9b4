//! The host's memory as /proc/meminfo has it (proc_meminfo(5)).

/// A size in the text of /proc/meminfo, in bytes; `None` if it has none of this name, such as
/// `MemAvailable`.
pub fn of_meminfo(meminfo: &str, name: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        let text = "MemTotal:       16 kB\nMemFree: 5 kB\nHugePages_Total:  7\nSwapFree: x kB\n";
        assert_eq!(of_meminfo(text, "MemTotal"), Some(16 << 10));
        for name in ["Mem", "MemAvailable", "HugePages_Total", "SwapFree", ""] {
            assert_eq!(of_meminfo(text, name), None, "{name}");
        }
    }
}
