//! Devices that a guest has besides its balloon, under either monitor.

use std::path::Path;

use crate::harness::monitor::MonitorKind;

/// A device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Device<'a> {
    /// A disk over a file or block device.
    Disk {
        /// The file or device.
        path: &'a Path,
        /// Whether the host's page cache is used.
        cache: HostCache,
        /// How QEMU executes requests.
        engine: QemuEngine,
    },
    /// A disk that several guests read, past the host's page cache, which would count as memory of
    /// the guests.
    SharedDisk {
        /// The file or device.
        path: &'a Path,
    },
    /// A network device over a tap interface, which exists.
    Tap {
        /// Name of the interface.
        name: &'a str,
        /// The guest's MAC address.
        mac: &'a str,
    },
}

/// Whether a disk's requests pass through the host's page cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HostCache {
    /// They do: the default of both monitors.
    Used,
    /// They do not: `direct=on`, `cache=none`.
    Bypassed,
}

/// How QEMU executes the requests of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QemuEngine {
    /// By threads, its default.
    Threads,
    /// By io_uring.
    IoUring,
}

impl Device<'_> {
    /// The arguments of a monitor that has it.
    pub fn arguments(&self, monitor: MonitorKind) -> Vec<String> {
        match (monitor, self) {
            (MonitorKind::Ebb, Self::Disk { path, cache, .. }) => {
                let direct = if *cache == HostCache::Bypassed { ",direct=on" } else { "" };
                vec!["--disk".to_owned(), format!("path={}{direct}", path.display())]
            }
            (MonitorKind::Ebb, Self::SharedDisk { path }) => {
                let disk = format!("path={},readonly=on,direct=on", path.display());
                vec!["--disk".to_owned(), disk]
            }
            (MonitorKind::Qemu, Self::SharedDisk { path }) => {
                let drive = format!(
                    "file={},if=none,id=disk,format=raw,readonly=on,cache=none,file.locking=off",
                    path.display()
                );
                ["-drive", &drive, "-device", "virtio-blk-pci,drive=disk"].map(str::to_owned).into()
            }
            (MonitorKind::Ebb, Self::Tap { name, mac }) => {
                vec!["--net".to_owned(), format!("tap={name},mac={mac}")]
            }
            (MonitorKind::Qemu, Self::Disk { path, cache, engine }) => {
                let cache = if *cache == HostCache::Bypassed { "none" } else { "writeback" };
                let aio = if *engine == QemuEngine::IoUring { "io_uring" } else { "threads" };
                let drive = format!(
                    "file={},if=none,id=disk,format=raw,cache={cache},aio={aio}",
                    path.display()
                );
                ["-drive", &drive, "-device", "virtio-blk-pci,drive=disk"].map(str::to_owned).into()
            }
            (MonitorKind::Qemu, Self::Tap { name, mac }) => {
                // Without firmware to boot from, which no guest here does.
                let tap = format!("tap,id=net,ifname={name},script=no,downscript=no,vhost=off");
                let device = format!("virtio-net-pci,netdev=net,romfile=,mac={mac}");
                ["-netdev", &tap, "-device", &device].map(str::to_owned).into()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_monitors_get_the_same_devices() {
        let disk = |cache, engine| Device::Disk { path: Path::new("/dev/nullb0"), cache, engine };
        let line = |device: Device<'_>, monitor| device.arguments(monitor).join(" ");
        let cached = disk(HostCache::Used, QemuEngine::Threads);
        assert_eq!(line(cached, MonitorKind::Ebb), "--disk path=/dev/nullb0");
        assert!(line(cached, MonitorKind::Qemu).contains(",cache=writeback,aio=threads -device"));
        let direct = disk(HostCache::Bypassed, QemuEngine::IoUring);
        assert_eq!(line(direct, MonitorKind::Ebb), "--disk path=/dev/nullb0,direct=on");
        assert!(line(direct, MonitorKind::Qemu).contains(",cache=none,aio=io_uring -device"));
        let shared = Device::SharedDisk { path: Path::new("/root.ext4") };
        let ebb = "--disk path=/root.ext4,readonly=on,direct=on";
        assert_eq!(line(shared, MonitorKind::Ebb), ebb);
        assert!(line(shared, MonitorKind::Qemu).contains(",readonly=on,cache=none,"));
        let tap = Device::Tap { name: "tap0", mac: "02:00:00:00:00:01" };
        assert_eq!(line(tap, MonitorKind::Ebb), "--net tap=tap0,mac=02:00:00:00:00:01");
        assert!(line(tap, MonitorKind::Qemu).contains(",vhost=off -device virtio-net-pci,"));
    }
}
