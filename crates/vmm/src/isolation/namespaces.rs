//! Namespaces and the empty file system.

use std::io;
use std::path::Path;

use rustix::io::Errno;
use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags};
use rustix::thread::UnshareFlags;

/// The namespaces that the process has entered.
#[derive(Debug)]
pub(super) struct Namespaces {
    flags: UnshareFlags,
}

const NAMES: [(UnshareFlags, &str); 5] = [
    (UnshareFlags::NEWUSER, "user"),
    (UnshareFlags::NEWNS, "mnt"),
    (UnshareFlags::NEWNET, "net"),
    (UnshareFlags::NEWIPC, "ipc"),
    (UnshareFlags::NEWUTS, "uts"),
];

impl Namespaces {
    /// Moves the process, which must have one thread, into new namespaces: with a user namespace
    /// where it is not root. Mounts and file systems are those of the host still.
    pub(super) fn enter() -> io::Result<Self> {
        let (uid, gid) = (rustix::process::geteuid(), rustix::process::getegid());
        let mut flags = UnshareFlags::NEWNS
            | UnshareFlags::NEWNET
            | UnshareFlags::NEWIPC
            | UnshareFlags::NEWUTS;
        if !uid.is_root() {
            flags |= UnshareFlags::NEWUSER;
        }
        // SAFETY: descriptors stay shared (no `FILES`), which is what the function asks for.
        unsafe { rustix::thread::unshare_unsafe(flags) }?;
        if !uid.is_root() {
            // Without this, the ids of its files would be unknown (user_namespaces(7)).
            let (uid, gid) = (uid.as_raw(), gid.as_raw());
            std::fs::write("/proc/self/setgroups", "deny")?;
            std::fs::write("/proc/self/uid_map", format!("{uid} {uid} 1"))?;
            std::fs::write("/proc/self/gid_map", format!("{gid} {gid} 1"))?;
        }
        let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
        rustix::mount::mount_change("/", private)?;
        Ok(Self { flags })
    }

    /// Names in /proc/PID/ns.
    pub(super) fn names(&self) -> Vec<&'static str> {
        let entered = NAMES.iter().filter(|(flag, _)| self.flags.contains(*flag));
        entered.map(|(_, name)| *name).collect()
    }

    /// Replaces the root by an empty read-only one for all threads of the process. Open files stay
    /// open.
    pub(super) fn empty_root() -> io::Result<()> {
        const PLACES: [&str; 4] = ["/proc", "/tmp", "/run", "/var"];
        let place = PLACES.into_iter().find(|place| Path::new(place).is_dir());
        let place = place.ok_or_else(|| io::Error::other("there is no directory to mount on"))?;
        let flags =
            MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
        rustix::mount::mount(
            "none",
            place,
            "tmpfs",
            flags,
            Some(c"size=4k,nr_inodes=1,mode=0555"),
        )?;
        rustix::process::chdir(place)?;
        // The old root is then mounted on the new one, and is removed (pivot_root(2), "NOTES").
        match rustix::process::pivot_root(".", ".") {
            Ok(()) => rustix::mount::unmount(".", UnmountFlags::DETACH)?,
            // The host runs from its initial RAM file system, which cannot be unmounted; it is
            // covered (Linux Documentation/filesystems/ramfs-rootfs-initramfs.rst).
            Err(Errno::INVAL) => {
                rustix::mount::mount_move(".", "/")?;
                rustix::process::chroot(".")?;
            }
            Err(error) => return Err(error.into()),
        }
        rustix::process::chdir("/")?;
        Ok(())
    }
}
