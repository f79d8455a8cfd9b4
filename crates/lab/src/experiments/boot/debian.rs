//! The time until a Debian guest answers ssh.

use std::io::Read as _;
use std::net::{SocketAddr, TcpStream};
use std::thread;
use std::time::Duration;

use crate::LabError;
use crate::harness::devices::{Device, HostCache, QemuEngine};
use crate::harness::disk_image::copy;
use crate::harness::size::GuestSize;
use crate::harness::tap::{GUEST, Tap};
use crate::harness::testbed::Testbed;
use crate::report::results::GuestRecord;

/// Port of ssh.
const PORT: u16 = 22;
/// What every server of ssh says first (RFC 4253 section 4.2).
const BANNER: &[u8] = b"SSH-2.0-";
/// Interval of attempts to connect; each waits for so long, too.
const RETRY: Duration = Duration::from_millis(20);
/// Time in which a server that was reached says something.
const SILENCE_LIMIT: Duration = Duration::from_secs(30);
/// Boots a Debian guest from a new copy of its root; returns its record, and the seconds from the
/// start of the monitor to ssh's first word.
pub(super) fn boot(
    testbed: &mut Testbed<'_>,
    size: GuestSize,
) -> Result<(GuestRecord, f64), LabError> {
    let _tap = Tap::new()?;
    let image = tempfile::NamedTempFile::new().map_err(LabError::of_file(std::env::temp_dir()))?;
    let root = testbed.debian_root()?;
    copy(root, image.as_file()).map_err(LabError::of_file(root))?;
    let disk =
        Device::Disk { path: image.path(), cache: HostCache::Used, engine: QemuEngine::Threads };
    let started =
        testbed.start_silent_guest(size, &[disk, Tap::DEVICE], "answer of its ssh server", || {
            let answers = is_ssh(SocketAddr::from((GUEST, PORT)));
            if !answers {
                thread::sleep(RETRY);
            }
            answers
        });
    let (record, took) = started?;
    testbed.end_guest(record.guest);
    Ok((record, took.as_secs_f64()))
}

/// Whether a server of ssh answers there.
fn is_ssh(address: SocketAddr) -> bool {
    let Ok(mut stream) = TcpStream::connect_timeout(&address, RETRY) else { return false };
    let mut first = [0; BANNER.len()];
    let _ = stream.set_read_timeout(Some(SILENCE_LIMIT));
    stream.read_exact(&mut first).is_ok() && first == BANNER
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;
    use std::net::TcpListener;

    #[test]
    fn servers_of_ssh_are_told_from_others() {
        for (text, expected) in [("SSH-2.0-OpenSSH_9.2\r\n", true), ("HTTP/1.1 400\r\n", false)] {
            let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
            let address = listener.local_addr().unwrap();
            let server = thread::spawn(move || {
                listener.accept().unwrap().0.write_all(text.as_bytes()).unwrap();
            });
            assert_eq!(is_ssh(address), expected);
            server.join().unwrap();
            assert!(!is_ssh(address));
        }
    }
}
