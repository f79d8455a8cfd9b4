//! The monitors that guests run under: Ebb, and QEMU as its peer, each as a process with the same guest.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use ebb_kvm_clock::ClockPolicy;

use crate::driver::{Driver, Extension};

/// Words that every guest's kernel gets: a quiet serial console, and an end instead of a hang after a crash.
const KERNEL_ARGUMENTS: &str = "console=ttyS0 quiet loglevel=1 panic=-1 reboot=t";

/// A virtual machine monitor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MonitorKind {
    /// `ebb run`.
    Ebb,
    /// Debian's QEMU with KVM.
    Qemu,
}

/// Whether the balloon offers free page reporting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reporting {
    /// Offered.
    On,
    /// Not offered.
    Off,
}

impl Reporting {
    fn word(self) -> &'static str {
        match self {
            Self::On => "on",
            Self::Off => "off",
        }
    }
}

/// Transparent huge pages behind the guest's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HugePages {
    /// As the monitor does by itself.
    Default,
    /// Switched off.
    Off,
}

/// The form of the guest's kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KernelImage {
    /// Compressed: decompresses itself in the guest's memory.
    BzImage,
    /// Uncompressed ELF, entered through its PVH note.
    Elf,
}

/// The bounce buffer that Linux sets up when a machine has memory above 4 GiB (kernel/dma/swiotlb.c), for devices that
/// cannot reach there. Virtio devices of a monitor reach everywhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BounceBuffer {
    /// As the kernel does by itself: 64 MiB, written with zeros at boot.
    Default,
    /// None (`swiotlb=noforce`).
    Off,
}

/// Whether an idle guest's monitor looks for memory that is all zero (`PUT /vm/trim`, Ebb only).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trim {
    /// Never.
    Never,
    /// Once, when the guest's memory has come back after its program.
    WhenIdle,
}

/// Whether the guest's kernel writes zeros to pages that it allocates. Debian's does (`CONFIG_INIT_ON_ALLOC_DEFAULT_ON`), also to
/// those that a driver takes for its balloon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Clearing {
    /// As the kernel was built.
    Default,
    /// Not (`init_on_alloc=0`).
    Off,
}

/// How the guests of a series are run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Setup {
    /// Under which monitor.
    pub monitor: MonitorKind,
    /// With or without reporting.
    pub reporting: Reporting,
    /// With which pages.
    pub huge_pages: HugePages,
    /// From which kernel image.
    pub kernel: KernelImage,
    /// Smallest block that the guest reports, as the exponent of its number of 4 KiB pages; `None` leaves the
    /// kernel's default (`pageblock_order`, 9 on x86). Linux `mm/page_reporting.c`, parameter `page_reporting_order`.
    pub reporting_order: Option<u32>,
    /// With or without the guest's bounce buffer.
    pub bounce_buffer: BounceBuffer,
    /// With or without a trim.
    pub trim: Trim,
    /// What the guest's clocks do over pauses and restores; Ebb only.
    pub clock: ClockPolicy,
    /// With which driver of the balloon.
    pub driver: Driver,
    /// With or without the extension of the balloon; Ebb only.
    pub extension: Extension,
    /// With or without clearing of allocated pages.
    pub clearing: Clearing,
}

impl Setup {
    /// Ebb with everything at its default.
    pub const EBB: Self = Self {
        monitor: MonitorKind::Ebb,
        reporting: Reporting::On,
        huge_pages: HugePages::Default,
        kernel: KernelImage::BzImage,
        reporting_order: None,
        bounce_buffer: BounceBuffer::Default,
        trim: Trim::Never,
        clock: ClockPolicy::Continue,
        driver: Driver::Stock,
        extension: Extension::Offered,
        clearing: Clearing::Default,
    };

    /// In words, for a document.
    pub fn describe(&self) -> String {
        let mut text = match self.monitor {
            MonitorKind::Ebb => "ebb run".to_owned(),
            MonitorKind::Qemu => "qemu-system-x86_64 -accel kvm -M q35".to_owned(),
        };
        text.push_str(match self.reporting {
            Reporting::On => ", free page reporting on",
            Reporting::Off => ", free page reporting off",
        });
        if let Some(order) = self.reporting_order {
            // Writing to a String cannot fail.
            let _ = write!(text, ", guest reports blocks of order {order} and up");
        }
        text.push_str(&self.driver.describe());
        if self.extension == Extension::Withheld {
            text.push_str(", device without the extension");
        }
        if self.clearing == Clearing::Off {
            text.push_str(", guest does not clear allocated pages");
        }
        if self.huge_pages == HugePages::Off {
            text.push_str(", guest memory without transparent huge pages");
        }
        if self.bounce_buffer == BounceBuffer::Off {
            text.push_str(", guest without a bounce buffer");
        }
        if self.trim == Trim::WhenIdle {
            text.push_str(", trimmed when idle");
        }
        if self.clock != ClockPolicy::Continue {
            // Writing to a String cannot fail.
            let _ = write!(text, ", --clock {}", self.clock.name());
        }
        if self.kernel == KernelImage::Elf {
            text.push_str(", uncompressed kernel (PVH)");
        }
        text
    }

    fn balloon_option(&self) -> String {
        let extension = self.extension.option();
        format!("size=0,reporting={},deflate_on_oom=on{extension}", self.reporting.word())
    }

    fn kernel_arguments(&self) -> String {
        let mut arguments = KERNEL_ARGUMENTS.to_owned();
        if let Some(order) = self.reporting_order {
            // Writing to a String cannot fail.
            let _ = write!(arguments, " page_reporting.page_reporting_order={order}");
        }
        if self.bounce_buffer == BounceBuffer::Off {
            arguments.push_str(" swiotlb=noforce");
        }
        if self.clearing == Clearing::Off {
            arguments.push_str(" init_on_alloc=0");
        }
        arguments.push_str(&self.driver.kernel_arguments());
        arguments
    }
}

/// Size of a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GuestSize {
    /// RAM in MiB.
    pub memory_mib: u64,
    /// Virtual CPUs.
    pub cpus: u32,
}

/// Files and programs that guests are made from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Assets {
    /// The `ebb` program.
    pub ebb: PathBuf,
    /// QEMU, where there is one.
    pub qemu: Option<PathBuf>,
    /// The guest's kernel as bzImage.
    pub bzimage: PathBuf,
    /// The same kernel as ELF, where there is one.
    pub elf: Option<PathBuf>,
    /// The guest's initramfs with the agent.
    pub initrd: PathBuf,
    /// Whether the initramfs has the module `ebb_balloon`.
    pub module: Presence,
}

/// Whether something is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Presence {
    /// It is.
    Present,
    /// It is not.
    Absent,
}

/// What a setup needs and the host has not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Missing {
    /// There is no QEMU.
    #[error("there is no qemu-system-x86_64 (Debian: apt-get install qemu-system-x86)")]
    Qemu,
    /// There is no uncompressed kernel.
    #[error("there is no uncompressed kernel (ebb extract-vmlinux makes one)")]
    Elf,
    /// The module was not built.
    #[error("there is no module ebb_balloon for the guest's kernel (make module builds it)")]
    Module,
}

impl Setup {
    /// What these guests need of their initramfs and do not find in it; `None` when they have all.
    pub fn missing_in_guest(&self, module: Presence) -> Option<Missing> {
        (self.driver != Driver::Stock && module == Presence::Absent).then_some(Missing::Module)
    }
}

impl Assets {
    /// What the setup needs beyond these files; `None` when it can run.
    pub fn missing(&self, setup: &Setup) -> Option<Missing> {
        if setup.monitor == MonitorKind::Qemu && self.qemu.is_none() {
            return Some(Missing::Qemu);
        }
        if setup.kernel == KernelImage::Elf && self.elf.is_none() {
            return Some(Missing::Elf);
        }
        setup.missing_in_guest(self.module)
    }

    /// The command that runs a guest with its serial console on standard input and output, and with the monitor's
    /// control socket at `control` if there shall be one.
    ///
    /// # Errors
    /// [`Missing`], what is not there.
    pub fn command(
        &self,
        setup: &Setup,
        size: GuestSize,
        control: Option<&Path>,
    ) -> Result<Command, Missing> {
        let kernel = match setup.kernel {
            KernelImage::BzImage => &self.bzimage,
            KernelImage::Elf => self.elf.as_ref().ok_or(Missing::Elf)?,
        };
        let mut command = match setup.monitor {
            MonitorKind::Ebb => self.ebb_command(setup, size),
            MonitorKind::Qemu => qemu_command(self.qemu.as_ref().ok_or(Missing::Qemu)?, setup, size),
        };
        let (kernel_option, initrd_option, arguments_option) = match setup.monitor {
            MonitorKind::Ebb => ("--kernel", "--initrd", "--cmdline"),
            MonitorKind::Qemu => ("-kernel", "-initrd", "-append"),
        };
        command
            .arg(kernel_option)
            .arg(kernel)
            .arg(initrd_option)
            .arg(&self.initrd)
            .args([arguments_option, &setup.kernel_arguments()]);
        match (control, setup.monitor) {
            (None, _) => {}
            (Some(socket), MonitorKind::Ebb) => {
                command.arg("--api").arg(socket);
            }
            (Some(socket), MonitorKind::Qemu) => {
                command.arg("-qmp").arg(format!("unix:{},server=on,wait=off", socket.display()));
            }
        }
        Ok(command)
    }

    /// The command that lets the guest of a snapshot go on, with its serial console and control socket like [`Self::command`].
    pub fn restore_command(&self, setup: &Setup, snapshot: &Path, control: &Path) -> Command {
        let mut command = Command::new(&self.ebb);
        command
            .arg("restore")
            .arg(snapshot)
            .args(["--serial", "stdio", "--on-reboot", "exit", "--clock", setup.clock.name(), "--api"])
            .arg(control);
        command
    }

    fn ebb_command(&self, setup: &Setup, size: GuestSize) -> Command {
        let mut memory = format!("size={}M,backing=anon", size.memory_mib);
        if setup.huge_pages == HugePages::Off {
            memory.push_str(",thp=off");
        }
        let mut command = Command::new(&self.ebb);
        command
            .args(["run", "--serial", "stdio", "--on-reboot", "exit", "--clock", setup.clock.name()])
            .args(["--cpus", &size.cpus.to_string()])
            .args(["--memory", &memory])
            .args(["--balloon", &setup.balloon_option()]);
        command
    }
}

fn qemu_command(qemu: &PathBuf, setup: &Setup, size: GuestSize) -> Command {
    let balloon =
        format!("virtio-balloon-pci,free-page-reporting={},deflate-on-oom=on", setup.reporting.word());
    let mut command = Command::new(qemu);
    command
        .args(["-accel", "kvm", "-M", "q35", "-cpu", "host", "-nodefaults", "-no-user-config", "-no-reboot"])
        .args(["-display", "none", "-monitor", "none", "-serial", "stdio"])
        .args(["-smp", &size.cpus.to_string(), "-m", &format!("{}M", size.memory_mib)])
        .args(["-device", &balloon]);
    command
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::{Blocks, Module};

    const SIZE: GuestSize = GuestSize { memory_mib: 512, cpus: 2 };

    fn assets() -> Assets {
        Assets {
            ebb: "/bin/ebb".into(),
            qemu: Some("/usr/bin/qemu-system-x86_64".into()),
            bzimage: "/ebb/vmlinuz".into(),
            elf: Some("/ebb/vmlinux".into()),
            initrd: "/ebb/guest.cpio".into(),
            module: Presence::Present,
        }
    }

    fn line(setup: &Setup) -> String {
        let command = assets().command(setup, SIZE, Some(Path::new("/tmp/c"))).unwrap();
        let words = std::iter::once(command.get_program()).chain(command.get_args());
        words.map(|word| word.to_str().unwrap()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn ebb_is_run_as_its_users_would() {
        let line = line(&Setup::EBB);
        assert!(line.starts_with("/bin/ebb run --serial stdio "), "{line}");
        assert!(
            line.contains("--cpus 2 --memory size=512M,backing=anon --balloon size=0,reporting=on"),
            "{line}"
        );
        assert!(
            line.contains("--kernel /ebb/vmlinuz --initrd /ebb/guest.cpio --cmdline console=ttyS0"),
            "{line}"
        );
    }

    #[test]
    fn each_setting_of_a_series_reaches_the_command() {
        let off = line(&Setup { reporting: Reporting::Off, ..Setup::EBB });
        assert!(off.contains("reporting=off") && !off.contains("reporting=on"));
        assert!(
            line(&Setup { huge_pages: HugePages::Off, ..Setup::EBB })
                .contains("size=512M,backing=anon,thp=off")
        );
        assert!(line(&Setup { kernel: KernelImage::Elf, ..Setup::EBB }).contains("--kernel /ebb/vmlinux "));
        let lean = line(&Setup { bounce_buffer: BounceBuffer::Off, ..Setup::EBB });
        assert!(lean.contains("reboot=t swiotlb=noforce"), "{lean}");
        let late = line(&Setup { clock: ClockPolicy::CatchUp, ..Setup::EBB });
        assert!(late.contains(" --clock catch-up "), "{late}");
        let seed = Driver::Module(Module { blocks: Blocks::SinglePages, ..Module::DEFAULT });
        let single = line(&Setup { driver: seed, clearing: Clearing::Off, ..Setup::EBB });
        assert!(single.contains("init_on_alloc=0 ebb.balloon=ebb_balloon ebb_balloon.tracker="), "{single}");
        let plain = line(&Setup { extension: Extension::Withheld, ..Setup::EBB });
        assert!(plain.contains(",page_bitmap=off,page_ranges=off,host_requests=off "), "{plain}");
        let ordered = line(&Setup { reporting_order: Some(4), ..Setup::EBB });
        assert!(ordered.ends_with(" page_reporting.page_reporting_order=4 --api /tmp/c"), "{ordered}");
    }

    #[test]
    fn a_restored_guest_has_the_console_and_the_clock_of_its_series() {
        let setup = Setup { clock: ClockPolicy::CatchUp, ..Setup::EBB };
        let command = assets().restore_command(&setup, Path::new("/tmp/s"), Path::new("/tmp/c"));
        let words: Vec<_> = command.get_args().map(|word| word.to_str().unwrap()).collect();
        let expected = "restore /tmp/s --serial stdio --on-reboot exit --clock catch-up --api /tmp/c";
        assert_eq!(words.join(" "), expected);
    }

    #[test]
    fn qemu_gets_the_same_guest() {
        let line = line(&Setup { monitor: MonitorKind::Qemu, ..Setup::EBB });
        assert!(line.contains("-smp 2 -m 512M -device virtio-balloon-pci,free-page-reporting=on"), "{line}");
        assert!(
            line.contains("-kernel /ebb/vmlinuz -initrd /ebb/guest.cpio -append console=ttyS0"),
            "{line}"
        );
        assert!(line.ends_with("-qmp unix:/tmp/c,server=on,wait=off"), "{line}");
    }

    #[test]
    fn what_is_not_there_is_said_and_not_run() {
        let bare = Assets { qemu: None, elf: None, module: Presence::Absent, ..assets() };
        let module = Setup { driver: Driver::Module(Module::DEFAULT), ..Setup::EBB };
        assert_eq!(bare.missing(&module), Some(Missing::Module));
        assert_eq!(assets().missing(&module), None);
        let qemu = Setup { monitor: MonitorKind::Qemu, ..Setup::EBB };
        let elf = Setup { kernel: KernelImage::Elf, ..Setup::EBB };
        assert_eq!(bare.missing(&Setup::EBB), None);
        assert_eq!(bare.missing(&qemu), Some(Missing::Qemu));
        assert_eq!(bare.command(&qemu, SIZE, None).unwrap_err(), Missing::Qemu);
        assert_eq!(bare.command(&elf, SIZE, None).unwrap_err(), Missing::Elf);
    }

    #[test]
    fn setups_are_described_by_what_makes_them_differ() {
        let text = Setup { huge_pages: HugePages::Off, reporting_order: Some(0), ..Setup::EBB }.describe();
        assert_eq!(
            text,
            "ebb run, free page reporting on, guest reports blocks of order 0 and up, guest memory without \
             transparent huge pages"
        );
    }
}
