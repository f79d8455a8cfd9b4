//! Platform registers: sleep and reset (ACPI), the keyboard controller's reset line, the panic
//! notification, and the power button.

use std::sync::Arc;

use super::bus::ExclusiveDevice;
use super::interrupt::InterruptLine;
use crate::acpi;
use crate::exit::{ExitSignal, GuestExit};

/// The ACPI registers at [`layout::ACPI_PORT`](crate::layout::ACPI_PORT).
pub struct AcpiRegisters {
    exit: Arc<ExitSignal>,
    interrupt: InterruptLine,
    events: u8,
}

impl AcpiRegisters {
    /// Creates the registers; `interrupt` is the event device's line.
    pub fn new(exit: Arc<ExitSignal>, interrupt: InterruptLine) -> Self {
        Self { exit, interrupt, events: 0 }
    }

    /// Events that the guest has not read yet, for snapshots.
    pub fn pending_events(&self) -> u8 {
        self.events
    }

    /// Restores saved events, and interrupts the guest if there are any.
    pub fn restore(&mut self, events: u8) {
        self.events = events & (acpi::EVENT_POWER_BUTTON | acpi::EVENT_GENERATION);
        if self.events != 0 {
            self.interrupt.pulse();
        }
    }

    /// Presses the power button. The guest decides how to react; Linux needs its `button` module to
    /// notice.
    pub fn press_power_button(&mut self) {
        self.notify(acpi::EVENT_POWER_BUTTON);
    }

    /// Notifies the guest of an event.
    pub fn notify(&mut self, event: u8) {
        self.events |= event;
        self.interrupt.pulse();
    }
}

impl ExclusiveDevice for AcpiRegisters {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if offset == u64::from(acpi::EVENT_STATUS)
            && let Some(first) = data.first_mut()
        {
            *first = std::mem::take(&mut self.events);
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        const SLEEP: u64 = acpi::SLEEP_CONTROL as u64;
        const RESET: u64 = acpi::RESET as u64;
        let Some(&value) = data.first() else { return };
        match offset {
            SLEEP if value == (acpi::SLEEP_TYPE_S5 << 2) | acpi::SLEEP_ENABLE => {
                self.exit.raise(GuestExit::PowerOff);
            }
            RESET if value == acpi::RESET_VALUE => self.exit.raise(GuestExit::Reboot),
            _ => {}
        }
    }
}

/// Port 0x64 of the keyboard controller. There is no keyboard; kernels with `reboot=k` pulse the
/// reset line through it.
pub struct KeyboardReset {
    exit: Arc<ExitSignal>,
}

/// The command that pulses the reset line.
const PULSE_RESET: u8 = 0xfe;

impl KeyboardReset {
    /// Creates the controller.
    pub fn new(exit: Arc<ExitSignal>) -> Self {
        Self { exit }
    }
}

impl ExclusiveDevice for KeyboardReset {
    fn read(&mut self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn write(&mut self, _offset: u64, data: &[u8]) {
        if data.first() == Some(&PULSE_RESET) {
            self.exit.raise(GuestExit::Reboot);
        }
    }
}

/// QEMU's pvpanic interface (QEMU docs/specs/pvpanic.rst): bit 0 reports a panic, bit 1 a panic
/// that a crash kernel handles.
pub struct PanicNotifier {
    exit: Arc<ExitSignal>,
}

const PANICKED: u8 = 1;

impl PanicNotifier {
    /// Creates the notifier.
    pub fn new(exit: Arc<ExitSignal>) -> Self {
        Self { exit }
    }
}

impl ExclusiveDevice for PanicNotifier {
    fn read(&mut self, _offset: u64, data: &mut [u8]) {
        data.fill(PANICKED);
    }

    fn write(&mut self, _offset: u64, data: &[u8]) {
        if data.first().is_some_and(|events| events & PANICKED != 0) {
            self.exit.raise(GuestExit::Panic);
        }
    }
}
