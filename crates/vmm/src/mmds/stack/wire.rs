//! The device of the stack: one packet in, a few frames out.

use std::collections::VecDeque;

use smoltcp::phy::{self, Checksum, Device, DeviceCapabilities, Medium};
use smoltcp::time::Instant;

/// Length of the header of a frame.
pub(super) const ETHERNET_BYTES: usize = 14;
/// Most frames that wait for the guest. TCP sends again what was dropped.
pub(super) const MOST_FRAMES: usize = 64;

/// A link to one guest.
pub(super) struct Wire {
    pub(super) input: Option<Vec<u8>>,
    /// Frames for the guest.
    pub(super) output: VecDeque<Vec<u8>>,
    /// The address to which they are sent: the sender of the last frame.
    pub(super) guest: [u8; 6],
    mac: [u8; 6],
    mtu: u16,
}

impl Wire {
    pub(super) fn new(mac: [u8; 6], mtu: u16) -> Self {
        Self { input: None, output: VecDeque::new(), guest: [0xff; 6], mac, mtu }
    }

    fn has_room(&self) -> bool {
        self.output.len() < MOST_FRAMES
    }

    /// Adds a frame, or drops it.
    pub(super) fn put(&mut self, ethertype: [u8; 2], packet: &[u8]) {
        if self.has_room() {
            self.output.push_back([&self.guest, &self.mac, &ethertype[..], packet].concat());
        }
    }
}

/// A packet to the stack.
pub(super) struct Incoming(Vec<u8>);

impl phy::RxToken for Incoming {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, read: F) -> R {
        read(&self.0)
    }
}

/// Room for a packet of the stack.
pub(super) struct Outgoing<'a>(&'a mut Wire);

impl phy::TxToken for Outgoing<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, length: usize, write: F) -> R {
        let mut packet = vec![0; length];
        let written = write(&mut packet);
        self.0.put([0x08, 0x00], &packet);
        written
    }
}

impl Device for Wire {
    type RxToken<'a> = Incoming;
    type TxToken<'a> = Outgoing<'a>;

    fn receive(&mut self, _: Instant) -> Option<(Incoming, Outgoing<'_>)> {
        if !self.has_room() {
            return None;
        }
        let packet = self.input.take()?;
        Some((Incoming(packet), Outgoing(self)))
    }

    fn transmit(&mut self, _: Instant) -> Option<Outgoing<'_>> {
        self.has_room().then_some(Outgoing(self))
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        capabilities.medium = Medium::Ip;
        capabilities.max_transmission_unit = self.mtu.into();
        // A guest's driver may leave checksums to the device, and this path cannot corrupt them.
        capabilities.checksum.ipv4 = Checksum::Tx;
        capabilities.checksum.tcp = Checksum::Tx;
        capabilities
    }
}
