//! Whose memory is taken when there is not enough: min-funding revocation with an idle memory tax
//! (Waldspurger, "Memory Resource Management in VMware ESX Server", OSDI 2002, sections 4 and 5).
//!
//! A machine pays for its memory with its shares. Memory is revoked where the fewest shares are
//! paid for a byte. A byte that is not used costs more than one that is, so idle machines lose
//! first.

use crate::level::part;

/// A machine that could give memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Giver {
    /// Its resident memory.
    pub(crate) has_bytes: u64,
    /// The part of it that its guest uses.
    pub(crate) used_bytes: u64,
    /// Memory that is not revoked.
    pub(crate) keeps_bytes: u64,
    /// Its shares; not 0.
    pub(crate) shares: u64,
}

impl Giver {
    /// What a byte costs it on the mean, in thousandths of a byte that is used: more, the more of
    /// them are idle.
    pub(crate) fn cost_milli(&self, idle_tax_percent: u64) -> u64 {
        let idle_cost = 100_000 / (100 - idle_tax_percent.min(99));
        let used_milli = part(1000, self.used_bytes.min(self.has_bytes), self.has_bytes);
        (1000 * used_milli + idle_cost * (1000 - used_milli)) / 1000
    }

    /// What it gives where a share buys `level` thousandths of a used byte.
    fn gives(&self, level: u128, cost_milli: u64) -> u64 {
        let may_have = level * u128::from(self.shares) / u128::from(cost_milli);
        let may_have = u64::try_from(may_have).unwrap_or(u64::MAX).max(self.keeps_bytes);
        self.has_bytes.saturating_sub(may_have)
    }
}

/// How much each gives, so that all together give `needed_bytes` if they have it.
pub(crate) fn revoke(givers: &[Giver], needed_bytes: u64, idle_tax_percent: u64) -> Vec<u64> {
    let costs = givers.iter().map(|giver| giver.cost_milli(idle_tax_percent));
    let givers: Vec<(&Giver, u64)> = givers.iter().zip(costs).collect();
    let gives = |level| givers.iter().map(move |(giver, cost)| giver.gives(level, *cost));
    let is_enough = |level| gives(level).map(u128::from).sum::<u128>() >= u128::from(needed_bytes);
    // The highest level at which it is enough; at level 0 each gives all that it can.
    let highest = givers.iter().map(|(giver, cost)| {
        u128::from(giver.has_bytes) * u128::from(*cost) / u128::from(giver.shares.max(1))
    });
    let (mut low, mut high) = (0, highest.max().unwrap_or(0) + 1);
    while high - low > 1 {
        let middle = low.midpoint(high);
        if is_enough(middle) { low = middle } else { high = middle }
    }
    gives(low).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{GIB, MIB};

    fn giver(has: u64, used: u64, shares: u64) -> Giver {
        Giver {
            has_bytes: has * MIB,
            used_bytes: used * MIB,
            keeps_bytes: (used + 64) * MIB,
            shares,
        }
    }

    fn mib(given: &[u64]) -> Vec<u64> {
        given.iter().map(|bytes| bytes / MIB).collect()
    }

    #[test]
    fn the_idle_one_gives_first() {
        let givers = [giver(1000, 900, 1000), giver(1000, 100, 1000)];
        assert_eq!(mib(&revoke(&givers, 400 * MIB, 75))[0], 0);
        // Without a tax they give the same, as far as they have it.
        let given = mib(&revoke(&givers, 60 * MIB, 0));
        assert!(given[0].abs_diff(30) <= 1 && given[1].abs_diff(30) <= 1, "{given:?}");
        let given = mib(&revoke(&givers, 600 * MIB, 0));
        assert!(given[0] == 36 && given[1].abs_diff(564) <= 1, "{given:?}");
    }

    #[test]
    fn shares_buy_memory() {
        let givers = [giver(1000, 10, 1000), giver(1000, 10, 3000)];
        // 500 MiB are left: one to three.
        let given = mib(&revoke(&givers, 1_500 * MIB, 75));
        assert!(given[0].abs_diff(875) <= 1 && given[1].abs_diff(625) <= 1, "{given:?}");
    }

    #[test]
    fn nothing_from_none() {
        assert!(revoke(&[], GIB, 75).is_empty());
        assert_eq!(revoke(&[giver(10, 10, 1)], GIB, 75), [0]);
    }

    proptest! {
        #[test]
        fn enough_and_not_much_more_is_given(
            raw in prop::collection::vec((0_u64..1 << 40, 0_u64..110, 1_u64..1_000_000), 1..20),
            needed_percent in 0_u64..120,
            tax in 0_u64..100,
        ) {
            let givers: Vec<Giver> = raw.iter().map(|(has, percent, shares)| {
                let used_bytes = part(*has, *percent, 100);
                Giver { has_bytes: *has, used_bytes, keeps_bytes: used_bytes, shares: *shares }
            }).collect();
            let most: u64 =
                givers.iter().map(|it| it.has_bytes.saturating_sub(it.keeps_bytes)).sum();
            let needed = part(most, needed_percent, 100);
            let given = revoke(&givers, needed, tax);
            for (giver, given) in givers.iter().zip(&given) {
                prop_assert!(*given == 0 || giver.has_bytes - given >= giver.keeps_bytes);
            }
            let sum: u64 = given.iter().sum();
            prop_assert!(sum >= needed.min(most), "{sum} of {needed}");
            // A step of the level is a thousandth of a byte for each share.
            let steps: u64 = givers.iter().map(|it| it.shares / 1000 + 1).sum();
            prop_assert!(sum <= needed + steps, "{sum} of {needed}");
        }
    }
}
