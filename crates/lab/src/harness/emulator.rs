//! Guests in QEMU's emulator, which counts their instructions.
//!
//! Such a guest needs neither KVM nor a virtual host. With `-icount shift=0` each instruction takes
//! a nanosecond of all its clocks, and with `sleep=off` the clocks skip the time in which it is
//! idle (QEMU, docs/devel/tcg-icount.rst): what it measures does not depend on the machine below.
//! The emulator executes one vCPU at a time, and an instruction with a repeat prefix counts once
//! for each repetition.

use std::path::{Path, PathBuf};
use std::process::Command as Program;

use crate::LabError;
use crate::error::Missing;
use crate::harness::assets::{BootFiles, find_qemu, module_here};
use crate::harness::driver::Driver;
use crate::harness::experiment::Needs;
use crate::harness::monitor::{KERNEL_ARGUMENTS, Presence};

/// A machine without PCI and firmware tables of a PC: little to boot. ACPI announces its devices.
const MACHINE: &str = "microvm,acpi=on,pcie=off,rtc=on";
/// A processor that the emulator knows completely, apart from a few features that it reports.
const CPU: &str = "Haswell-noTSX-IBRS";
/// RAM of a guest in MiB.
const MEMORY_MIB: u32 = 1024;
/// Addresses are the same in each boot, and no instructions are spent on tests of ciphers.
const SAME_EACH_TIME: &str = "nokaslr cryptomgr.notests";

/// The emulator with what its guests boot.
#[derive(Debug)]
pub struct Emulator {
    qemu: PathBuf,
    files: BootFiles,
}

/// A requirement of the emulator's guests that this machine does not meet; `None` if they can run.
pub fn missing() -> Option<Missing> {
    let without_module =
        || matches!(module_here(), Ok(Presence::Absent)).then_some(Missing::Module);
    find_qemu().is_none().then_some(Missing::Qemu).or_else(without_module)
}

impl Emulator {
    /// Finds the emulator and writes the guests' initramfs to `directory`.
    ///
    /// # Errors
    /// [`LabError::Missing`] without QEMU or the module `ebb_balloon`, and those of
    /// [`BootFiles::write_to`].
    pub fn find(directory: &Path) -> Result<Self, LabError> {
        if let Some(missing) = missing() {
            return Err(missing.into());
        }
        let qemu = find_qemu().ok_or(Missing::Qemu)?;
        Ok(Self { qemu, files: BootFiles::write_to(directory, Needs::NONE)? })
    }

    /// Release of the guests' kernel.
    pub fn kernel(&self) -> &str {
        &self.files.kernel.release
    }

    /// What executes the guests, and their kernel: counts depend on both.
    ///
    /// # Errors
    /// [`LabError::StartMonitor`].
    pub fn describe(&self) -> Result<String, LabError> {
        let failed =
            |cause| LabError::StartMonitor { program: self.qemu.display().to_string(), cause };
        let output = Program::new(&self.qemu).arg("--version").output().map_err(failed)?;
        let version = String::from_utf8_lossy(&output.stdout);
        Ok(format!("Linux {} in {}", self.kernel(), version.lines().next().unwrap_or_default()))
    }

    /// The command that runs a guest with this balloon driver and number of vCPUs, with its serial
    /// console on standard input and output.
    pub fn command(&self, driver: Driver, cpus: u32) -> Program {
        let mut command = Program::new(&self.qemu);
        let words = "-nodefaults -no-user-config -no-reboot -display none -monitor none \
                     -serial stdio -accel tcg,thread=single -icount shift=0,sleep=off -seed 1 \
                     -rtc base=2026-01-01,clock=vm";
        let mut arguments = vec![KERNEL_ARGUMENTS.to_owned(), SAME_EACH_TIME.to_owned()];
        arguments.extend(driver.kernel_arguments());
        command
            .args(["-M", MACHINE, "-cpu", CPU, "-m", &format!("{MEMORY_MIB}M")])
            .args(words.split_ascii_whitespace())
            .args(["-smp", &cpus.to_string()])
            .args(["-device", "virtio-balloon-device,free-page-reporting=on"])
            .arg("-kernel")
            .arg(&self.files.kernel.image)
            .arg("-initrd")
            .arg(&self.files.initrd)
            .args(["-append", &arguments.join(" ")]);
        command
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::driver::Tracker;
    use ebb_virtual_host::kernel::Kernel;

    #[test]
    fn the_tracker_is_all_that_differs_between_guests() {
        let kernel =
            Kernel { image: "vmlinuz".into(), release: "6.1".to_owned(), modules: "m".into() };
        let files = BootFiles { kernel, initrd: "guest.cpio".into(), module: Presence::Present };
        let emulator = Emulator { qemu: "qemu".into(), files };
        let line = |tracker| {
            let command = emulator.command(Driver::among_all(tracker), 1);
            let words: Vec<_> = command.get_args().map(|word| word.to_string_lossy()).collect();
            words.join(" ")
        };
        let off = line(Tracker::Off);
        assert!(off.contains(" -icount shift=0,sleep=off ") && off.contains(" nokaslr "), "{off}");
        assert!(off.contains("-kernel vmlinuz -initrd guest.cpio"), "{off}");
        assert_eq!(off.replace("tracker=none", "tracker=percpu"), line(Tracker::Percpu));
    }
}
