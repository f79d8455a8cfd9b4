//! The kernel's log from its ring buffer, including messages that `quiet` hides from the console.

use std::io;

/// Text of the whole ring buffer. Needs CAP_SYSLOG if `kernel.dmesg_restrict` is set.
pub fn read() -> io::Result<String> {
    let size = syslog(SYSLOG_ACTION_SIZE_BUFFER, &mut [])?;
    let mut buffer = vec![0; size];
    let length = syslog(SYSLOG_ACTION_READ_ALL, &mut buffer)?;
    buffer.truncate(length);
    Ok(String::from_utf8_lossy(&buffer).into_owned())
}

/// Actions of syslog(2), from its manual page.
const SYSLOG_ACTION_READ_ALL: libc::c_int = 3;
const SYSLOG_ACTION_SIZE_BUFFER: libc::c_int = 10;

fn syslog(action: libc::c_int, buffer: &mut [u8]) -> io::Result<usize> {
    let length = libc::c_int::try_from(buffer.len()).unwrap_or(libc::c_int::MAX);
    // SAFETY: the kernel writes at most `length` bytes to the buffer, which is at least as long and
    // lives until the call returns.
    let result = unsafe { libc::klogctl(action, buffer.as_mut_ptr().cast(), length) };
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}
