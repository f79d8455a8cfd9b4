//! The first serial line (16550A, from vm-superio) between the port bus and a console.

use std::io;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use vm_superio::Trigger;
use vm_superio::serial::{SerialEvents, SerialState};
use vmm_sys_util::eventfd::EventFd;

use super::bus::ExclusiveDevice;
use super::console::ConsoleOutput;
use super::interrupt::InterruptLine;

/// The interrupt of the line.
pub struct SerialInterrupt(Arc<InterruptLine>);

impl Trigger for SerialInterrupt {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        self.0.pulse();
        Ok(())
    }
}

/// Signals the thread that feeds the line when the guest has read all input.
pub struct InputRead(EventFd);

impl SerialEvents for InputRead {
    fn buffer_read(&self) {}
    fn out_byte(&self) {}
    fn tx_lost_byte(&self) {}

    fn in_buffer_empty(&self) {
        // A full counter has woken the reader already.
        let _ = self.0.write(1);
    }
}

/// The registers of the line and the input that the guest has not read, for snapshots. Output is
/// the console's by then.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedSerial {
    /// Divisor latch: low and high byte.
    pub divisor: [u8; 2],
    /// Interrupt enable register.
    pub interrupt_enable: u8,
    /// Interrupt identification register.
    pub interrupt_identification: u8,
    /// Line control register.
    pub line_control: u8,
    /// Line status register.
    pub line_status: u8,
    /// Modem control register.
    pub modem_control: u8,
    /// Modem status register.
    pub modem_status: u8,
    /// Scratch register.
    pub scratch: u8,
    /// Bytes in the receiver.
    pub input: Vec<u8>,
}

/// The serial line as a device.
pub struct Serial {
    line: vm_superio::Serial<SerialInterrupt, InputRead, ConsoleOutput>,
}

impl Serial {
    /// A line that writes to `output`, raises `interrupt`, and signals `input_read` when the guest
    /// has read all input.
    pub fn new(interrupt: InterruptLine, input_read: EventFd, output: ConsoleOutput) -> Self {
        let line = vm_superio::Serial::with_events(
            SerialInterrupt(Arc::new(interrupt)),
            InputRead(input_read),
            output,
        );
        Self { line }
    }

    /// Restores a saved state.
    ///
    /// # Errors
    /// A description of the mismatch. The line is unusable then.
    pub fn restore(&mut self, saved: &SavedSerial) -> Result<(), String> {
        let state = SerialState {
            baud_divisor_low: saved.divisor[0],
            baud_divisor_high: saved.divisor[1],
            interrupt_enable: saved.interrupt_enable,
            interrupt_identification: saved.interrupt_identification,
            line_control: saved.line_control,
            line_status: saved.line_status,
            modem_control: saved.modem_control,
            modem_status: saved.modem_status,
            scratch: saved.scratch,
            in_buffer: saved.input.clone(),
        };
        let interrupt = SerialInterrupt(self.line.interrupt_evt().0.clone());
        let input_read = self.line.events().0.try_clone().map_err(|error| error.to_string())?;
        let output = std::mem::replace(self.line.writer_mut(), ConsoleOutput::nowhere());
        self.line =
            vm_superio::Serial::from_state(&state, interrupt, InputRead(input_read), output)
                .map_err(|error| error.to_string())?;
        Ok(())
    }

    /// The state for a snapshot.
    pub fn save(&self) -> SavedSerial {
        let state = self.line.state();
        SavedSerial {
            divisor: [state.baud_divisor_low, state.baud_divisor_high],
            interrupt_enable: state.interrupt_enable,
            interrupt_identification: state.interrupt_identification,
            line_control: state.line_control,
            line_status: state.line_status,
            modem_control: state.modem_control,
            modem_status: state.modem_status,
            scratch: state.scratch,
            input: state.in_buffer,
        }
    }

    /// Raises the interrupt if one is pending: it may have been in flight when the interrupt
    /// controllers were saved.
    pub fn interrupt_again(&self) {
        /// Transmitter empty and received data, in the identification register.
        const CAUSES: u8 = 0b110;
        if self.line.state().interrupt_identification & CAUSES != 0 {
            self.line.interrupt_evt().0.pulse();
        }
    }

    /// Bytes of input that the guest can take now.
    pub fn input_room(&self) -> usize {
        self.line.fifo_capacity()
    }

    /// Passes input to the guest; returns the number of bytes it took.
    pub fn input(&mut self, bytes: &[u8]) -> usize {
        let taken = bytes.len().min(self.line.fifo_capacity());
        // In loopback mode the line takes no input.
        self.line.enqueue_raw_bytes(&bytes[..taken]).unwrap_or(0)
    }

    /// Restores the state after power-on; input that the guest has not read is lost.
    pub fn reset(&mut self) {
        const DATA: u8 = 0;
        const INTERRUPT_ENABLE: u8 = 1;
        const LINE_CONTROL: u8 = 3;
        const MODEM_CONTROL: u8 = 4;
        const LINE_STATUS: u8 = 5;
        /// OUT2, which gates the interrupt line on PCs.
        const OUT2: u8 = 1 << 3;
        for (register, value) in [(LINE_CONTROL, 0), (MODEM_CONTROL, OUT2), (INTERRUPT_ENABLE, 0)] {
            // With interrupts disabled this cannot fail.
            let _ = self.line.write(register, value);
        }
        while self.line.read(LINE_STATUS) & 1 != 0 {
            self.line.read(DATA);
        }
    }

    /// The output side.
    pub fn output(&self) -> &ConsoleOutput {
        self.line.writer()
    }
}

impl ExclusiveDevice for Serial {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if let Some(first) = data.first_mut() {
            *first = self.line.read(offset as u8);
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        if let Some(&value) = data.first() {
            // Only the interrupt can fail here: the guest then sees the byte late, at the next
            // interrupt.
            let _ = self.line.write(offset as u8, value);
        }
    }
}
