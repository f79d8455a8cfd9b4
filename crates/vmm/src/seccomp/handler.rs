//! Companions of a filter: a thread drops its capabilities, and when the filter refuses a call, for
//! which the kernel sends SIGSYS, a handler prints the call.

use std::cell::Cell;
use std::io;
use std::num::NonZero;
use std::sync::Once;

use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};

/// Exit code of a process that its filter stopped: 128 + SIGSYS, as a shell reports a death by that
/// signal.
pub const EXIT_CODE: i32 = 128 + libc::SIGSYS;

static INSTALLED: Once = Once::new();

/// Longest name of a thread, with its NUL (prctl(2), `PR_SET_NAME`).
const NAME_BYTES: usize = 16;

thread_local! {
    /// Name of the thread when its filter was installed. Threads that it starts have none.
    static NAME: Cell<[u8; NAME_BYTES]> = const { Cell::new([0; NAME_BYTES]) };
}

/// Drops every capability of the calling thread. Capabilities are per thread: each thread of the
/// monitor does this when it starts, the main thread once everything is open.
pub(super) fn drop_all() -> io::Result<()> {
    let empty = CapabilitySet::empty();
    set_capabilities(
        None,
        CapabilitySets { effective: empty, permitted: empty, inheritable: empty },
    )?;
    Ok(())
}

/// Sets the allocator's limit of arenas to glibc's default for this number of processors. Without a
/// limit, glibc reads that number from a file when a thread needs the ninth arena, which filters
/// refuse (malloc/arena.c, `arena_get2`).
pub(super) fn limit_arenas() {
    const FOR_EACH_PROCESSOR: usize = 8;
    let processors = std::thread::available_parallelism().map_or(2, NonZero::get);
    let most = libc::c_int::try_from(processors * FOR_EACH_PROCESSOR).unwrap_or(libc::c_int::MAX);
    // SAFETY: changes a number in the allocator; a failure leaves it as it was.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, most) };
}

/// Installs the handler, once per process, and records the name of the calling thread for it.
pub(super) fn install() -> Result<(), vmm_sys_util::errno::Error> {
    if let Ok(name) = rustix::thread::name() {
        let mut copy = [0; NAME_BYTES];
        copy.iter_mut().zip(name.to_bytes()).for_each(|(to, from)| *to = *from);
        NAME.set(copy);
    }
    let mut result = Ok(());
    INSTALLED.call_once(|| {
        result = vmm_sys_util::signal::register_signal_handler(libc::SIGSYS, on_refused_call);
    });
    result
}

extern "C" fn on_refused_call(
    _signal: libc::c_int,
    info: *mut libc::siginfo_t,
    _context: *mut libc::c_void,
) {
    // `si_syscall` follows the call address in the SIGSYS variant of siginfo (Linux
    // asm-generic/siginfo.h): 16 bytes of header, 8 of address.
    const SYSCALL_OFFSET: usize = 24;
    let call = info.cast::<u8>().wrapping_add(SYSCALL_OFFSET).cast::<[u8; 4]>();
    // SAFETY: the kernel passes a valid siginfo of 128 bytes, and four bytes at offset 24 lie
    // inside.
    let call = i32::from_ne_bytes(unsafe { call.read() });
    let name = NAME.try_with(Cell::get).unwrap_or_default();
    // Nothing here allocates: the handler may have interrupted the allocator.
    let mut line = Line::default();
    line.push(b"ebb: the system call filter of thread `");
    line.push(name.split(|&byte| byte == 0).next().unwrap_or_default());
    line.push(b"` refused system call ");
    line.push_number(call.unsigned_abs());
    line.push(b"; the monitor ends. Please report this; --seccomp off runs without filters\n");
    // SAFETY: the buffer is valid for its length; writing to a closed descriptor only fails.
    unsafe { libc::write(libc::STDERR_FILENO, line.bytes.as_ptr().cast(), line.length) };
    // SAFETY: ends the process without running any more of its code.
    unsafe { libc::_exit(EXIT_CODE) };
}

struct Line {
    bytes: [u8; 256],
    length: usize,
}

impl Default for Line {
    fn default() -> Self {
        Self { bytes: [0; 256], length: 0 }
    }
}

impl Line {
    fn push(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            if let Some(slot) = self.bytes.get_mut(self.length) {
                *slot = byte;
                self.length += 1;
            }
        }
    }

    fn push_number(&mut self, number: u32) {
        let mut digits = [0u8; 10];
        let mut left = number;
        let mut start = digits.len();
        loop {
            start -= 1;
            digits[start] = b'0' + (left % 10) as u8;
            left /= 10;
            if left == 0 {
                break;
            }
        }
        self.push(&digits[start..]);
    }
}
