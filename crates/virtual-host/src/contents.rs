//! Contents of a virtual host's root file system, and the other files that it boots from.

use std::collections::BTreeSet;
use std::env;
use std::fs::{self, File};
use std::io::{Seek, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use ebb_vmlinux::extract_vmlinux;
use serde::{Deserialize, Serialize};

use crate::cache::{Cache, Key};
use crate::config::{HostConfig, Inclusion};
use crate::elf;
use crate::error::HostError;
use crate::guest_image::{self, GuestImage, MEMHOG};
use crate::initramfs::{Archive, add_skeleton, memory_file};
use crate::kernel::Kernel;
use crate::libraries::{program_with_libraries, qemu_with_firmware};
use crate::modules::{ModuleIndex, uncompressed_path};
use crate::programs::{find_agent, find_monitor};
use crate::qemu;

/// Modules that the host loads at start: its own devices, and KVM for guests.
const MODULES: [&str; 4] = ["virtio_pci", "virtio_console", "virtio_blk", "kvm_amd"];
/// Modules that the host loads if the kernel has them: a link between network namespaces, a shaper
/// that slows it down, and tap interfaces of guests.
const NETWORK_MODULES: [&str; 3] = ["veth", "sch_tbf", "tun"];
/// Modules that a host with a root file system on a disk loads: the file system, and what programs
/// that start guests use of the network and of images.
const ROOT_MODULES: [&str; 20] = [
    "ext4",
    "crc32c_generic",
    "loop",
    "af_packet",
    "dummy",
    "bridge",
    "nf_tables",
    "nft_chain_nat",
    "nft_ct",
    "nft_masq",
    "nft_nat",
    "nft_redir",
    "nft_reject_inet",
    "nft_compat",
    "xt_MASQUERADE",
    "xt_conntrack",
    "xt_comment",
    "xt_tcpudp",
    "nft_log",
    "nft_limit",
];
/// Environment variable for a busybox other than `/bin/busybox`.
const BUSYBOX_VARIABLE: &str = "EBB_BUSYBOX";
/// Path of the init's settings.
pub const SETTINGS_PATH: &str = "/etc/ebb/host.json";
/// Page size of x86-64, the unit of a swap area.
const PAGE_BYTES: u64 = 4096;

/// Settings for the host's init.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings {
    /// Paths of the modules to load, in order.
    pub modules: Vec<String>,
    /// Swap device, for example `/dev/vda`.
    pub swap: Option<String>,
    /// Device of the root file system; without one the host stays in memory.
    pub root: Option<String>,
    /// Value for `/sys/kernel/mm/transparent_hugepage/enabled`.
    pub transparent_huge_pages: String,
    /// Number of huge pages of 2 MiB to reserve.
    pub huge_pages: u64,
}

/// The in-memory files that a host boots from.
pub struct BootFiles {
    /// ELF kernel with a PVH entry, or a bzImage if the kernel has none.
    pub kernel: File,
    /// The root file system.
    pub initramfs: File,
}

/// The kernels of a host and of its guests, which may be the same.
#[derive(Debug, Clone)]
pub struct Kernels {
    /// The host's kernel.
    pub host: Kernel,
    /// The guests' kernel.
    pub guests: Kernel,
}

/// Builds the files that a host boots from.
pub fn build(
    config: &HostConfig,
    kernels: &Kernels,
    cache: &Cache,
) -> Result<BootFiles, HostError> {
    let kernel = &kernels.host;
    let for_guests = vmlinux(&kernels.guests.image, cache)?;
    let initramfs = build_initramfs(config, kernels, &for_guests)?;
    let vmlinux =
        if *kernel == kernels.guests { for_guests } else { vmlinux(&kernel.image, cache)? };
    // Decompression in the emulator is slow: an entry after it saves a third of a second.
    let kernel = if elf::has_pvh_entry(&vmlinux) {
        let mut file = memory_file("ebb-host-kernel")?;
        file.write_all(&vmlinux).map_err(HostError::io("cannot write the kernel to memory"))?;
        file
    } else {
        File::open(&kernel.image)
            .map_err(HostError::io(format!("cannot open {}", kernel.image.display())))?
    };
    Ok(BootFiles { kernel, initramfs })
}

fn build_initramfs(
    config: &HostConfig,
    kernels: &Kernels,
    vmlinux: &[u8],
) -> Result<File, HostError> {
    let init = match &config.init {
        Some(path) => path.clone(),
        None => {
            env::current_exe().map_err(HostError::io("cannot find the running program's file"))?
        }
    };
    elf::require_static(&init)?;

    let mut archive = Archive::new(memory_file("ebb-host-initramfs")?);
    add_skeleton(&mut archive)?;
    for directory in ["root", "sbin", "etc/ebb", "var", "mnt"] {
        archive.directory(directory)?;
    }
    archive.copy("init", Some(0o755), &init)?;
    if let Some(monitor) = find_monitor(config.monitor.as_deref()) {
        elf::require_static(&monitor)?;
        archive.copy("bin/ebb", Some(0o755), &monitor)?;
    } else {
        tracing::warn!("no ebb in this program's directory: the virtual host gets no /bin/ebb");
    }
    add_busybox(&mut archive)?;
    archive.file("etc/passwd", 0o644, b"root:x:0:0:root:/root:/bin/sh\n")?;
    archive.file("etc/group", 0o644, b"root:x:0:\n")?;

    let modules = add_modules(&mut archive, &kernels.host, config)?;
    let mut devices = ["/dev/vda", "/dev/vdb"].into_iter().map(str::to_owned);
    let settings = Settings {
        modules,
        swap: (config.swap_mib > 0).then(|| devices.next()).flatten(),
        root: config.root.as_ref().and_then(|_| devices.next()),
        transparent_huge_pages: config.transparent_huge_pages.word().to_owned(),
        huge_pages: config.huge_pages,
    };
    let text = serde_json::to_vec(&settings)
        .map_err(|error| HostError::Protocol(format!("settings of the host: {error}")))?;
    archive.file(SETTINGS_PATH, 0o644, &text)?;

    add_guest_files(&mut archive, config, &kernels.guests, vmlinux)?;
    add_programs(&mut archive, config)?;
    let mut file = archive.finish()?;
    file.rewind().map_err(HostError::io("cannot rewind the initramfs"))?;
    Ok(file)
}

fn add_modules<W: Write>(
    archive: &mut Archive<W>,
    kernel: &Kernel,
    config: &HostConfig,
) -> Result<Vec<String>, HostError> {
    let index = ModuleIndex::read(&kernel.modules)?;
    let mut files = index.load_order(&MODULES)?;
    if config.root.is_some() {
        files.extend(index.load_order(&ROOT_MODULES)?);
    }
    // Only experiments and tests with a network need them, so a custom kernel may lack them.
    files.extend(index.load_order(&NETWORK_MODULES).unwrap_or_default());
    let mut requests: Vec<(String, &str)> = files.into_iter().map(|file| (file, "")).collect();
    for request in &config.modules {
        let (name, parameters) = request.split_once(' ').unwrap_or((request, ""));
        let mut files = index.load_order(&[name])?;
        // Parameters belong to the requested module, not to its dependencies.
        let last = files.pop();
        requests.extend(files.into_iter().map(|file| (file, "")));
        requests.extend(last.map(|file| (file, parameters)));
    }
    let (mut lines, mut added) = (Vec::new(), BTreeSet::new());
    for (file, parameters) in requests {
        let path = format!("/lib/modules/{}/{}", kernel.release, uncompressed_path(&file));
        if added.insert(file.clone()) {
            archive.file(&path, 0o644, &index.content(&file)?)?;
            lines.push(format!("{path} {parameters}").trim_end().to_owned());
        }
    }
    Ok(lines)
}

fn add_guest_files<W: Write>(
    archive: &mut Archive<W>,
    config: &HostConfig,
    kernel: &Kernel,
    vmlinux: &[u8],
) -> Result<(), HostError> {
    archive.copy("ebb/vmlinuz", Some(0o644), &kernel.image)?;
    archive.file("ebb/vmlinux", 0o644, vmlinux)?;
    let Some(agent) = find_agent(config.agent.as_deref()) else {
        tracing::warn!(
            "no ebb-agent in this program's directory: the virtual host gets no /ebb/guest.cpio"
        );
        return Ok(());
    };
    archive.copy("ebb/ebb-agent", Some(0o755), &agent)?;
    let mut image = GuestImage::new(agent, kernel.clone());
    image.memhog = config.memhog;
    image.modules.clone_from(&config.guest_modules);
    image.programs.clone_from(&config.guest_programs);
    archive.file("ebb/guest.cpio", 0o644, &guest_image::build(&image, Vec::new())?)
}

fn add_programs<W: Write>(archive: &mut Archive<W>, config: &HostConfig) -> Result<(), HostError> {
    let mut files = config.files.clone();
    for program in &config.programs {
        files.extend(program_with_libraries(program)?);
    }
    if config.memhog == Inclusion::Included {
        files.extend(program_with_libraries(Path::new(MEMHOG))?);
    }
    if config.qemu == Inclusion::Included {
        files.extend(qemu_with_firmware(&qemu::find()?)?);
    }
    let mut added = BTreeSet::new();
    for file in files {
        if added.insert(file.target.clone()) {
            archive.copy(&file.target, file.mode, &file.source)?;
        }
    }
    Ok(())
}

/// The ELF kernel of a bzImage, extracted once and then cached.
pub fn vmlinux(image: &Path, cache: &Cache) -> Result<Vec<u8>, HostError> {
    let describe = || format!("cannot read {}", image.display());
    let key = Key::new("vmlinux", 1).with_file(image).map_err(HostError::io(describe()))?;
    cache.get_or_make(key, || {
        let content = fs::read(image).map_err(HostError::io(describe()))?;
        extract_vmlinux(&content).map_err(|error| HostError::KernelUnusable {
            path: image.to_owned(),
            reason: error.to_string(),
        })
    })
}

fn add_busybox<W: Write>(archive: &mut Archive<W>) -> Result<(), HostError> {
    let path =
        env::var_os(BUSYBOX_VARIABLE).map_or_else(|| PathBuf::from("/bin/busybox"), PathBuf::from);
    let unusable = |reason: String| HostError::BusyboxUnusable {
        reason: format!("{}: {reason}", path.display()),
    };
    elf::require_static(&path).map_err(|error| match error {
        HostError::InitUnusable { reason, .. } => unusable(reason),
        other => other,
    })?;
    let output = Command::new(&path)
        .arg("--list")
        .stdin(Stdio::null())
        .output()
        .map_err(|error| unusable(error.to_string()))?;
    archive.copy("bin/busybox", Some(0o755), &path)?;
    for applet in String::from_utf8_lossy(&output.stdout).lines() {
        if !applet.is_empty() && applet != "busybox" && applet != "init" && !applet.contains('/') {
            archive.link(format!("bin/{applet}"), "busybox")?;
        }
    }
    Ok(())
}

/// A sparse unnamed file formatted as a swap area of `size_mib`. It is created in `TMPDIR`, else in
/// `/var/tmp`, which is on a disk while `/tmp` may be in memory.
pub fn swap_disk(size_mib: u64) -> Result<File, HostError> {
    let directory = env::var_os("TMPDIR").map_or_else(|| PathBuf::from("/var/tmp"), PathBuf::from);
    let describe =
        || format!("cannot make a swap disk of {size_mib} MiB in {}", directory.display());
    let file = tempfile::tempfile_in(&directory).map_err(HostError::io(describe()))?;
    file.set_len(size_mib << 20).map_err(HostError::io(describe()))?;
    file.write_all_at(&swap_header(size_mib << 20), 0).map_err(HostError::io(describe()))?;
    Ok(file)
}

/// The images of the root file system and of the further disks, in the order of their devices.
pub fn disks(config: &HostConfig) -> Result<Vec<File>, HostError> {
    let open = |path: &PathBuf| {
        File::open(path).map_err(HostError::io(format!("cannot open {}", path.display())))
    };
    config.root.iter().chain(&config.disks).map(open).collect()
}

/// First page of a swap area (Linux include/linux/swap.h, `union swap_header`): version 1, the
/// number of the last page, no bad pages, and the signature in the last ten bytes.
fn swap_header(size_bytes: u64) -> Vec<u8> {
    let mut page = vec![0_u8; PAGE_BYTES as usize];
    page[1024..1028].copy_from_slice(&1_u32.to_le_bytes());
    page[1028..1032].copy_from_slice(&((size_bytes / PAGE_BYTES - 1) as u32).to_le_bytes());
    page[PAGE_BYTES as usize - 10..].copy_from_slice(b"SWAPSPACE2");
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_swap_header_has_the_format_of_linux() {
        let page = swap_header(1 << 30);
        assert_eq!(page.len(), 4096);
        assert_eq!(page[1028..1032], ((1_u32 << 18) - 1).to_le_bytes());
        assert!(page.ends_with(b"SWAPSPACE2"));
    }

    #[test]
    fn a_swap_disk_is_sparse() {
        use std::os::unix::fs::MetadataExt;
        let metadata = swap_disk(256).unwrap().metadata().unwrap();
        assert_eq!(metadata.len(), 256 << 20);
        assert!(metadata.blocks() * 512 < 1 << 20);
        assert_eq!(metadata.nlink(), 0);
    }
}
