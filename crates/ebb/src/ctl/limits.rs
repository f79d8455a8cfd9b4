//! Limits of devices' requests: changes, and the table.

use ebb_vmm::api::{Client, DeviceLimits, LimitsChange, LimitsInfo, RateLimits};

use super::{Row, bytes, row};

/// Applies the change, if any, and returns the resulting limits.
pub(super) fn execute(
    device: Option<String>,
    limits: RateLimits,
    client: &Client,
) -> anyhow::Result<LimitsInfo> {
    match (device, limits == RateLimits::default()) {
        (Some(device), false) => Ok(client.put_json("/limits", &LimitsChange { device, limits })?),
        (None, true) => Ok(client.get("/limits")?),
        (None, false) => anyhow::bail!("name the device whose limits change, such as disk0"),
        (Some(_), true) => {
            anyhow::bail!("give a limit, such as --bandwidth 50M; `limits` alone shows all")
        }
    }
}

/// Rows of the table.
pub(super) fn rows(info: &LimitsInfo) -> Vec<Row> {
    info.devices.iter().map(|device| row(&device.device, describe(device))).collect()
}

fn describe(device: &DeviceLimits) -> String {
    let RateLimits { bandwidth, bandwidth_burst, ops, ops_burst } = device.limits;
    let limit = |rate: Option<String>, burst: Option<String>| {
        rate.map(|rate| match burst {
            Some(burst) => format!("{rate} (burst {burst})"),
            None => rate,
        })
    };
    let bandwidth =
        limit(bandwidth.map(|rate| format!("{}/s", bytes(rate))), bandwidth_burst.map(bytes));
    let ops = limit(
        ops.map(|rate| format!("{rate} requests/s")),
        ops_burst.map(|burst| burst.to_string()),
    );
    let limits: Vec<_> = bandwidth.into_iter().chain(ops).collect();
    let limits = if limits.is_empty() { "no limit".to_owned() } else { limits.join(", ") };
    format!("{limits}; {} requests delayed", device.delayed_requests)
}
