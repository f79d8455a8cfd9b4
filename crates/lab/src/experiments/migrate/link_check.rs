//! Checks that the link carries the rate that it is shaped to: an emulated host may be slower.

use std::time::Duration;

use super::{FAST, SLOW};
use crate::LabError;
use crate::harness::link::{Link, Rate, transfer};
use crate::report::statistics::rounded;

/// Duration of the measurement of a plain transfer.
const COUNTED: Duration = Duration::from_millis(500);
/// A link that carries less than this fraction of its rate is not the bottleneck of a migration.
const ENOUGH: f64 = 0.9;

/// Rates of plain transfers, in Mbit/s.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Carried {
    pub(super) unshaped: f64,
    pub(super) fast: f64,
    pub(super) slow: f64,
}

impl Carried {
    /// Measures one transfer at each rate.
    ///
    /// # Errors
    /// [`LabError::Network`] and [`LabError::SystemFile`].
    pub(super) fn measure(link: &Link) -> Result<Self, LabError> {
        let at = |rate| {
            link.shape(rate)?;
            transfer::megabits_per_s(link, COUNTED).map(rounded)
        };
        Ok(Self { unshaped: at(Rate::Unshaped)?, fast: at(FAST)?, slow: at(SLOW)? })
    }

    /// Notes on the links for the reader.
    pub(super) fn notes(&self) -> Vec<String> {
        let slower = |(rate, carried): (Rate, f64)| match rate {
            Rate::Megabits(wanted) if carried < ENOUGH * wanted as f64 => Some(format!(
                "a plain transfer over the link of {} comes to {carried:.0} Mbit/s ({:.0} without \
                 shaping): this host is slower than the link",
                rate.describe(),
                self.unshaped
            )),
            _ => None,
        };
        [(FAST, self.fast), (SLOW, self.slow)].into_iter().filter_map(slower).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_host_that_is_slower_than_its_link_is_noted() {
        let good = Carried { unshaped: 20_000.0, fast: 9_600.0, slow: 955.0 };
        assert!(good.notes().is_empty());
        let emulated = Carried { unshaped: 3000.0, fast: 2900.0, slow: 950.0 };
        let notes = emulated.notes();
        assert_eq!(notes.len(), 1);
        assert!(notes[0].contains("10 Gbit/s comes to 2900 Mbit/s (3000 without"), "{notes:?}");
    }
}
