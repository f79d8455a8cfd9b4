//! The first serial line (16550A, from vm-superio) between the port bus and a console.

use std::io;

use vm_superio::Trigger;
use vm_superio::serial::SerialEvents;
use vmm_sys_util::eventfd::EventFd;

use super::bus::ExclusiveDevice;
use super::console::ConsoleOutput;

/// The line's interrupt.
pub struct SerialInterrupt(EventFd);

impl Trigger for SerialInterrupt {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        self.0.write(1)
    }
}

/// Tells the thread that feeds the line when the guest has read everything.
pub struct InputRead(EventFd);

impl SerialEvents for InputRead {
    fn buffer_read(&self) {}
    fn out_byte(&self) {}
    fn tx_lost_byte(&self) {}

    fn in_buffer_empty(&self) {
        // A counter that is full has woken the reader already.
        let _ = self.0.write(1);
    }
}

/// The serial line as a device.
pub struct Serial {
    line: vm_superio::Serial<SerialInterrupt, InputRead, ConsoleOutput>,
}

impl Serial {
    /// A line that writes to `output`, raises `interrupt`, and signals `input_read` when the guest has taken all input.
    pub fn new(interrupt: EventFd, input_read: EventFd, output: ConsoleOutput) -> Self {
        let line = vm_superio::Serial::with_events(SerialInterrupt(interrupt), InputRead(input_read), output);
        Self { line }
    }

    /// Bytes of input the guest can take at present.
    pub fn input_room(&self) -> usize {
        self.line.fifo_capacity()
    }

    /// Hands input to the guest; returns how many bytes it took.
    pub fn input(&mut self, bytes: &[u8]) -> usize {
        let taken = bytes.len().min(self.line.fifo_capacity());
        // The line may be in loopback mode, where the guest wants no input; then it takes none.
        self.line.enqueue_raw_bytes(&bytes[..taken]).unwrap_or(0)
    }

    /// Back to the state after power-on; input that the guest has not read is lost.
    pub fn reset(&mut self) {
        const DATA: u8 = 0;
        const INTERRUPT_ENABLE: u8 = 1;
        const LINE_CONTROL: u8 = 3;
        const MODEM_CONTROL: u8 = 4;
        const LINE_STATUS: u8 = 5;
        /// OUT2, which gates the interrupt line on PCs.
        const OUT2: u8 = 1 << 3;
        for (register, value) in [(LINE_CONTROL, 0), (MODEM_CONTROL, OUT2), (INTERRUPT_ENABLE, 0)] {
            // With interrupts off nothing can fail.
            let _ = self.line.write(register, value);
        }
        while self.line.read(LINE_STATUS) & 1 != 0 {
            self.line.read(DATA);
        }
    }

    /// The output side.
    pub fn output(&mut self) -> &mut ConsoleOutput {
        self.line.writer_mut()
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
            // Only the interrupt can fail here: the guest then sees its byte late, at the next interrupt.
            let _ = self.line.write(offset as u8, value);
        }
    }
}
