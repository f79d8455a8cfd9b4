//! The nodes that stable pages can be on.

use std::path::Path;

/// The nodes of this host that have memory; node 0 if the kernel does not report them.
pub(super) fn host_nodes() -> Vec<u32> {
    let folder = Path::new("/sys/devices/system/node");
    let list = std::fs::read_to_string(folder.join("has_memory"));
    let nodes = list.ok().and_then(|list| parse_list(list.trim())).unwrap_or_default();
    if nodes.is_empty() { vec![0] } else { nodes }
}

/// `0-2,5` as Linux writes it (Documentation/admin-guide/cputopology.rst).
fn parse_list(list: &str) -> Option<Vec<u32>> {
    let mut nodes = Vec::new();
    for part in list.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
        if last > 1023 {
            return None;
        }
        nodes.extend(first..=last);
    }
    Some(nodes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_nodes_are_parsed() {
        assert_eq!(parse_list("0"), Some(vec![0]));
        assert_eq!(parse_list("0-2,5"), Some(vec![0, 1, 2, 5]));
        for bad in ["", "a", "0-", "0-4294967295"] {
            assert_eq!(parse_list(bad), None, "{bad}");
        }
        assert!(host_nodes().contains(&0));
    }
}
