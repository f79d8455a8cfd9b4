//! Network devices: their links, and the table.

use ebb_vmm::api::{Client, LinkState, NetChange, NetDeviceInfo, NetInfo};
use ebb_vmm::words::to_word;

use super::{Row, row};

/// Applies the change, if any, and returns the devices.
pub(super) fn execute(
    device: Option<String>,
    link: Option<LinkState>,
    client: &Client,
) -> anyhow::Result<NetInfo> {
    match (device, link) {
        (Some(device), Some(link)) => Ok(client.put_json("/net", &NetChange { device, link })?),
        _ => Ok(client.get("/net")?),
    }
}

/// Rows of the table.
pub(super) fn rows(info: &NetInfo) -> Vec<Row> {
    info.devices.iter().map(|device| row(&device.device, describe(device))).collect()
}

fn describe(device: &NetDeviceInfo) -> String {
    let NetDeviceInfo { backend, mac, mtu, link, wanted_link, driver, .. } = device;
    let mtu = mtu.map(|mtu| format!(", MTU {mtu}")).unwrap_or_default();
    let failed = if link == wanted_link { "" } else { " (the backend has failed)" };
    let driver = if *driver { "" } else { ", no driver in the guest" };
    format!("{backend}, {mac}{mtu}, link {}{failed}{driver}", to_word(link))
}
