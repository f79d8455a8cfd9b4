//! A bound on the work of one call, so that a driver cannot keep the device busy at the expense of
//! other queues and of its owner.

/// Maximum number of chains per call.
const CHAINS: u32 = 128;

/// Maximum number of units of work per call, apart from the chain or portion in progress. A unit is
/// a descriptor, an entry read, 64 bits of a bitmap, or a page or range processed. This many pages
/// are 256 MiB.
const UNITS: u32 = 64 << 10;

/// The remaining budget of a call.
#[derive(Debug)]
pub(crate) struct Budget {
    chains: u32,
    units: u32,
}

impl Budget {
    pub(crate) fn new() -> Self {
        Self { chains: CHAINS, units: UNITS }
    }

    /// Charges for a chain.
    pub(crate) fn spend_chain(&mut self) {
        self.chains = self.chains.saturating_sub(1);
    }

    /// Charges for units.
    pub(crate) fn spend(&mut self, units: usize) {
        self.units = self.units.saturating_sub(u32::try_from(units).unwrap_or(u32::MAX));
    }

    /// Ends the call's work; the rest is left to the next call.
    pub(crate) fn exhaust(&mut self) {
        self.units = 0;
    }

    /// Whether no further chain may be taken.
    pub(crate) fn is_exhausted(&self) -> bool {
        self.chains == 0 || self.units == 0
    }

    /// Whether a chain has been charged.
    pub(crate) fn is_touched(&self) -> bool {
        self.chains < CHAINS
    }
}
