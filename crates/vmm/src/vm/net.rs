//! Network devices, for the API.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use super::{Vm, lock};
use crate::api::control::ControlError;
use crate::api::metrics::KindCount;
use crate::api::net::{NetChange, NetDeviceInfo, NetInfo};
use crate::devices::virtio::mmio::MmioTransport;
use crate::devices::virtio::net::{Net, NetCounters};

/// A network device of the machine.
pub(super) struct NetDevice {
    pub name: String,
    /// Its backend, as in the option.
    pub backend: String,
    pub counters: Arc<NetCounters>,
    pub transport: Arc<Mutex<MmioTransport<Net>>>,
}

impl Vm {
    pub(super) fn net(&self) -> NetInfo {
        let info = |device: &NetDevice| {
            let transport = lock(&device.transport);
            let net = transport.device();
            NetDeviceInfo {
                device: device.name.clone(),
                backend: device.backend.clone(),
                mac: net.mac(),
                mtu: net.mtu(),
                link: net.link(),
                wanted_link: net.wanted_link(),
                driver: transport.is_active(),
            }
        };
        NetInfo { devices: self.nets.iter().map(info).collect() }
    }

    pub(super) fn set_net(&self, change: &NetChange) -> Result<(), ControlError> {
        let _state = self.not_given_away()?;
        let device = self.nets.iter().find(|device| device.name == change.device);
        let device = device.ok_or_else(|| {
            let names: Vec<_> = self.nets.iter().map(|device| device.name.as_str()).collect();
            ControlError::Invalid {
                field: "device",
                message: "this virtual machine has no such network device".to_owned(),
                remedy: Some(if names.is_empty() {
                    "start it with --net".to_owned()
                } else {
                    format!("name one of: {}", names.join(", "))
                }),
            }
        })?;
        let mut transport = lock(&device.transport);
        if transport.device_mut().set_link(change.link) {
            transport.config_changed();
        }
        // Frames that wait are dropped, or go on.
        transport.wake();
        Ok(())
    }

    /// A counter of each network device and direction.
    pub(super) fn net_counters(
        &self,
        counter: impl Fn(&NetCounters) -> [&AtomicU64; 2],
    ) -> Vec<KindCount> {
        let directions = ["rx", "tx"];
        let count = |device: &NetDevice| {
            let counters = counter(&device.counters);
            let counts = counters.map(|counter| counter.load(Ordering::Relaxed));
            let kind = |direction| format!("{}_{direction}", device.name);
            directions.map(kind).into_iter().zip(counts).collect::<Vec<_>>()
        };
        let all = self.nets.iter().flat_map(count);
        all.map(|(kind, count)| KindCount::new(kind, count)).collect()
    }
}
