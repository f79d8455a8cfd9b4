//! Finding or creating the files for guests.

use std::env;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use ebb_virtual_host::cache::Cache;
use ebb_virtual_host::debian::{self, GuestFiles};
use ebb_virtual_host::guest_image::{self, GuestImage};
use ebb_virtual_host::kernel::Kernel;
use ebb_virtual_host::{HostError, Inclusion, balloon_module, programs, vmlinux};

use crate::LabError;
use crate::harness::experiment::{Needed, Needs};
use crate::harness::monitor::{Assets, Presence, WorkDisks};

/// Name of the peer's program.
const QEMU: &str = "qemu-system-x86_64";

/// Where the virtual host has the kernel of a Debian guest; its root is the last disk.
pub const DEBIAN_KERNEL: &str = "/ebb/debian-vmlinux";

/// Assets, and their directory if they were created for this run.
#[derive(Debug)]
pub struct FoundAssets {
    /// The files.
    pub assets: Assets,
    /// Removed with its content when dropped.
    _directory: Option<tempfile::TempDir>,
}

impl FoundAssets {
    /// The files at fixed paths in the virtual host.
    ///
    /// # Errors
    /// [`LabError::MissingFile`] when one of them is missing.
    pub fn in_virtual_host() -> Result<Self, LabError> {
        let present = |what, path: &str| {
            let path = PathBuf::from(path);
            if path.is_file() {
                return Ok(path);
            }
            let remedy = "the virtual host has it if ebb and ebb-agent are in the directory of \
                          ebb-lab";
            Err(LabError::MissingFile { what, path, remedy })
        };
        let elf = PathBuf::from("/ebb/vmlinux");
        let assets = Assets {
            ebb: present("the monitor", "/bin/ebb")?,
            qemu: find_qemu(),
            bzimage: present("the guest's kernel", "/ebb/vmlinuz")?,
            elf: elf.is_file().then_some(elf),
            initrd: present("the guest's initramfs", "/ebb/guest.cpio")?,
            // The outer run omits series that need it if it is missing.
            module: Presence::Present,
            debian: Some(GuestFiles { kernel: DEBIAN_KERNEL.into(), root: last_disk() })
                .filter(|files| files.kernel.is_file()),
            work_disks: WorkDisks::Fresh(disks_after_swap()),
        };
        Ok(Self { assets, _directory: None })
    }

    /// The machine's own kernel package, and an initramfs created for this run.
    ///
    /// # Errors
    /// [`LabError::VirtualHost`] when there is no kernel or its modules, [`LabError::MissingFile`]
    /// without an agent.
    pub fn on_this_machine(needs: Needs) -> Result<Self, LabError> {
        let directory = tempfile::tempdir().map_err(LabError::of_file(env::temp_dir()))?;
        let BootFiles { kernel, initrd, module } = BootFiles::write_to(directory.path(), needs)?;
        let elf = directory.path().join("vmlinux");
        fs::write(&elf, vmlinux(&kernel.image, &Cache::of_user())?)
            .map_err(LabError::of_file(&elf))?;
        let ebb = programs::find_monitor(None).ok_or_else(|| LabError::MissingFile {
            what: "the monitor",
            path: PathBuf::from("ebb"),
            remedy: "build it (cargo build -p ebb) into the directory of ebb-lab, or name it in \
                     EBB_MONITOR",
        })?;
        let assets = Assets {
            ebb,
            qemu: find_qemu(),
            bzimage: kernel.image,
            elf: Some(elf),
            initrd,
            module,
            debian: debian::guest_files(&Cache::of_user()),
            work_disks: debian::work_root(&Cache::of_user())
                .map_or(WorkDisks::None, WorkDisks::Copies),
        };
        Ok(Self { assets, _directory: Some(directory) })
    }
}

/// What a guest boots.
#[derive(Debug)]
pub struct BootFiles {
    /// The machine's own kernel package.
    pub kernel: Kernel,
    /// The initramfs with the agent.
    pub initrd: PathBuf,
    /// Whether the initramfs has the module `ebb_balloon`.
    pub module: Presence,
}

impl BootFiles {
    /// Finds the kernel and writes an initramfs to `directory`.
    ///
    /// # Errors
    /// [`LabError::VirtualHost`] when there is no kernel or its modules, [`LabError::MissingFile`]
    /// without an agent.
    pub fn write_to(directory: &Path, needs: Needs) -> Result<Self, LabError> {
        let kernel = Kernel::find(None)?;
        let agent = programs::find_agent(None).ok_or_else(|| LabError::MissingFile {
            what: "the guest agent",
            path: PathBuf::from("ebb-agent"),
            remedy: "build it (cargo build -p ebb-agent) into the directory of ebb-lab, or name it \
                     in EBB_AGENT",
        })?;
        let initrd = directory.join("guest.cpio");
        let file = File::create(&initrd).map_err(LabError::of_file(&initrd))?;
        let mut image = GuestImage::new(agent, kernel.clone());
        image.memhog = memhog_here(needs);
        image.modules = needs.guest_modules.iter().map(|name| (*name).to_owned()).collect();
        image.programs = Needed::paths(needs.guest_programs)?;
        let module = presence(image.balloon_module.is_some());
        guest_image::build(&image, file)?;
        Ok(Self { kernel, initrd, module })
    }
}

/// The last disk of this virtual host, after swap.
fn last_disk() -> PathBuf {
    let devices = ["/dev/vdb", "/dev/vda"].map(PathBuf::from);
    devices.into_iter().find(|device| device.exists()).unwrap_or_default()
}

/// The disks of this virtual host after the first one, which is swap.
fn disks_after_swap() -> Vec<PathBuf> {
    let devices = ('b'..='z').map(|letter| PathBuf::from(format!("/dev/vd{letter}")));
    devices.take_while(|device| device.exists()).collect()
}

fn presence(is_there: bool) -> Presence {
    if is_there { Presence::Present } else { Presence::Absent }
}

/// Whether the module `ebb_balloon` was built for the guests' kernel, and so is in their image.
///
/// # Errors
/// [`LabError::VirtualHost`] when there is no kernel.
pub fn module_here() -> Result<Presence, LabError> {
    Ok(presence(balloon_module::find(None, &Kernel::find(None)?.release).is_some()))
}

/// QEMU, if installed.
pub fn find_qemu() -> Option<PathBuf> {
    find_program(QEMU)
}

/// A program in `PATH`.
fn find_program(name: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH")?;
    env::split_paths(&path).map(|directory| directory.join(name)).find(|program| program.is_file())
}

/// Debian's memhog, if it is needed and this machine has it; otherwise the agent's own does the
/// same.
pub fn memhog_here(needs: Needs) -> Inclusion {
    let is_here = needs.memhog && Path::new(guest_image::MEMHOG).is_file();
    if is_here { Inclusion::Included } else { Inclusion::Excluded }
}

impl From<HostError> for LabError {
    fn from(error: HostError) -> Self {
        Self::VirtualHost(Box::new(error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_found_in_the_path() {
        assert!(find_program("sh").unwrap().ends_with("sh"));
        assert_eq!(find_program("no-such-program-anywhere"), None);
    }
}
