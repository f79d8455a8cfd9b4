//! Limits of devices' requests, for the API.

use std::sync::Arc;
use std::time::Instant;

use super::Vm;
use crate::api::control::ControlError;
use crate::api::limits::{DeviceLimits, LimitsChange, LimitsInfo};
use crate::api::metrics::KindCount;
use crate::devices::throttle::Throttle;

/// A device whose requests can be limited.
pub(super) struct Throttled {
    pub device: String,
    pub throttle: Arc<Throttle>,
    /// Makes it consider a request that waits.
    pub wake: Box<dyn Fn() + Send + Sync>,
}

impl Vm {
    pub(super) fn limits(&self) -> LimitsInfo {
        let device = |throttled: &Throttled| DeviceLimits {
            device: throttled.device.clone(),
            limits: throttled.throttle.limits(),
            delayed_requests: throttled.throttle.delayed(),
        };
        LimitsInfo { devices: self.throttled.iter().map(device).collect() }
    }

    pub(super) fn set_limits(&self, change: &LimitsChange) -> Result<(), ControlError> {
        let throttled = self.throttled.iter().find(|throttled| throttled.device == change.device);
        let throttled = throttled.ok_or_else(|| {
            let names: Vec<_> = self.throttled.iter().map(|known| known.device.as_str()).collect();
            ControlError::Invalid {
                field: "device",
                message: "this virtual machine has no such device with limits".to_owned(),
                remedy: Some(format!("name one of: {}", names.join(", "))),
            }
        })?;
        let limits = throttled.throttle.limits().changed(&change.limits).map_err(|field| {
            ControlError::Invalid {
                field,
                message: "there is no limit that this burst would belong to".to_owned(),
                remedy: Some(format!("send {} as well", field.trim_end_matches("_burst"))),
            }
        })?;
        throttled.throttle.set(limits, Instant::now());
        (throttled.wake)();
        Ok(())
    }

    /// Requests that had to wait, by device.
    pub(super) fn delayed_requests(&self) -> Vec<KindCount> {
        let count = |throttled: &Throttled| {
            KindCount::new(throttled.device.clone(), throttled.throttle.delayed())
        };
        self.throttled.iter().map(count).collect()
    }
}
