//! Limits of a device's requests.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::ConfigError;
use super::options::Pairs;

/// Keys of [`RateLimits`] in options.
pub const LIMITS_FORM: &str = "[bandwidth=SIZE][,bandwidth_burst=SIZE][,ops=N][,ops_burst=N]";
/// Largest limit, in bytes or operations a second.
const MOST: u64 = 1 << 50;

/// Limits of a device's requests, each with a burst: what may pass at once after an idle time. A
/// request that exceeds the burst passes when nothing else has used it up, and delays the next ones.
/// In answers, null marks a limit that is not set; in requests, an omitted one is left unchanged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct RateLimits {
    /// Data a second, both directions together; 0 for no limit.
    #[schemars(range(max = MOST), extend("x-unit" = "bytes"))]
    pub bandwidth: Option<u64>,
    /// Burst of bandwidth; 0 for the default, the data of a tenth of a second.
    #[schemars(range(max = MOST), extend("x-unit" = "bytes"))]
    pub bandwidth_burst: Option<u64>,
    /// Requests a second; 0 for no limit.
    #[schemars(range(max = MOST), extend("x-unit" = "requests"))]
    pub ops: Option<u64>,
    /// Burst of ops; 0 for the default, the requests of a tenth of a second.
    #[schemars(range(max = MOST), extend("x-unit" = "requests"))]
    pub ops_burst: Option<u64>,
}

impl RateLimits {
    /// These limits after a change.
    ///
    /// # Errors
    /// The name of a burst without its limit.
    pub fn changed(self, change: &Self) -> Result<Self, &'static str> {
        let set = |old: Option<u64>, new: Option<u64>| new.or(old).filter(|value| *value != 0);
        let limits = Self {
            bandwidth: set(self.bandwidth, change.bandwidth),
            bandwidth_burst: set(self.bandwidth_burst, change.bandwidth_burst),
            ops: set(self.ops, change.ops),
            ops_burst: set(self.ops_burst, change.ops_burst),
        };
        // The burst of a limit that is removed goes with it.
        let burst =
            |limit: Option<u64>, burst: Option<u64>, given: Option<u64>, name| match (limit, given)
            {
                (Some(_), _) => Ok(burst),
                (None, None | Some(0)) => Ok(None),
                (None, Some(_)) => Err(name),
            };
        let bandwidth_burst = burst(
            limits.bandwidth,
            limits.bandwidth_burst,
            change.bandwidth_burst,
            "bandwidth_burst",
        )?;
        let ops_burst = burst(limits.ops, limits.ops_burst, change.ops_burst, "ops_burst")?;
        Ok(Self { bandwidth_burst, ops_burst, ..limits })
    }

    /// Takes the keys of the limits from an option.
    pub(super) fn take(pairs: &mut Pairs<'_>) -> Result<Self, ConfigError> {
        Self::take_prefixed(pairs, "")
    }

    /// Takes the keys that begin with `prefix`, for an option with limits of several kinds.
    pub(super) fn take_prefixed(pairs: &mut Pairs<'_>, prefix: &str) -> Result<Self, ConfigError> {
        let mut size = |name| {
            let key = &format!("{prefix}{name}");
            let size = pairs.take_size(key)?.map(crate::size::ByteSize::bytes);
            size.map_or(Ok(None), |bytes| pairs.within(key, bytes, MOST).map(Some))
        };
        let (bandwidth, bandwidth_burst) = (size("bandwidth")?, size("bandwidth_burst")?);
        let mut number = |name| {
            let key = &format!("{prefix}{name}");
            let number = pairs.take_parsed::<u64>(key, "a number")?;
            number.map_or(Ok(None), |number| pairs.within(key, number, MOST).map(Some))
        };
        let (ops, ops_burst) = (number("ops")?, number("ops_burst")?);
        let given = Self { bandwidth, bandwidth_burst, ops, ops_burst };
        let without_limit = |name| pairs.without_limit(&format!("{prefix}{name}"));
        Self::default().changed(&given).map_err(without_limit)
    }

    /// Parses the text of `--rng`.
    ///
    /// # Errors
    /// Unknown keys and invalid values.
    pub fn parse_rng(text: &str) -> Result<Self, ConfigError> {
        let mut pairs = Pairs::parse("--rng", LIMITS_FORM, text)?;
        let limits = Self::take(&mut pairs)?;
        pairs.finish()?;
        Ok(limits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bandwidth(bandwidth: Option<u64>, bandwidth_burst: Option<u64>) -> RateLimits {
        RateLimits { bandwidth, bandwidth_burst, ..RateLimits::default() }
    }

    #[test]
    fn a_change_keeps_what_it_omits_and_zero_removes() {
        let limits = bandwidth(Some(100), Some(10));
        assert_eq!(limits.changed(&RateLimits::default()), Ok(limits));
        let faster = bandwidth(Some(200), None);
        assert_eq!(limits.changed(&faster), Ok(bandwidth(Some(200), Some(10))));
        assert_eq!(limits.changed(&bandwidth(None, Some(0))), Ok(bandwidth(Some(100), None)));
        assert_eq!(limits.changed(&bandwidth(Some(0), None)), Ok(RateLimits::default()));
        let burst_only = bandwidth(None, Some(5));
        assert_eq!(RateLimits::default().changed(&burst_only), Err("bandwidth_burst"));
        assert_eq!(limits.changed(&bandwidth(Some(0), Some(5))), Err("bandwidth_burst"));
    }

    #[test]
    fn options_are_parsed() {
        let parse = RateLimits::parse_rng;
        assert_eq!(parse("bandwidth=1K"), Ok(bandwidth(Some(1024), None)));
        assert_eq!(parse(""), Ok(RateLimits::default()));
        let limits = parse("ops=5,ops_burst=2").unwrap();
        assert_eq!((limits.ops, limits.ops_burst), (Some(5), Some(2)));
        for wrong in ["ops=x", "bandwidth=99999T", "ops_burst=2", "speed=1"] {
            let error = parse(wrong).unwrap_err();
            assert_eq!(error.option, "--rng", "{wrong}");
        }
    }
}
