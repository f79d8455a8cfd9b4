//! Random numbers of machines that come from one snapshot.
//!
//! A kernel with a driver for the VM generation id knows when its machine was restored. For others,
//! this keeps a connection to the monitor's source of random bytes, which a restore resets: the
//! kernel gets fresh bytes, and makes a new key from them (random(4)).

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::thread;
use std::time::Duration;

use vsock::{VMADDR_CID_HOST, VsockStream};

use crate::wire::RANDOM_PORT;

/// Length of what the monitor sends.
const RANDOM_BYTES: usize = 32;
/// Attempts to connect, while the driver starts or the machine is being restored.
const ATTEMPTS: u32 = 20;
const RETRY: Duration = Duration::from_millis(250);

/// `RNDADDENTROPY` and `RNDRESEEDCRNG` (Linux include/uapi/linux/random.h).
const ADD_ENTROPY: libc::c_ulong = 0x4008_5203;
const RESEED: libc::c_ulong = 0x5207;

/// `struct rand_pool_info` (Linux include/uapi/linux/random.h).
#[repr(C)]
struct PoolInfo {
    entropy_bits: libc::c_int,
    bytes: libc::c_int,
    data: [u8; RANDOM_BYTES],
}

/// Starts the thread, which ends with a monitor that has no such source.
///
/// # Errors
/// The thread cannot be started.
pub fn spawn() -> io::Result<()> {
    thread::Builder::new().name("reseed".to_owned()).spawn(|| {
        while let Some((mut stream, data)) = connect() {
            say(&match reseed(data) {
                Ok(()) => "random numbers reseeded from the host".to_owned(),
                Err(error) => format!("cannot reseed random numbers: {error}"),
            });
            // Nothing more comes until the connection is reset.
            while matches!(stream.read(&mut [0]), Ok(length) if length > 0) {}
        }
    })?;
    Ok(())
}

/// A connection, and the bytes that came over it.
fn connect() -> Option<(VsockStream, [u8; RANDOM_BYTES])> {
    for _ in 0..ATTEMPTS {
        let mut data = [0; RANDOM_BYTES];
        let connected = VsockStream::connect_with_cid_port(VMADDR_CID_HOST, RANDOM_PORT);
        let received = connected.and_then(|mut stream| {
            stream.read_exact(&mut data)?;
            Ok(stream)
        });
        if let Ok(stream) = received {
            return Some((stream, data));
        }
        thread::sleep(RETRY);
    }
    None
}

/// Gives the kernel these bytes, and has it make a new key.
///
/// # Errors
/// Those of open(2) and ioctl(2).
pub(crate) fn reseed(data: [u8; RANDOM_BYTES]) -> io::Result<()> {
    let random = OpenOptions::new().write(true).open("/dev/urandom")?;
    let length = RANDOM_BYTES as libc::c_int;
    let info = PoolInfo { entropy_bits: length * 8, bytes: length, data };
    // SAFETY: the call reads the structure, whose length is in it, while it is borrowed.
    let added = unsafe { libc::ioctl(random.as_raw_fd(), ADD_ENTROPY, &raw const info) };
    if added != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call has no argument.
    if unsafe { libc::ioctl(random.as_raw_fd(), RESEED) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Writes to the kernel's log, beside what its own driver would say.
fn say(text: &str) {
    let line = format!("ebb-guest-agent: {text}\n");
    let logged = File::options().write(true).open("/dev/kmsg");
    if logged.and_then(|mut log| log.write_all(line.as_bytes())).is_err() {
        eprint!("{line}");
    }
}
