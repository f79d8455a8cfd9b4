//! The record of a page: eight bytes.

use crate::hash::PageHash;

const STATE_SHIFT: u32 = PageHash::BITS;
const AGE_SHIFT: u32 = STATE_SHIFT + 3;
const NODE_SHIFT: u32 = AGE_SHIFT + 3;
const VALUE_MASK: u64 = (1 << PageHash::BITS) - 1;

/// State of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// Absent, excluded, or not scanned yet.
    Unknown = 0,
    /// Written to lately; may be hashed after some more clean scans.
    Watched = 1,
    /// Unchanged since it was hashed, and in the unstable index.
    Unshared = 2,
    /// Replaced by a stable page.
    Merged = 3,
    /// Was zeros and has been discarded; reads as zeros.
    Zeroed = 4,
    /// Hashed, and a duplicate, but it could not be replaced; retried later.
    Refused = 5,
    /// Part of a huge page, and hashed: known to be unchanged only if it is read once more.
    Seen = 6,
}

impl State {
    /// Number of states.
    pub(crate) const COUNT: usize = 7;

    const ALL: [Self; Self::COUNT] = [
        Self::Unknown,
        Self::Watched,
        Self::Unshared,
        Self::Merged,
        Self::Zeroed,
        Self::Refused,
        Self::Seen,
    ];

    /// Whether the record has the hash of the page's content, as far as it is known to be
    /// unchanged.
    pub(crate) fn has_hash(self) -> bool {
        matches!(self, Self::Unshared | Self::Refused)
    }
}

/// A node, as an index into the domain's list of nodes. Linux has at most 1024 nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct NodeNumber(pub(crate) u16);

impl NodeNumber {
    /// Unknown.
    pub(crate) const NONE: Self = Self(0x3ff);
}

/// State, age, node, and a value that depends on the state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Record(u64);

const _: () = assert!(size_of::<Record>() == 8);

impl Record {
    /// Record of a page about which nothing is known.
    pub(crate) const UNKNOWN: Self = Self((NodeNumber::NONE.0 as u64) << NODE_SHIFT);
    /// Highest age.
    pub(crate) const OLDEST: u8 = 7;

    pub(crate) fn state(self) -> State {
        // Only values of `State` are stored.
        State::ALL.get((self.0 >> STATE_SHIFT) as usize & 7).copied().unwrap_or(State::Unknown)
    }

    /// Number of times that the page changed after it had been hashed or merged.
    pub(crate) fn age(self) -> u8 {
        (self.0 >> AGE_SHIFT) as u8 & 7
    }

    pub(crate) fn node(self) -> NodeNumber {
        NodeNumber((self.0 >> NODE_SHIFT) as u16)
    }

    /// Of [`State::Unshared`], [`State::Refused`] and [`State::Seen`]: hash of the content.
    pub(crate) fn hash(self) -> PageHash {
        PageHash::new(self.0)
    }

    /// Of [`State::Watched`]: clean scans still required. Of [`State::Merged`]: 1 if the stable
    /// page is on another node.
    pub(crate) fn value(self) -> u64 {
        self.0 & VALUE_MASK
    }

    #[must_use]
    pub(crate) fn with(self, state: State, value: u64) -> Self {
        let kept = self.0 & !(VALUE_MASK | (7 << STATE_SHIFT));
        Self(kept | (value & VALUE_MASK) | ((state as u64) << STATE_SHIFT))
    }

    #[must_use]
    pub(crate) fn older(self) -> Self {
        let age = u64::from((self.age() + 1).min(Self::OLDEST));
        Self((self.0 & !(7 << AGE_SHIFT)) | (age << AGE_SHIFT))
    }

    #[must_use]
    pub(crate) fn on(self, node: NodeNumber) -> Self {
        Self((self.0 & !(0x3ff << NODE_SHIFT)) | (u64::from(node.0 & 0x3ff) << NODE_SHIFT))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_do_not_touch_each_other() {
        let mut record = Record::UNKNOWN;
        assert_eq!(
            (record.state(), record.age(), record.node()),
            (State::Unknown, 0, NodeNumber::NONE)
        );
        for state in State::ALL {
            for node in [0, 5, 0x3fe] {
                record = record.with(state, u64::MAX).on(NodeNumber(node)).older();
                assert_eq!((record.state(), record.value()), (state, VALUE_MASK));
                assert_eq!(record.node(), NodeNumber(node));
            }
        }
        assert_eq!(record.age(), Record::OLDEST);
        assert_eq!(record.with(State::Unshared, 7).hash(), PageHash::new(7));
    }
}
