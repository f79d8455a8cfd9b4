//! `/proc/meminfo` and similar files, of this machine and of the host.

use std::collections::BTreeMap;
use std::fs;

use crate::error::HostError;

/// QEMU's memory overhead in MiB (translated code, page tables, devices).
const EMULATOR_MIB: u64 = 256;

/// Parses lines of `Name: value [kB]` into a map.
pub fn parse_meminfo(text: &str) -> BTreeMap<String, u64> {
    text.lines()
        .filter_map(|line| {
            let (name, value) = line.split_once(':')?;
            // Lines of a node's meminfo start with "Node 0 ".
            let name = name.rsplit(' ').next()?;
            Some((name.to_owned(), value.split_whitespace().next()?.parse().ok()?))
        })
        .collect()
}

/// Checks that this machine has enough memory for a host of `memory_mib`.
pub fn check_available(memory_mib: u64) -> Result<(), HostError> {
    let text =
        fs::read_to_string("/proc/meminfo").map_err(HostError::io("cannot read /proc/meminfo"))?;
    let values = parse_meminfo(&text);
    let Some(available_kib) = values.get("MemAvailable") else { return Ok(()) };
    let (asked_mib, available_mib) =
        (memory_mib.saturating_add(EMULATOR_MIB), available_kib / 1024);
    if asked_mib > available_mib {
        return Err(HostError::TooLittleMemory { asked_mib, available_mib });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms_of_meminfo_are_parsed() {
        let values = parse_meminfo(
            "MemTotal:  100 kB\nHugePages_Total:   3\nNode 1 MemFree: 7 kB\ngarbage\n",
        );
        let expected = [("HugePages_Total", 3), ("MemFree", 7), ("MemTotal", 100)];
        assert_eq!(
            values,
            expected.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
        );
    }

    #[test]
    fn too_much_memory_is_refused_with_both_numbers() {
        assert!(check_available(1).is_ok());
        let error = check_available(1 << 40).unwrap_err().to_string();
        assert!(error.contains("1099511628032") && error.contains("--memory"), "{error}");
    }
}
