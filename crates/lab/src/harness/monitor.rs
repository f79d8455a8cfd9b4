//! The monitors that guests run under: Ebb, and QEMU as its peer, each as a process with the same
//! guest.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use ebb_kvm_clock::ClockPolicy;

use crate::harness::driver::{Driver, Extension};
use crate::harness::merging::Merging;

/// Words that every guest's kernel gets: a quiet serial console, and an end instead of a hang after
/// a crash.
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

/// The bounce buffer that Linux sets up when a machine has memory above 4 GiB
/// (kernel/dma/swiotlb.c), for devices that cannot reach there. Virtio devices of a monitor reach
/// everywhere.
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

/// Whether the guest's kernel writes zeros to pages that it allocates. Debian's does
/// (`CONFIG_INIT_ON_ALLOC_DEFAULT_ON`), also to those that a driver takes for its balloon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Clearing {
    /// As the kernel was built.
    Default,
    /// Not (`init_on_alloc=0`).
    Off,
}

/// Free page hinting of the balloon: what a guest says is free while it is moved to another host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hinting {
    /// As the monitor does by itself: Ebb offers it, QEMU does not.
    Default,
    /// Offered.
    On,
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
    /// Smallest block that the guest reports, as the exponent of its number of 4 KiB pages; `None`
    /// leaves the kernel's default (`pageblock_order`, 9 on x86). Linux `mm/page_reporting.c`,
    /// parameter `page_reporting_order`.
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
    /// With or without free page hinting.
    pub hinting: Hinting,
    /// With or without merging of equal pages; Ebb only.
    pub merging: Merging,
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
        hinting: Hinting::Default,
        merging: Merging::Off,
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
        if self.hinting == Hinting::On {
            text.push_str(", free page hinting on");
        }
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
        text.push_str(&self.merging.describe());
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

    /// The command that runs a guest with its serial console on standard input and output, and with
    /// the monitor's control socket at `control` if there shall be one.
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
            MonitorKind::Qemu => {
                qemu_command(self.qemu.as_ref().ok_or(Missing::Qemu)?, setup, size)
            }
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

    /// The command that lets the guest of a snapshot go on, with its serial console and control
    /// socket like [`Self::command`].
    pub fn restore_command(&self, setup: &Setup, snapshot: &Path, control: &Path) -> Command {
        let mut command = Command::new(&self.ebb);
        command
            .arg("restore")
            .arg(snapshot)
            .args([
                "--serial",
                "stdio",
                "--on-reboot",
                "exit",
                "--clock",
                setup.clock.name(),
                "--api",
            ])
            .arg(control);
        command
    }

    /// The command of a monitor that takes a guest of this kind over from another one, which
    /// connects to `address` (`HOST:PORT`); with the guest's serial console and the control socket
    /// like [`Self::command`].
    ///
    /// # Errors
    /// As [`Self::command`].
    pub fn receive_command(
        &self,
        setup: &Setup,
        size: GuestSize,
        address: &str,
        control: &Path,
    ) -> Result<Command, Missing> {
        match setup.monitor {
            MonitorKind::Ebb => {
                let mut command = Command::new(&self.ebb);
                command
                    .args(["receive", "--listen", &format!("tcp:{address}"), "--insecure"])
                    .args([
                        "--serial",
                        "stdio",
                        "--on-reboot",
                        "exit",
                        "--clock",
                        setup.clock.name(),
                        "--api",
                    ])
                    .arg(control);
                Ok(command)
            }
            MonitorKind::Qemu => {
                let mut command = self.command(setup, size, Some(control))?;
                command.args(["-incoming", &format!("tcp:{address}")]);
                Ok(command)
            }
        }
    }

    fn ebb_command(&self, setup: &Setup, size: GuestSize) -> Command {
        let mut memory = format!("size={}M,backing=anon", size.memory_mib);
        if setup.huge_pages == HugePages::Off {
            memory.push_str(",thp=off");
        }
        memory.push_str(&setup.merging.memory_option());
        let mut command = Command::new(&self.ebb);
        command
            .args([
                "run",
                "--serial",
                "stdio",
                "--on-reboot",
                "exit",
                "--clock",
                setup.clock.name(),
            ])
            .args(["--cpus", &size.cpus.to_string()])
            .args(["--memory", &memory])
            .args(["--balloon", &setup.balloon_option()]);
        command
    }
}

fn qemu_command(qemu: &PathBuf, setup: &Setup, size: GuestSize) -> Command {
    let mut balloon = format!(
        "virtio-balloon-pci,free-page-reporting={},deflate-on-oom=on",
        setup.reporting.word()
    );
    let mut command = Command::new(qemu);
    if setup.hinting == Hinting::On {
        balloon.push_str(",free-page-hint=on,iothread=hints");
        command.args(["-object", "iothread,id=hints"]);
    }
    command
        // Threads have names then, by which those of vCPUs are told from the rest.
        .args(["-name", "ebb-lab,debug-threads=on"])
        .args([
            "-accel",
            "kvm",
            "-M",
            "q35",
            "-cpu",
            "host",
            "-nodefaults",
            "-no-user-config",
            "-no-reboot",
        ])
        .args(["-display", "none", "-monitor", "none", "-serial", "stdio"])
        .args(["-smp", &size.cpus.to_string(), "-m", &format!("{}M", size.memory_mib)])
        .args(["-device", &balloon]);
    command
}

#[cfg(test)]
mod tests;
