//! Address dispatch to devices.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use thiserror::Error;

/// A device that serves a window of addresses, from several vCPUs at once.
pub trait BusDevice: Send + Sync {
    /// Reads `data` at `offset` into the window.
    fn read(&self, offset: u64, data: &mut [u8]);
    /// Writes `data` at `offset` into the window.
    fn write(&self, offset: u64, data: &[u8]);
}

/// A device for one vCPU at a time; behind a [`Mutex`] it is a [`BusDevice`].
pub trait ExclusiveDevice: Send {
    /// Like [`BusDevice::read`].
    fn read(&mut self, offset: u64, data: &mut [u8]);
    /// Like [`BusDevice::write`].
    fn write(&mut self, offset: u64, data: &[u8]);
}

impl<D: ExclusiveDevice> BusDevice for Mutex<D> {
    fn read(&self, offset: u64, data: &mut [u8]) {
        self.lock().unwrap_or_else(PoisonError::into_inner).read(offset, data);
    }

    fn write(&self, offset: u64, data: &[u8]) {
        self.lock().unwrap_or_else(PoisonError::into_inner).write(offset, data);
    }
}

/// Two devices claim the same addresses: a bug in the monitor's layout.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("two devices at {first:#x?} and {second:#x?}")]
pub struct Overlap {
    first: Range<u64>,
    second: Range<u64>,
}

/// Devices by address. Filled before the first vCPU runs and not changed afterwards, so that
/// lookups take no lock.
#[derive(Default)]
pub struct Bus {
    devices: Vec<(Range<u64>, Arc<dyn BusDevice>)>,
}

impl Bus {
    /// Puts `device` at `window`.
    pub fn insert(
        &mut self,
        window: Range<u64>,
        device: Arc<dyn BusDevice>,
    ) -> Result<(), Overlap> {
        let index = self.devices.partition_point(|(other, _)| other.start < window.start);
        let before = index.checked_sub(1).and_then(|index| self.devices.get(index));
        for (other, _) in before.into_iter().chain(self.devices.get(index)) {
            if other.start < window.end && window.start < other.end {
                return Err(Overlap { first: other.clone(), second: window });
            }
        }
        self.devices.insert(index, (window, device));
        Ok(())
    }

    fn find(&self, address: u64) -> Option<(u64, &dyn BusDevice)> {
        let index =
            self.devices.partition_point(|(window, _)| window.start <= address).checked_sub(1)?;
        let (window, device) = &self.devices[index];
        window.contains(&address).then(|| (address - window.start, device.as_ref()))
    }

    /// Reads from the device at `address`; without a device all bits are ones, as on a real bus.
    pub fn read(&self, address: u64, data: &mut [u8]) {
        match self.find(address) {
            Some((offset, device)) => device.read(offset, data),
            None => data.fill(0xff),
        }
    }

    /// Reads elements of `element_bytes` bytes one after the other, as a string instruction does
    /// (`rep insb`): a device with a queue returns another one for each.
    pub fn read_each(&self, address: u64, element_bytes: u8, data: &mut [u8]) {
        for element in data.chunks_mut(usize::from(element_bytes).max(1)) {
            self.read(address, element);
        }
    }

    /// Writes elements of `element_bytes` bytes one after the other (`rep outsb`).
    pub fn write_each(&self, address: u64, element_bytes: u8, data: &[u8]) {
        for element in data.chunks(usize::from(element_bytes).max(1)) {
            self.write(address, element);
        }
    }

    /// Writes to the device at `address`; without a device the write is ignored.
    pub fn write(&self, address: u64, data: &[u8]) {
        if let Some((offset, device)) = self.find(address) {
            device.write(offset, data);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Latch(Vec<(u64, Vec<u8>)>);

    impl ExclusiveDevice for Latch {
        fn read(&mut self, offset: u64, data: &mut [u8]) {
            data.fill(offset as u8);
        }
        fn write(&mut self, offset: u64, data: &[u8]) {
            self.0.push((offset, data.to_vec()));
        }
    }

    /// Counts its reads.
    struct Counter(u8);

    impl ExclusiveDevice for Counter {
        fn read(&mut self, _offset: u64, data: &mut [u8]) {
            self.0 += 1;
            data.fill(self.0);
        }
        fn write(&mut self, _offset: u64, _data: &[u8]) {}
    }

    #[test]
    fn each_element_of_a_string_is_an_access() {
        let latch = Arc::new(Mutex::new(Latch(Vec::new())));
        let mut bus = Bus::default();
        bus.insert(0..1, Arc::new(Mutex::new(Counter(0)))).unwrap();
        bus.insert(1..2, latch.clone()).unwrap();
        let mut data = [0; 4];
        bus.read_each(0, 1, &mut data);
        assert_eq!(data, [1, 2, 3, 4]);
        bus.read_each(0, 2, &mut data);
        assert_eq!(data, [5, 5, 6, 6]);
        bus.read_each(0, 0, &mut data[..1]);
        assert_eq!(data, [7, 5, 6, 6]);
        bus.write_each(1, 2, &[1, 2, 3, 4]);
        assert_eq!(latch.lock().unwrap().0, [(0, vec![1, 2]), (0, vec![3, 4])]);
    }

    #[test]
    fn addresses_reach_only_their_device() {
        let latch = Arc::new(Mutex::new(Latch(Vec::new())));
        let mut bus = Bus::default();
        bus.insert(0x100..0x110, latch.clone()).unwrap();
        bus.insert(0x90..0x100, Arc::new(Mutex::new(Latch(Vec::new())))).unwrap();
        bus.write(0x10f, &[1, 2]);
        bus.write(0x110, &[3]);
        bus.write(0x8f, &[4]);
        assert_eq!(latch.lock().unwrap().0, [(0xf, vec![1, 2])]);
        let mut data = [0; 2];
        bus.read(0x104, &mut data);
        assert_eq!(data, [4, 4]);
        bus.read(u64::MAX, &mut data);
        assert_eq!(data, [0xff, 0xff]);
    }

    #[test]
    fn overlaps_are_refused() {
        let mut bus = Bus::default();
        let device = || Arc::new(Mutex::new(Latch(Vec::new())));
        bus.insert(0x100..0x110, device()).unwrap();
        assert!(bus.insert(0x10f..0x120, device()).is_err());
        assert!(bus.insert(0xf0..0x101, device()).is_err());
        assert!(bus.insert(0x110..0x111, device()).is_ok());
    }
}
