//! Times of accesses to merged pages on machines whose nodes are not equally far: calculated, not
//! measured.
//!
//! The nodes of an emulated host are all the same memory. Only the *places* of merged pages are
//! real there; the times to reach them come from this model: distances as firmware reports them in
//! its table of distances (ACPI SLIT, where 10 is a node's own memory), and a time in proportion to
//! them. A remote node one link away has 21, the value that most machines with two or four directly
//! connected sockets report, and each further link adds 10; eight sockets are corners of a cube, so
//! up to three links apart.

/// Distance of a node from itself (ACPI 6.5, section 5.2.17).
const LOCAL: f64 = 10.0;
/// Distance of a node one link away.
const FIRST_LINK: f64 = 11.0;
/// Additional distance for each further link.
const FURTHER_LINK: f64 = 10.0;
/// Time of an access to a node's own memory, ns: about that of server processors of the last ten
/// years.
pub(super) const LOCAL_NS: f64 = 90.0;

/// Population standard deviations of access times, in percent of their average, in the patch "ksm:
/// allow trees per NUMA node" (2013): nodes, pages merged across nodes, and apart.
pub(super) const PUBLISHED: [(u32, f64, f64); 3] = [(2, 1.4, 1.0), (4, 1.6, 0.32), (8, 1.7, 0.018)];

/// Number of links between two nodes of a machine with `nodes` nodes.
fn links(nodes: u32, from: u32, to: u32) -> u32 {
    match (nodes, from == to) {
        (_, true) => 0,
        // All nodes are linked with each other.
        (..=4, false) => 1,
        _ => (from ^ to).count_ones(),
    }
}

/// The distance between two nodes as in a SLIT.
pub(super) fn distance(nodes: u32, from: u32, to: u32) -> f64 {
    match links(nodes, from, to) {
        0 => LOCAL,
        links => LOCAL + FIRST_LINK + f64::from(links - 1) * FURTHER_LINK,
    }
}

/// Time of an access to memory of another node, ns.
pub(super) fn latency_ns(nodes: u32, from: u32, to: u32) -> f64 {
    LOCAL_NS * distance(nodes, from, to) / LOCAL
}

/// The mean time of an access of a guest on node `home` to its merged pages, which are on these
/// nodes.
pub(super) fn access_ns<'a>(
    nodes: u32,
    home: u32,
    placement: impl IntoIterator<Item = (&'a u32, &'a u64)>,
) -> Option<f64> {
    let (mut pages, mut sum_ns) = (0.0, 0.0);
    for (node, count) in placement {
        pages += *count as f64;
        sum_ns += *count as f64 * latency_ns(nodes, home, *node);
    }
    (pages > 0.0).then(|| sum_ns / pages)
}

/// Mean and population standard deviation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Spread {
    pub(super) mean: f64,
    pub(super) deviation: f64,
}

impl Spread {
    /// The spread of these values; `None` without any.
    pub(super) fn new(values: &[f64]) -> Option<Self> {
        let count = values.len() as f64;
        if values.is_empty() {
            return None;
        }
        let mean = values.iter().sum::<f64>() / count;
        let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / count;
        Some(Self { mean, deviation: variance.sqrt() })
    }

    /// The deviation in percent of the mean, when each value has `constant` added.
    pub(super) fn percent(self, constant: f64) -> f64 {
        100.0 * self.deviation / (self.mean + constant)
    }

    /// The constant to add to each value so that the deviation is `percent`: the part of an
    /// access's time that does not depend on the node, if the rest is the model's. `None` if the
    /// deviation is smaller without any.
    pub(super) fn constant_for(self, percent: f64) -> Option<f64> {
        Some(100.0 * self.deviation / percent - self.mean).filter(|constant| *constant >= 0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_are_those_of_common_machines() {
        let of_two = [distance(2, 0, 0), distance(2, 0, 1)];
        assert_eq!(of_two.map(|distance| distance as u32), [10, 21]);
        assert_eq!(distance(4, 3, 1) as u32, 21);
        assert_eq!([1, 3, 7].map(|to| distance(8, 0, to) as u32), [21, 31, 41]);
        for nodes in [2, 4, 8] {
            for (from, to) in (0..nodes).flat_map(|from| (0..nodes).map(move |to| (from, to))) {
                assert!((distance(nodes, from, to) - distance(nodes, to, from)).abs() < 1e-9);
            }
        }
    }

    #[test]
    fn a_guest_waits_for_the_nodes_that_its_pages_are_on() {
        assert_eq!(access_ns(2, 0, [(&0, &10)]), Some(LOCAL_NS));
        assert_eq!(access_ns(2, 1, [(&0, &1), (&1, &1)]), Some(LOCAL_NS * 1.55));
        assert_eq!(access_ns(2, 0, []), None);
    }

    #[test]
    fn deviations_are_of_the_whole_population() {
        let spread = Spread::new(&[90.0, 110.0]).unwrap();
        assert_eq!((spread.mean, spread.deviation), (100.0, 10.0));
        assert!((spread.percent(0.0) - 10.0).abs() < 1e-9);
        let constant = spread.constant_for(1.0).unwrap();
        assert!((spread.percent(constant) - 1.0).abs() < 1e-9);
        assert_eq!(spread.constant_for(20.0), None);
        assert_eq!(Spread::new(&[]), None);
    }

    /// All pages on the first node, as with one guest's copy of everything.
    #[test]
    fn pages_on_one_node_are_far_from_most_guests() {
        let percent = |nodes: u32| {
            let times: Vec<f64> =
                (0..nodes).filter_map(|home| access_ns(nodes, home, [(&0, &1)])).collect();
            Spread::new(&times).unwrap().percent(0.0)
        };
        assert!((percent(2) - 35.5).abs() < 0.1, "{}", percent(2));
        assert!(percent(4) > 20.0 && percent(8) > 20.0);
    }
}
