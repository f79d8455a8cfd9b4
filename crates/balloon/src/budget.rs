//! A bound on the work of one call, so that a driver cannot keep the device from other queues and
//! from its owner.

/// Chains that one call takes at most.
const CHAINS: u32 = 128;

/// Units of work that one call does at most, apart from the chain or portion under way: a unit is a
/// descriptor, an entry that is read, 64 bits of a bitmap, or a page or range that is dealt with.
/// This many pages are 256 MiB.
const UNITS: u32 = 64 << 10;

/// What a call may still do.
#[derive(Debug)]
pub(crate) struct Budget {
    chains: u32,
    units: u32,
}

impl Budget {
    pub(crate) fn new() -> Self {
        Self { chains: CHAINS, units: UNITS }
    }

    /// Pays for a chain.
    pub(crate) fn spend_chain(&mut self) {
        self.chains = self.chains.saturating_sub(1);
    }

    /// Pays for units.
    pub(crate) fn spend(&mut self, units: usize) {
        self.units = self.units.saturating_sub(u32::try_from(units).unwrap_or(u32::MAX));
    }

    /// Ends the call's work: the rest waits for the next call.
    pub(crate) fn exhaust(&mut self) {
        self.units = 0;
    }

    /// Whether no further chain may be taken.
    pub(crate) fn is_exhausted(&self) -> bool {
        self.chains == 0 || self.units == 0
    }

    /// Whether a chain has been paid for.
    pub(crate) fn is_touched(&self) -> bool {
        self.chains < CHAINS
    }
}
