//! NUMA tables: affinity of memory and vCPUs (SRAT, section 5.2.16; SLIT, section 5.2.17).

use std::ops::Range;

use acpi_tables::sdt::Sdt;

use super::{OEM_ID, REVISION, TABLE_ID};

/// One node as the guest sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NumaNode {
    /// vCPUs, by index.
    pub cpus: Vec<u8>,
    /// Guest-physical memory.
    pub ranges: Vec<Range<u64>>,
    /// Distance to every node.
    pub distances: Vec<u8>,
}

const ENABLED: u32 = 1;

/// The affinity table, built by hand: acpi_tables has no local APIC affinity structure.
pub(super) fn srat(nodes: &[NumaNode]) -> Sdt {
    let mut srat = Sdt::new(*b"SRAT", 36, 3, OEM_ID, TABLE_ID, REVISION);
    srat.append(1u32.to_le_bytes());
    srat.append(0u64.to_le_bytes());
    for (domain, node) in nodes.iter().enumerate() {
        for &cpu in &node.cpus {
            srat.append_slice(&processor_affinity(domain as u32, cpu));
        }
        for range in &node.ranges {
            srat.append_slice(&memory_affinity(domain as u32, range));
        }
    }
    srat
}

/// Processor local APIC affinity structure, 16 bytes.
fn processor_affinity(domain: u32, apic_id: u8) -> [u8; 16] {
    let mut bytes = [0; 16];
    let domain = domain.to_le_bytes();
    bytes[1] = 16;
    bytes[2] = domain[0];
    bytes[3] = apic_id;
    bytes[4..8].copy_from_slice(&ENABLED.to_le_bytes());
    bytes[9..12].copy_from_slice(&domain[1..]);
    bytes
}

/// Memory affinity structure, 40 bytes.
fn memory_affinity(domain: u32, range: &Range<u64>) -> [u8; 40] {
    let mut bytes = [0; 40];
    bytes[0] = 1;
    bytes[1] = 40;
    bytes[2..6].copy_from_slice(&domain.to_le_bytes());
    bytes[8..16].copy_from_slice(&range.start.to_le_bytes());
    bytes[16..24].copy_from_slice(&(range.end - range.start).to_le_bytes());
    bytes[28..32].copy_from_slice(&ENABLED.to_le_bytes());
    bytes
}

/// The distance table, also built by hand: that of acpi_tables is always symmetric, the
/// specification's need not be.
pub(super) fn slit(nodes: &[NumaNode]) -> Sdt {
    let mut slit = Sdt::new(*b"SLIT", 36, 1, OEM_ID, TABLE_ID, REVISION);
    slit.append((nodes.len() as u64).to_le_bytes());
    for node in nodes {
        slit.append_slice(&node.distances);
    }
    slit
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_carry_their_node() {
        let node = |cpu, start: u64| NumaNode {
            cpus: vec![cpu],
            ranges: vec![start << 30..(start + 1) << 30],
            distances: vec![10, 20],
        };
        let srat = srat(&[node(0, 0), node(7, 4)]);
        let bytes = &srat.as_slice()[48..];
        assert_eq!(bytes.len(), 2 * (16 + 40));
        let second = &bytes[56..];
        assert_eq!((second[2], second[3]), (1, 7));
        assert_eq!(u32::from_le_bytes(second[18..22].try_into().unwrap()), 1);
        assert_eq!(u64::from_le_bytes(second[24..32].try_into().unwrap()), 4 << 30);
        assert_eq!(u64::from_le_bytes(second[32..40].try_into().unwrap()), 1 << 30);
    }
}
