//! Tap interfaces (Linux Documentation/networking/tuntap.rst).

use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt as _;

use rustix::net::{AddressFamily, SocketType, netdevice, socket};
use virtio_bindings::virtio_net as net;

use super::error::NetError;
use super::parts::Port;

/// Size of the header before each frame, in bytes (virtio 1.3 section 5.1.6, without hash report).
pub(super) const HEADER_BYTES: usize = 12;
/// Offloads of frames to the guest (Linux include/uapi/linux/if_tun.h, `TUN_F_*`), with the
/// features that stand for them.
const OFFLOADS: [(u32, u32); 7] = [
    (net::VIRTIO_NET_F_GUEST_CSUM, 0x01),
    (net::VIRTIO_NET_F_GUEST_TSO4, 0x02),
    (net::VIRTIO_NET_F_GUEST_TSO6, 0x04),
    (net::VIRTIO_NET_F_GUEST_ECN, 0x08),
    (net::VIRTIO_NET_F_GUEST_UFO, 0x10),
    (net::VIRTIO_NET_F_GUEST_USO4, USO4),
    (net::VIRTIO_NET_F_GUEST_USO6, USO6),
];
/// Of Linux 6.2.
const USO4: u32 = 0x20;
const USO6: u32 = 0x40;
/// Those that every kernel in use has.
const USUAL: u32 = 0x1f;
/// `TUNSETOFFLOAD`: `_IOW('T', 208, unsigned int)`.
pub(crate) const TUNSETOFFLOAD: u64 = 0x4004_54d0;
/// `TUNSETVNETHDRSZ`: `_IOW('T', 216, int)`.
pub(crate) const TUNSETVNETHDRSZ: u64 = 0x4004_54d8;
/// `TUNSETIFF`: `_IOW('T', 202, int)`.
const TUNSETIFF: u64 = 0x4004_54ca;
/// `TUNGETIFF`: `_IOR('T', 210, unsigned int)`.
pub(crate) const TUNGETIFF: u64 = 0x8004_54d2;

/// A tap interface.
pub(super) struct Tap {
    pub(super) port: Port,
    /// Offloads that the host's kernel has; none for the stand-ins of tests.
    offloads: u32,
    /// Those that are on.
    on: u32,
}

/// A request for an interface (`struct ifreq`, netdevice(7)).
fn request(name: &str, flags: libc::c_int) -> libc::ifreq {
    let mut ifr_name = [0; libc::IFNAMSIZ];
    for (to, from) in ifr_name.iter_mut().take(libc::IFNAMSIZ - 1).zip(name.bytes()) {
        *to = from.cast_signed();
    }
    let ifr_ifru = libc::__c_anonymous_ifr_ifru { ifru_flags: flags as libc::c_short };
    libc::ifreq { ifr_name, ifr_ifru }
}

fn ioctl_request(fd: BorrowedFd<'_>, number: u64, request: &mut libc::ifreq) -> io::Result<()> {
    // SAFETY: both calls with a `struct ifreq` read and write it and nothing else; it is borrowed.
    match unsafe { libc::ioctl(fd.as_raw_fd(), number, std::ptr::from_mut(request)) } {
        0.. => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn set_offload(fd: BorrowedFd<'_>, offloads: u32) -> io::Result<()> {
    // SAFETY: the argument is a number; no memory is accessed.
    match unsafe { libc::ioctl(fd.as_raw_fd(), TUNSETOFFLOAD, libc::c_ulong::from(offloads)) } {
        0.. => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn set_header_bytes(fd: BorrowedFd<'_>) -> io::Result<()> {
    let size = HEADER_BYTES as libc::c_int;
    // SAFETY: the call reads the number that the pointer names, which lives until it returns.
    match unsafe { libc::ioctl(fd.as_raw_fd(), TUNSETVNETHDRSZ, &raw const size) } {
        0.. => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

impl Tap {
    /// Opens the interface `name`, which exists.
    pub(super) fn open(name: &str) -> Result<Self, NetError> {
        use std::os::fd::AsFd as _;
        let failed = |action| {
            move |source| NetError::Failed { backend: format!("tap={name}"), action, source }
        };
        // The kernel would create an interface for a user who may do that.
        let names = socket(AddressFamily::INET, SocketType::DGRAM, None)
            .map_err(|error| failed("look up its name")(error.into()))?;
        if netdevice::name_to_index(&names, name).is_err() {
            return Err(NetError::NoInterface { name: name.to_owned() });
        }
        let tun = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_NONBLOCK)
            .open("/dev/net/tun")
            .map_err(|source| NetError::NoTun { name: name.to_owned(), source })?;
        let mut request = request(name, libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR);
        ioctl_request(tun.as_fd(), TUNSETIFF, &mut request).map_err(|error| {
            let name = name.to_owned();
            match error.raw_os_error() {
                Some(libc::EBUSY) => NetError::InUse { name },
                Some(libc::EPERM | libc::EACCES) => NetError::NoRights { name },
                Some(libc::EINVAL) => NetError::NotTap { name },
                _ => failed("attach to it")(error),
            }
        })?;
        Self::prepare(tun.into()).map_err(failed("set up its header"))
    }

    /// Uses a descriptor that another program has opened and attached. An error describes what is
    /// wrong with it.
    pub(super) fn adopt(fd: OwnedFd) -> Result<Self, String> {
        use std::os::fd::AsFd as _;
        let mut found = request("", 0);
        ioctl_request(fd.as_fd(), TUNGETIFF, &mut found)
            .map_err(|error| format!("it is no tap interface ({error})"))?;
        // SAFETY: the call has filled in the flags, and any bits are valid.
        let flags = libc::c_int::from(unsafe { found.ifr_ifru.ifru_flags });
        let wanted = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
        if flags & wanted != wanted || flags & libc::IFF_TUN != 0 {
            return Err("it is an interface of another kind".to_owned());
        }
        rustix::io::ioctl_fionbio(&fd, true)
            .map_err(io::Error::from)
            .and_then(|()| Self::prepare(fd))
            .map_err(|error| error.to_string())
    }

    fn prepare(fd: OwnedFd) -> io::Result<Self> {
        use std::os::fd::AsFd as _;
        set_header_bytes(fd.as_fd())?;
        let all = USUAL | USO4 | USO6;
        let offloads = [all, USUAL].into_iter().find(|all| set_offload(fd.as_fd(), *all).is_ok());
        // No frame must be in the interface that a driver does not understand.
        set_offload(fd.as_fd(), 0)?;
        Ok(Self { port: Port::Open(fd.into()), offloads: offloads.unwrap_or(0), on: 0 })
    }

    /// A stand-in for an interface, without offloads.
    #[cfg(any(test, feature = "testing"))]
    pub(super) fn over(port: Port) -> Self {
        Self { port, offloads: 0, on: 0 }
    }

    /// The offload features of the device.
    pub(super) fn features(&self) -> u64 {
        let bit = |feature: u32| 1_u64 << feature;
        if self.offloads == 0 {
            return 0;
        }
        // Of frames from the guest, the kernel takes any kind that it can also give.
        let from_guest = [
            net::VIRTIO_NET_F_CSUM,
            net::VIRTIO_NET_F_HOST_TSO4,
            net::VIRTIO_NET_F_HOST_TSO6,
            net::VIRTIO_NET_F_HOST_ECN,
            net::VIRTIO_NET_F_HOST_UFO,
        ];
        let mut features = from_guest.into_iter().map(bit).sum::<u64>();
        if self.offloads & USO4 != 0 {
            features |= bit(net::VIRTIO_NET_F_HOST_USO);
        }
        let to_guest = OFFLOADS.into_iter().filter(|(_, offload)| self.offloads & offload != 0);
        features | to_guest.map(|(feature, _)| bit(feature)).sum::<u64>()
    }

    /// Gives the guest frames of the kinds that its driver has negotiated.
    pub(super) fn set_features(&mut self, features: u64) -> io::Result<()> {
        use std::os::fd::AsFd as _;
        let wanted = OFFLOADS.into_iter().filter(|(feature, _)| features & 1 << feature != 0);
        let wanted = wanted.map(|(_, offload)| offload).sum::<u32>() & self.offloads;
        if wanted == self.on {
            return Ok(());
        }
        if let Some(fd) = self.port.fd() {
            set_offload(fd.as_fd(), wanted)?;
        }
        self.on = wanted;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_what_to_do() {
        let error = |name| Tap::open(name).err().unwrap().to_string();
        assert!(error("ebb-no-tap").contains("ip tuntap add dev ebb-no-tap mode tap user"));
        let not_tap = error("lo");
        // Without /dev/net/tun or the rights to use it, those are reported.
        assert!(["not a tap", "/dev/net/tun", "no right"].iter().any(|it| not_tap.contains(it)));
        let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        assert!(Tap::adopt(socket.into()).err().unwrap().contains("no tap interface"));
    }
}
