//! A device on the bus.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use virtio_bindings::virtio_mmio as reg;

use super::{INTERRUPT_CONFIG, MmioTransport, RegisterPage};
use crate::devices::bus::BusDevice;
use crate::devices::virtio::VirtioDevice;

/// The register window as vCPUs see it.
///
/// Reads of registers do not come here where [`RegisterPage`] is mapped, nor do acknowledgements of
/// used buffers where an ioeventfd takes them, for which nothing is to be done. So the bit of used
/// buffers in InterruptStatus stays set until the reset, unlike in virtio 1.3 section 4.2.3.4: the
/// line is edge-triggered and the device's alone, and an interrupt for a change of the configuration
/// makes the driver look at its rings, too.
pub struct MmioWindow<D> {
    transport: Arc<Mutex<MmioTransport<D>>>,
    registers: Arc<RegisterPage>,
}

impl<D: VirtioDevice> MmioWindow<D> {
    /// Creates the window of `transport`.
    pub fn new(transport: MmioTransport<D>) -> Self {
        let registers = transport.registers.clone();
        Self { transport: Arc::new(Mutex::new(transport)), registers }
    }

    /// The transport behind the window.
    pub fn transport(&self) -> &Arc<Mutex<MmioTransport<D>>> {
        &self.transport
    }

    /// The page that holds the registers.
    pub fn registers(&self) -> &Arc<RegisterPage> {
        &self.registers
    }
}

impl<D: VirtioDevice> BusDevice for MmioWindow<D> {
    fn read(&self, offset: u64, data: &mut [u8]) {
        BusDevice::read(&*self.transport, offset, data);
    }

    fn write(&self, offset: u64, data: &[u8]) {
        const ACK: u64 = reg::VIRTIO_MMIO_INTERRUPT_ACK as u64;
        match (offset, <[u8; 4]>::try_from(data)) {
            // Without the transport's lock: a driver must not wait for a device that is processing
            // its next buffer.
            (ACK, Ok(bytes)) => {
                let handled = u32::from_le_bytes(bytes) & INTERRUPT_CONFIG;
                self.registers.interrupt_status().fetch_and(!handled, Ordering::AcqRel);
            }
            _ => BusDevice::write(&*self.transport, offset, data),
        }
    }
}
