//! Addresses of the guest's network interfaces.
//!
//! A driver reads its device's address once. So a machine that was made from a checkpoint, whose
//! devices have addresses of their own, keeps using the former ones until it is told.

use std::ffi::CString;
use std::fs;
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::net::UnixDatagram;
use std::path::Path;

use crate::wire::NewMac;

/// Where Linux shows network interfaces.
const INTERFACES: &str = "/sys/class/net";

/// Gives each interface that has the old address the new one. Others were given an address by the
/// guest, and keep it.
///
/// # Errors
/// Those of reading the interfaces, and of ioctl(2).
pub(crate) fn give(macs: &[NewMac]) -> io::Result<()> {
    if macs.is_empty() {
        return Ok(());
    }
    for (name, old) in find(Path::new(INTERFACES))? {
        if let Some(mac) = macs.iter().find(|mac| mac.old == old) {
            set(&name, mac.new)?;
        }
    }
    Ok(())
}

/// All interfaces of Ethernet with their addresses.
fn find(interfaces: &Path) -> io::Result<Vec<(String, [u8; 6])>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(interfaces)? {
        let entry = entry?;
        // Files that are no interface (bonding_masters) have no address.
        let Ok(text) = fs::read_to_string(entry.path().join("address")) else { continue };
        let Ok(name) = entry.file_name().into_string() else { continue };
        found.extend(parse(text.trim_end()).map(|mac| (name, mac)));
    }
    Ok(found)
}

fn parse(text: &str) -> Option<[u8; 6]> {
    let parts = text.split(':').map(|part| u8::from_str_radix(part, 16).ok());
    parts.collect::<Option<Vec<u8>>>()?.try_into().ok()
}

/// `SIOCSIFHWADDR` (netdevice(7)).
fn set(name: &str, mac: [u8; 6]) -> io::Result<()> {
    let name = CString::new(name)?;
    let name = name.as_bytes_with_nul();
    // SAFETY: the structure consists of numbers, for which zero is a value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if name.len() > request.ifr_name.len() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name) {
        *to = from.cast_signed();
    }
    let mut address = libc::sockaddr { sa_family: libc::ARPHRD_ETHER, sa_data: [0; 14] };
    for (to, from) in address.sa_data.iter_mut().zip(mac) {
        *to = from.cast_signed();
    }
    request.ifr_ifru.ifru_hwaddr = address;
    let socket = UnixDatagram::unbound()?;
    // SAFETY: the call reads the structure, whose name ends with zero, while it is borrowed.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), SIOCSIFHWADDR, &raw const request) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Linux include/uapi/linux/sockios.h.
const SIOCSIFHWADDR: libc::c_ulong = 0x8924;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interfaces_of_ethernet_are_found_with_their_addresses() {
        let directory = tempfile::tempdir().unwrap();
        let interface = |name: &str, address: &str| {
            let path = directory.path().join(name);
            fs::create_dir(&path).unwrap();
            fs::write(path.join("address"), address).unwrap();
        };
        interface("eth0", "02:00:00:00:0a:ff\n");
        interface("ib0", "80:00:00:48:fe:80:00:00:00:00:00:00:00:02:c9:03:00:07:7e:f1\n");
        interface("tun0", "\n");
        fs::write(directory.path().join("bonding_masters"), "").unwrap();
        let expected = vec![("eth0".to_owned(), [2, 0, 0, 0, 10, 255])];
        assert_eq!(find(directory.path()).unwrap(), expected);
        assert!(find(&directory.path().join("none")).is_err());
    }

    #[test]
    fn an_interface_that_does_not_exist_is_an_error() {
        assert!(set("ebb-none", [2; 6]).is_err());
        assert!(set("a-name-that-is-too-long", [2; 6]).is_err());
    }
}
