//! The monitors that guests run under: Ebb, and QEMU as its peer, each as a process with the same
//! guest.

use std::path::{Path, PathBuf};
use std::process::Command;

use ebb_kvm_clock::ClockPolicy;
use ebb_virtual_host::debian::GuestFiles;
use ebb_vmm::boot::lean::with_lean_words;

use crate::error::Missing;
use crate::harness::driver::Driver;
use crate::harness::merging::Merging;
use crate::harness::size::GuestSize;
use crate::harness::tap;

/// Arguments for every guest's kernel: a quiet serial console, and an end instead of a hang after a
/// crash.
pub(crate) const KERNEL_ARGUMENTS: &str = "console=ttyS0 quiet loglevel=1 panic=-1 reboot=t";

/// No check of the time stamp counter twice a second, and none of how fragmented memory is
/// (docs/guests.md).
const SELDOM_WAKES: &str = "tsc=reliable sysctl.vm.compaction_proactiveness=0";

/// A virtual machine monitor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MonitorKind {
    /// `ebb run`.
    Ebb,
    /// Debian's QEMU with KVM.
    Qemu,
}

/// What runs in a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum System {
    /// A kernel with an agent as its init.
    Agent,
    /// Debian with systemd and ssh on a disk, with a kernel without modules and without an agent.
    DebianWithSsh,
    /// Debian with systemd, a C compiler and Python on a disk, with the kernel and the modules of
    /// guests with an agent, which is a service here.
    DebianWithAgent,
    /// As `Agent`, with the same Debian on a disk that the guest only reads.
    AgentWithDebian,
}

impl System {
    /// Whether its disk has the Debian with a C compiler and Python.
    pub fn has_work_root(self) -> bool {
        matches!(self, Self::DebianWithAgent | Self::AgentWithDebian)
    }
}

/// How the guests of a series are run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Setup {
    /// The monitor.
    pub monitor: MonitorKind,
    /// Whether the balloon offers free page reporting.
    pub reporting: bool,
    /// Smallest block that the guest reports, as the exponent of its number of 4 KiB pages; `None`
    /// leaves the kernel's default (`pageblock_order`, 9 on x86). Linux `mm/page_reporting.c`,
    /// parameter `page_reporting_order`.
    pub reporting_order: Option<u32>,
    /// Whether the balloon offers free page hinting (a guest's free pages during migration) also
    /// under QEMU, where it is off by default.
    pub hinting: bool,
    /// The driver of the balloon.
    pub driver: Driver,
    /// Whether the device offers the extension (docs/extension.md); Ebb only.
    pub extension: bool,
    /// Whether the guest's memory may use transparent huge pages.
    pub huge_pages: bool,
    /// Whether the kernel is an uncompressed one, entered through its PVH note, and no bzImage,
    /// which decompresses itself in the guest's memory.
    pub uncompressed_kernel: bool,
    /// Whether Linux sets up a bounce buffer when a machine has memory above 4 GiB
    /// (kernel/dma/swiotlb.c): 64 MiB, written with zeros at boot, for devices that cannot reach
    /// there. Virtio devices of a monitor reach everywhere.
    pub bounce_buffer: bool,
    /// What runs in the guest.
    pub system: System,
    /// Whether the kernel's command line has the words of `ebb run --lean` (docs/boot.md).
    pub lean: bool,
    /// Whether the guest's kernel clears the pages that it allocates, which is its default.
    /// Debian's kernel does (`CONFIG_INIT_ON_ALLOC_DEFAULT_ON`), also for a driver's balloon.
    pub clearing: bool,
    /// Whether its kernel has the words of docs/guests.md with which an idle guest seldom wakes.
    pub seldom_wakes: bool,
    /// What is done once with an idle guest, when its memory has been returned after its program;
    /// Ebb only.
    pub idle: Idle,
    /// Behaviour of the guest's clocks over pauses and restores; Ebb only.
    pub clock: ClockPolicy,
    /// With or without merging of equal pages; Ebb only.
    pub merging: Merging,
}

/// What is done with an idle guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Idle {
    /// Nothing.
    Left,
    /// Its zero pages are trimmed (`PUT /vm/trim`).
    Trimmed,
    /// It is parked (`PUT /vm/park`).
    Parked,
}

impl Setup {
    /// Ebb with everything at its default.
    pub const EBB: Self = Self {
        monitor: MonitorKind::Ebb,
        reporting: true,
        reporting_order: None,
        hinting: false,
        driver: Driver::Stock,
        extension: true,
        huge_pages: true,
        uncompressed_kernel: false,
        bounce_buffer: true,
        system: System::Agent,
        lean: false,
        clearing: true,
        seldom_wakes: false,
        idle: Idle::Left,
        clock: ClockPolicy::Continue,
        merging: Merging::Off,
    };

    /// Description for a document.
    pub fn describe(&self) -> String {
        let when = |holds: bool, words: &str| holds.then(|| words.to_owned());
        let order = |order| format!("guest reports blocks of order {order} and up");
        let words = [
            Some(match self.monitor {
                MonitorKind::Ebb => "ebb run".to_owned(),
                MonitorKind::Qemu => "qemu-system-x86_64 -accel kvm -M q35".to_owned(),
            }),
            Some(format!("free page reporting {}", on_off(self.reporting))),
            when(self.hinting, "free page hinting on"),
            self.reporting_order.map(order),
            self.driver.describe(),
            when(!self.extension, "device without the extension"),
            when(!self.clearing, "guest does not clear allocated pages"),
            when(self.seldom_wakes, "guest without periodic checks of clock and fragmentation"),
            when(!self.huge_pages, "guest memory without transparent huge pages"),
            self.merging.describe(),
            when(!self.bounce_buffer, "guest without a bounce buffer"),
            match self.idle {
                Idle::Left => None,
                Idle::Trimmed => Some("trimmed when idle".to_owned()),
                Idle::Parked => Some("parked when idle".to_owned()),
            },
            (self.clock != ClockPolicy::Continue).then(|| format!("--clock {}", self.clock.name())),
            when(self.uncompressed_kernel, "uncompressed kernel (PVH)"),
            match self.system {
                System::Agent => None,
                System::AgentWithDebian => Some("Debian on a disk that it reads".to_owned()),
                _ => Some("Debian with systemd on a disk".to_owned()),
            },
            when(self.lean, "words of --lean"),
        ];
        words.into_iter().flatten().collect::<Vec<_>>().join(", ")
    }

    fn balloon_option(&self) -> String {
        let extension =
            if self.extension { "" } else { ",page_bitmap=off,page_ranges=off,host_requests=off" };
        format!("size=0,reporting={},deflate_on_oom=on{extension}", on_off(self.reporting))
    }

    fn kernel_arguments(&self) -> String {
        let order = |order| format!("page_reporting.page_reporting_order={order}");
        let words = [
            Some(KERNEL_ARGUMENTS.to_owned()),
            self.reporting_order.map(order),
            (!self.bounce_buffer).then(|| "swiotlb=noforce".to_owned()),
            (!self.clearing).then(|| "init_on_alloc=0".to_owned()),
            self.seldom_wakes.then(|| SELDOM_WAKES.to_owned()),
            self.driver.kernel_arguments(),
            match self.system {
                System::Agent | System::AgentWithDebian => None,
                System::DebianWithSsh => Some(format!("root=/dev/vda rw {}", tap::kernel_word())),
                // The console is the agent's.
                System::DebianWithAgent => {
                    Some("ebb.root=/dev/vda systemd.show_status=no".to_owned())
                }
            },
        ];
        let line = words.into_iter().flatten().collect::<Vec<_>>().join(" ");
        match (self.lean, self.monitor) {
            (true, MonitorKind::Qemu) => with_lean_words(&line),
            // `ebb run --lean` adds them.
            _ => line,
        }
    }

    /// A requirement of these guests that their initramfs does not meet, if any.
    pub fn missing_in_guest(&self, module: Presence) -> Option<Missing> {
        (self.driver != Driver::Stock && module == Presence::Absent).then_some(Missing::Module)
    }
}

fn on_off(is_on: bool) -> &'static str {
    if is_on { "on" } else { "off" }
}

/// Files and programs for guests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Assets {
    /// The `ebb` program.
    pub ebb: PathBuf,
    /// QEMU, if installed.
    pub qemu: Option<PathBuf>,
    /// The guest's kernel as bzImage.
    pub bzimage: PathBuf,
    /// The same kernel as ELF, if available.
    pub elf: Option<PathBuf>,
    /// The guest's initramfs with the agent.
    pub initrd: PathBuf,
    /// Whether the initramfs has the module `ebb_balloon`.
    pub module: Presence,
    /// A Debian guest with ssh, if it was made.
    pub debian: Option<GuestFiles>,
    /// The disks of Debian guests with an agent.
    pub work_disks: WorkDisks,
}

/// The disks of Debian guests with an agent. Each guest writes to its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WorkDisks {
    /// The image was not made.
    None,
    /// This image is copied for each guest.
    Copies(PathBuf),
    /// Disks of the virtual host, each with the same image that no guest has used yet, in the order
    /// of the series.
    Fresh(Vec<PathBuf>),
}

/// Whether something exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Presence {
    /// It exists.
    Present,
    /// It is missing.
    Absent,
}

impl Assets {
    /// A requirement of the setup that these files do not meet; `None` when it can run.
    pub fn missing(&self, setup: &Setup) -> Option<Missing> {
        if setup.monitor == MonitorKind::Qemu && self.qemu.is_none() {
            return Some(Missing::Qemu);
        }
        if setup.uncompressed_kernel && self.elf.is_none() {
            return Some(Missing::Elf);
        }
        if setup.system == System::DebianWithSsh && self.debian.is_none() {
            return Some(Missing::Debian);
        }
        if setup.system.has_work_root() && self.work_disks == WorkDisks::None {
            return Some(Missing::Work);
        }
        setup.missing_in_guest(self.module)
    }

    /// The command that runs a guest with its serial console on standard input and output, and with
    /// the monitor's control socket at `control`, if given.
    ///
    /// # Errors
    /// [`Missing`], the unmet requirement.
    pub fn command(
        &self,
        setup: &Setup,
        size: GuestSize,
        control: Option<&Path>,
    ) -> Result<Command, Missing> {
        let kernel = if setup.system == System::DebianWithSsh {
            &self.debian.as_ref().ok_or(Missing::Debian)?.kernel
        } else if setup.uncompressed_kernel {
            self.elf.as_ref().ok_or(Missing::Elf)?
        } else {
            &self.bzimage
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
        command.arg(kernel_option).arg(kernel);
        if setup.system != System::DebianWithSsh {
            command.arg(initrd_option).arg(&self.initrd);
        }
        command.args([arguments_option, &setup.kernel_arguments()]);
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

    /// The command that continues the guest of a snapshot, with its serial console and control
    /// socket as in [`Self::command`].
    pub fn restore_command(&self, setup: &Setup, snapshot: &Path, control: &Path) -> Command {
        let mut command = Command::new(&self.ebb);
        command.arg("restore").arg(snapshot);
        with_console(&mut command, setup).arg("--api").arg(control);
        command
    }

    /// The command of a monitor that receives a guest of this kind from another one, which connects
    /// to `address` (`HOST:PORT`); with the guest's serial console and the control socket as in
    /// [`Self::command`].
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
        let from = format!("tcp:{address}");
        if setup.monitor == MonitorKind::Qemu {
            let mut command = self.command(setup, size, Some(control))?;
            command.args(["-incoming", &from]);
            return Ok(command);
        }
        let mut command = Command::new(&self.ebb);
        command.args(["receive", "--listen", &from, "--insecure"]);
        with_console(&mut command, setup).arg("--api").arg(control);
        Ok(command)
    }

    fn ebb_command(&self, setup: &Setup, size: GuestSize) -> Command {
        let thp = if setup.huge_pages { "" } else { ",thp=off" };
        let merging = setup.merging.memory_option();
        let memory = format!("size={}M,backing=anon{thp}{merging}", size.memory_mib);
        let mut command = Command::new(&self.ebb);
        with_console(command.arg("run"), setup)
            .args(["--cpus", &size.cpus.to_string(), "--memory", &memory])
            .args(["--balloon", &setup.balloon_option()]);
        if setup.lean {
            command.arg("--lean");
        }
        command
    }
}

/// Common arguments of Ebb's monitors: the console, and the clock policy.
fn with_console<'a>(command: &'a mut Command, setup: &Setup) -> &'a mut Command {
    command.args(["--serial", "stdio", "--on-reboot", "exit"]).args(["--clock", setup.clock.name()])
}

fn qemu_command(qemu: &PathBuf, setup: &Setup, size: GuestSize) -> Command {
    let mut balloon = format!(
        "virtio-balloon-pci,free-page-reporting={},deflate-on-oom=on",
        on_off(setup.reporting)
    );
    let mut command = Command::new(qemu);
    if setup.hinting {
        balloon.push_str(",free-page-hint=on,iothread=hints");
        command.args(["-object", "iothread,id=hints"]);
    }
    let words = "-accel kvm -M q35 -cpu host -nodefaults -no-user-config -no-reboot \
                 -display none -monitor none -serial stdio";
    command
        // This names the threads, so that those of vCPUs can be identified.
        .args(["-name", "ebb-lab,debug-threads=on"])
        .args(words.split_ascii_whitespace())
        .args(["-smp", &size.cpus.to_string(), "-m", &format!("{}M", size.memory_mib)])
        .args(["-device", &balloon]);
    command
}

#[cfg(test)]
mod tests;
