//! A bug that is planted in the entropy device, only with the feature `planted-bug`: a guest reads
//! and writes the monitor's memory and makes system calls in the device's thread, and in others,
//! whose stacks it could change. A test drives it from a guest, to show that it reaches nothing
//! outside of its machine (docs/security.md).
//!
//! A request is a chain whose readable part is [`MAGIC`], the number of an operation and eight
//! arguments, in 64-bit words, then data for [`WRITE`]. The answer in its writable part is one
//! word, the result, then data of [`READ`].

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use ebb_guest_ram::GuestMemory;
use virtio_queue::DescriptorChain;
use virtio_queue::desc::split::Descriptor;
use vm_memory::{Bytes, GuestAddress};

/// First word of a request.
pub const MAGIC: u64 = 0x6775_625f_6262_6521;
/// Bytes of a request without its data.
pub const REQUEST_BYTES: usize = 80;
/// Most bytes of data in a request or an answer, and size of the attacker's buffer.
pub const DATA_BYTES: usize = 16 << 10;

/// The result is the address of a buffer of [`DATA_BYTES`]; an attacker would find one.
pub const WHERE: u64 = 0;
/// Reads as many bytes as the second argument from the address in the first one.
pub const READ: u64 = 1;
/// Writes the data to the address in the first argument.
pub const WRITE: u64 = 2;
/// Makes a system call: the arguments are the id of a thread, 0 for the device's, the number of the
/// call and its six arguments. The result is the kernel's.
pub const CALL: u64 = 3;

/// Executes a request. Returns the length of the answer, or `None` if the chain is none.
pub fn execute<M>(memory: &GuestMemory, chain: &DescriptorChain<M>) -> Option<u32>
where
    M: std::ops::Deref + Clone,
    M::Target: vm_memory::GuestMemory,
{
    let mut parts = chain.clone();
    let request = parts.next().filter(|part| !part.is_write_only())?;
    let answer = parts.next().filter(Descriptor::is_write_only)?;
    let length = (request.len() as usize).min(REQUEST_BYTES + DATA_BYTES);
    let mut bytes = vec![0; length];
    memory.read_slice(&mut bytes, request.addr()).ok()?;
    let (head, data) = bytes.split_at_checked(REQUEST_BYTES)?;
    let mut words = head.chunks_exact(8).map(|word| word.try_into().map_or(0, u64::from_le_bytes));
    if words.next()? != MAGIC {
        return None;
    }
    let operation = words.next()?;
    let arguments: Vec<u64> = words.collect();
    let mut found = Vec::new();
    let result = match operation {
        WHERE => buffer(),
        READ => {
            found = read(arguments[0], (arguments[1] as usize).min(DATA_BYTES));
            0
        }
        WRITE => {
            write(arguments[0], data);
            0
        }
        CALL => call(&arguments),
        _ => return None,
    };
    reply(memory, answer.addr(), result, &found)
}

fn reply(memory: &GuestMemory, to: GuestAddress, result: u64, data: &[u8]) -> Option<u32> {
    let bytes = [&result.to_le_bytes()[..], data].concat();
    memory.write_slice(&bytes, to).ok()?;
    Some(bytes.len() as u32)
}

/// Address of the attacker's buffer.
fn buffer() -> u64 {
    static BUFFER: OnceLock<u64> = OnceLock::new();
    *BUFFER.get_or_init(|| Box::leak(vec![0_u8; DATA_BYTES].into_boxed_slice()).as_ptr() as u64)
}

fn read(address: u64, bytes: usize) -> Vec<u8> {
    let mut data = vec![0; bytes];
    // SAFETY: there is none: this is the planted bug.
    unsafe { std::ptr::copy_nonoverlapping(address as *const u8, data.as_mut_ptr(), bytes) };
    data
}

fn write(address: u64, data: &[u8]) {
    // SAFETY: there is none: this is the planted bug.
    unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), address as *mut u8, data.len()) };
}

fn call(words: &[u64]) -> u64 {
    let Some((&thread, call)) = words.split_first() else { return 0 };
    call.iter().zip(&WORDS).for_each(|(word, place)| place.store(*word, Ordering::SeqCst));
    if thread == 0 {
        return make_call();
    }
    IS_MADE.store(false, Ordering::SeqCst);
    // SAFETY: the signal has a handler.
    let sent = unsafe { libc::syscall(libc::SYS_tgkill, std::process::id(), thread, SIGNAL) };
    if sent != 0 {
        return u64::MAX;
    }
    while !IS_MADE.load(Ordering::SeqCst) {
        std::hint::spin_loop();
    }
    RESULT.load(Ordering::SeqCst)
}

/// Number and arguments of a call, and its result.
static WORDS: [AtomicU64; 7] = [const { AtomicU64::new(0) }; 7];
static RESULT: AtomicU64 = AtomicU64::new(0);
static IS_MADE: AtomicBool = AtomicBool::new(false);
const SIGNAL: libc::c_int = libc::SIGUSR2;

/// Makes the bug reach other threads, before the first filter is installed.
pub fn plant() {
    // SAFETY: zeros are a valid action, without a mask: the signal of a filter must not be blocked.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = on_signal as *const () as usize;
    // SAFETY: the handler makes a system call, and uses atomic variables.
    unsafe { libc::sigaction(SIGNAL, &raw const action, std::ptr::null_mut()) };
}

extern "C" fn on_signal(_: libc::c_int) {
    RESULT.store(make_call(), Ordering::SeqCst);
    IS_MADE.store(true, Ordering::SeqCst);
}

fn make_call() -> u64 {
    let [number, words @ ..] = WORDS.each_ref().map(|word| word.load(Ordering::SeqCst));
    let number = number as libc::c_long;
    // SAFETY: there is none: this is the planted bug.
    let result = unsafe {
        libc::syscall(number, words[0], words[1], words[2], words[3], words[4], words[5])
    };
    if result != -1 {
        return result as u64;
    }
    -i64::from(std::io::Error::last_os_error().raw_os_error().unwrap_or(0)) as u64
}
