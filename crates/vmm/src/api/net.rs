//! Network devices: documents.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::config::MacAddress;
pub use crate::devices::virtio::net::LinkState;

/// `GET /net`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "Net")]
pub struct NetInfo {
    /// The network devices in order.
    pub devices: Vec<NetDeviceInfo>,
}

/// A network device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "NetDevice")]
pub struct NetDeviceInfo {
    /// Name of the device: net0 and further.
    pub device: String,
    /// What connects it with the host, as in the option: tap=NAME, fd=N or user.
    pub backend: String,
    /// Its MAC address.
    pub mac: MacAddress,
    /// The MTU that it announces to the guest; null if it announces none.
    pub mtu: Option<u16>,
    /// Its link as the guest sees it. Down also if the backend has failed.
    pub link: LinkState,
    /// Its link as requested.
    pub wanted_link: LinkState,
    /// Whether a driver in the guest uses it.
    pub driver: bool,
}

/// `PUT /net`: takes a device's link up or down.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct NetChange {
    /// Name of the device, as in `GET /net`.
    #[schemars(extend("x-form" = "the name of a network device, such as net0"))]
    pub device: String,
    /// The link.
    pub link: LinkState,
}
