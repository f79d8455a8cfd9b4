//! QEMU's command line and process: one emulator per virtual host, without files on disk.

use std::env;
use std::ffi::OsString;
use std::fs::File;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::channel::PORT_NAME;
use crate::clock::SlowClock;
use crate::config::HostConfig;
use crate::error::HostError;
use crate::translations;

/// The emulator's program.
pub const PROGRAM: &str = "qemu-system-x86_64";
/// Kernel arguments of every virtual host. Mitigations, address randomization, tests of ciphers and
/// a search for more serial lines cost boot time without protecting anything here. The emulator's
/// time stamp counter is reliable, which Linux cannot detect; and the timer's interrupt, which a
/// busy machine delays, needs no test. The root stays in memory (ramfs), so that swap contains only
/// the memory of programs.
const KERNEL_ARGUMENTS: &str = "console=ttyS0 quiet panic=-1 rootfstype=ramfs mitigations=off \
                                nokaslr tsc=reliable cryptomgr.notests 8250.nr_uarts=1 \
                                no_timer_check";
/// An AMD processor with nested paging, which QEMU emulates well enough for KVM.
const CPU_MODEL: &str = "EPYC,+svm,+npt";
/// QEMU's own tables in huge pages: it searches the one of translated blocks all the time.
const HUGE_PAGES: &str = "glibc.malloc.hugetlb=1";
/// Devices have an interrupt line and no table of messages (MSI-X): QEMU 10.0.2 has aborted in that
/// table's handler while a host with several processors booted (`msix_table_mmio_write`).
const INTERRUPTS: &str = "vectors=0";
/// Keeps programs, and thus the vCPUs of guests, off QEMU's first processor; see
/// [`emulated_processors`].
const SPARE_FIRST_PROCESSOR: &str = "isolcpus=0";

/// Open files that QEMU inherits.
#[derive(Debug)]
pub struct Files {
    /// Control channel, connected.
    pub control: OwnedFd,
    /// Serial console, connected.
    pub console: OwnedFd,
    /// The kernel: ELF with a PVH entry, or a bzImage.
    pub kernel: File,
    /// The initramfs.
    pub initramfs: File,
    /// The swap disk.
    pub swap: Option<File>,
    /// The disks of the root file system and of the configuration, readable.
    pub disks: Vec<File>,
    /// The emulator's plugin.
    pub plugin: Option<File>,
    /// The clock, unless it is the usual one.
    pub clock: Option<SlowClock>,
}

/// Finds the emulator in `PATH`.
pub fn find() -> Result<PathBuf, HostError> {
    let missing = || HostError::QemuMissing { program: PROGRAM.to_owned() };
    let path = env::var_os("PATH").ok_or_else(missing)?;
    env::split_paths(&path)
        .map(|dir| dir.join(PROGRAM))
        .find(|file| file.is_file())
        .ok_or_else(missing)
}

/// The emulator's arguments.
pub fn arguments(config: &HostConfig, files: &Files) -> Vec<OsString> {
    let mut list: Vec<OsString> = Vec::new();
    let mut add = |words: &[&str]| list.extend(words.iter().map(OsString::from));
    add(&[
        "-name",
        "ebb-virtual-host",
        "-nodefaults",
        "-no-user-config",
        "-display",
        "none",
        "-no-reboot",
    ]);
    add(&["-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny"]);
    // This machine's kernel must not merge pages of the host, which itself is used to test merging.
    let emulator = format!("tcg,thread=multi,tb-size={}", translations::CODE_MIB);
    add(&["-M", "q35,mem-merge=off", "-accel", &emulator, "-cpu", CPU_MODEL]);
    if let Some(plugin) = &files.plugin {
        add(&["-plugin", &format!("file=/proc/self/fd/{}", plugin.as_raw_fd())]);
    }
    let processors = emulated_processors(config);
    add(&["-smp", &format!("{processors},sockets={processors},cores=1,threads=1")]);
    add(&["-m", &format!("{}M", config.total_memory_mib())]);
    for (index, node) in config.nodes.iter().enumerate() {
        add(&[
            "-object",
            &format!("memory-backend-ram,id=memory{index},size={}M", node.memory_mib),
        ]);
        let cpus = node
            .cpus
            .as_ref()
            .map_or_else(String::new, |range| format!(",cpus={}-{}", range.start(), range.end()));
        // The processor that replaces the first one is in its node.
        let first = node.cpus.as_ref().is_some_and(|range| range.contains(&0));
        let cpus =
            if first && has_spare(config) { format!("{cpus},cpus={}", config.cpus) } else { cpus };
        add(&["-numa", &format!("node,nodeid={index},memdev=memory{index}{cpus}")]);
    }
    add(&["-chardev", &format!("socket,id=console,fd={}", files.console.as_raw_fd())]);
    add(&["-serial", "chardev:console"]);
    add(&["-device", &format!("virtio-serial-pci,{INTERRUPTS}")]);
    add(&["-chardev", &format!("socket,id=control,fd={}", files.control.as_raw_fd())]);
    add(&["-device", &format!("virtserialport,chardev=control,name={PORT_NAME}")]);
    if let Some(swap) = &files.swap {
        let path = format!("/proc/self/fd/{}", swap.as_raw_fd());
        add(&[
            "-drive",
            &format!(
                "file={path},format=raw,if=none,id=swap,cache=unsafe,aio=threads,file.locking=off"
            ),
        ]);
        add(&["-device", &format!("virtio-blk-pci,drive=swap,serial=ebb-swap,{INTERRUPTS}")]);
    }
    for (index, disk) in files.disks.iter().enumerate() {
        // What is written goes to a temporary file of QEMU's, which has no name.
        let path = format!("/proc/self/fd/{}", disk.as_raw_fd());
        add(&[
            "-drive",
            &format!(
                "file={path},format=raw,if=none,id=disk{index},snapshot=on,cache=unsafe,\
                 aio=threads,file.locking=off"
            ),
        ]);
        add(&["-device", &format!("virtio-blk-pci,drive=disk{index},{INTERRUPTS}")]);
    }
    let spare = if has_spare(config) { SPARE_FIRST_PROCESSOR } else { "" };
    add(&["-append", &format!("{KERNEL_ARGUMENTS} {spare} {}", config.kernel_arguments)]);
    add(&["-initrd", &format!("/proc/self/fd/{}", files.initramfs.as_raw_fd())]);
    add(&["-kernel", &format!("/proc/self/fd/{}", files.kernel.as_raw_fd())]);
    list
}

/// Number of QEMU's processors. If several are requested, there is one more, so that no guest runs
/// on QEMU's first one, number 0. The last one, number `config.cpus`, replaces it; the others have
/// the requested numbers.
///
/// An emulated FXRSTOR or XRSTOR, hence nearly every context switch, clears a flag of QEMU's
/// *first* processor, whichever processor it runs on (QEMU 10.0.2, `cpu_clear_ignne` in
/// `target/i386/tcg/system/fpu_helper.c`). It reads and writes the word `hflags2` without a lock,
/// so that concurrent changes of the first processor's own thread are lost. The word also contains
/// whether nested paging and interrupts are enabled, which each VMRUN and #VMEXIT changes. After a
/// lost change the host continues with nested paging, which leaves its own state in its guest's, or
/// the guest continues without, on the host's memory, or the processor takes no more interrupts.
/// The word does not change while no guest runs.
fn emulated_processors(config: &HostConfig) -> u32 {
    config.cpus + u32::from(has_spare(config))
}

/// Whether QEMU's first processor is kept free. This is not needed if it is the only one, because
/// no other processor then writes to its flags.
fn has_spare(config: &HostConfig) -> bool {
    config.cpus > 1
}

/// Starts the emulator. It is killed when the calling *thread* ends.
pub fn spawn(program: &Path, arguments: &[OsString], files: &Files) -> Result<Child, HostError> {
    let mut kept: Vec<RawFd> = vec![files.control.as_raw_fd(), files.console.as_raw_fd()];
    kept.extend([&files.kernel, &files.initramfs].map(AsRawFd::as_raw_fd));
    kept.extend(files.disks.iter().map(AsRawFd::as_raw_fd));
    let clock = files.clock.as_ref();
    let optional = [files.swap.as_ref(), files.plugin.as_ref(), clock.map(|clock| &clock.library)];
    kept.extend(optional.into_iter().flatten().map(AsRawFd::as_raw_fd));
    let parent = rustix::process::getpid();
    let mut command = Command::new(program);
    command.args(arguments).env_clear().env("PATH", "/usr/bin:/bin").current_dir("/");
    command.env("GLIBC_TUNABLES", HUGE_PAGES);
    if let Some(clock) = clock {
        clock.set(&mut command);
    }
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).process_group(0);
    let prepare = move || {
        rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
        // The parent may have ended before the line above took effect.
        if rustix::process::getppid() != Some(parent) {
            return Err(std::io::Error::other("the parent has ended"));
        }
        close_all_on_exec()?;
        for descriptor in &kept {
            // SAFETY: `files` outlives the call of `Command::spawn` in this function, so the
            // descriptors are open.
            let descriptor = unsafe { BorrowedFd::borrow_raw(*descriptor) };
            rustix::io::fcntl_setfd(descriptor, rustix::io::FdFlags::empty())?;
        }
        Ok(())
    };
    // SAFETY: `prepare` runs between fork and exec and only makes system calls; it does not
    // allocate on success.
    unsafe { command.pre_exec(prepare) };
    command.spawn().map_err(HostError::io(format!("cannot start {}", program.display())))
}

/// Sets close-on-exec on every descriptor above standard error, including those inherited from this
/// program's parent.
fn close_all_on_exec() -> std::io::Result<()> {
    // SAFETY: close_range with CLOSE_RANGE_CLOEXEC takes only numbers and accesses no memory of the
    // process.
    let result = unsafe {
        libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC)
    };
    if result == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(config: &HostConfig) -> String {
        let null = || File::open("/dev/null").unwrap();
        let files = Files {
            control: null().into(),
            console: null().into(),
            kernel: null(),
            initramfs: null(),
            swap: Some(null()),
            disks: vec![null()],
            plugin: None,
            clock: None,
        };
        let list = arguments(config, &files);
        list.iter().map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn a_host_without_nodes_has_plain_memory() {
        let line = text(&HostConfig { memory_mib: 3000, cpus: 3, ..HostConfig::default() });
        assert!(
            line.contains("id=disk0,snapshot=on")
                && line.contains("-m 3000M")
                && line.contains("-smp 4,")
                && !line.contains("-numa"),
            "{line}"
        );
    }

    #[test]
    fn the_first_of_several_processors_is_kept_free() {
        let several = text(&HostConfig::default());
        assert!(several.contains("-smp 3,") && several.contains(" isolcpus=0 "), "{several}");
        let one = text(&HostConfig { cpus: 1, ..HostConfig::default() });
        assert!(one.contains("-smp 1,") && !one.contains("isolcpus"), "{one}");
    }

    #[test]
    fn each_node_has_a_backend() {
        let nodes = vec!["size=1G,cpus=0-1".parse().unwrap(), "size=512M".parse().unwrap()];
        let line = text(&HostConfig { nodes, ..HostConfig::default() });
        assert!(line.contains("-m 1536M"), "{line}");
        assert!(line.contains("-numa node,nodeid=0,memdev=memory0,cpus=0-1,cpus=2 "), "{line}");
        assert!(line.contains("-object memory-backend-ram,id=memory1,size=512M"), "{line}");
        assert!(line.contains("-numa node,nodeid=1,memdev=memory1 "), "{line}");
    }

    #[test]
    fn kernel_arguments_are_appended() {
        let config =
            HostConfig { kernel_arguments: "loglevel=7".to_owned(), ..HostConfig::default() };
        assert!(text(&config).contains("no_timer_check isolcpus=0 loglevel=7"));
    }
}
