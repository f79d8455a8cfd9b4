//! A guest that has taken over a thread of its monitor: it runs as a program in the guest, and
//! drives the bug that is planted in the entropy device (`ebb_vmm::devices::virtio::planted_bug`)
//! after the kernel's driver was unbound.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::memory::{Memory, PAGE_BYTES};
use super::window::{ENTROPY, Register, Window};
use super::{ACKNOWLEDGE, DRIVER, DRIVER_OK, Descriptor, Device, FEATURES_OK, QUEUES, Queue};

/// First argument that runs this program as the attacker; the names of an attack and of files
/// follow.
pub const ARGUMENT: &str = "--planted-bug";
/// Queue size of the entropy device.
const RING_SIZE: u16 = 64;
const DRIVERS: &str = "/sys/bus/platform/drivers/virtio-mmio";
/// `ebb_vmm::devices::virtio::planted_bug`, which ordinary builds do not have.
const MAGIC: u64 = 0x6775_625f_6262_6521;
const WHERE: u64 = 0;
const READ: u64 = 1;
const WRITE: u64 = 2;
const CALL: u64 = 3;
/// Offset of the answer in the huge page, behind the request.
const ANSWER_OFFSET: usize = 64 << 10;
/// Places in the attacker's buffer in the monitor.
const PATH_OFFSET: u64 = 0;
const OTHER_PATH_OFFSET: u64 = 1024;
const SCRATCH_OFFSET: u64 = 4096;
/// Time limit for an answer. A request that ends the monitor has none.
const LIMIT: Duration = Duration::from_secs(10);
/// Descriptors that are tried: as many as a monitor may open.
const DESCRIPTORS: u64 = 1024;

/// Arguments of a call that stand for addresses in the monitor.
const PATH: u64 = u64::MAX - 1;
const OTHER_PATH: u64 = u64::MAX - 2;
const SCRATCH: u64 = u64::MAX - 3;
const HERE: u64 = libc::AT_FDCWD as u64;
/// The process with this number is not the monitor.
const INIT: u64 = 1;
const KILL: u64 = libc::SIGKILL as u64;
const KVM_CREATE_VM: u64 = 0xae01;
const EXECUTABLE: u64 = (libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC) as u64;
const RESTART: u64 = libc::LINUX_REBOOT_CMD_RESTART as u64;
const NO_FILE: u64 = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as u64;

/// A system call that must end the monitor, with arguments that reach something without filters.
pub struct Fatal {
    /// Its name.
    pub name: &'static str,
    /// Its number.
    pub number: libc::c_long,
    arguments: &'static [u64],
}

const fn fatal(name: &'static str, number: libc::c_long, arguments: &'static [u64]) -> Fatal {
    Fatal { name, number, arguments }
}

/// One call or more of each way out of the machine. No thread may make any of them; that all
/// others are refused, too, is tested without guests (`seccomp::tests` of ebb-vmm).
#[rustfmt::skip]
pub const FATAL: &[Fatal] = &[
    fatal("open", libc::SYS_open, &[PATH, libc::O_RDWR as u64]),
    fatal("creat", libc::SYS_creat, &[OTHER_PATH, 0o666]),
    fatal("openat2", libc::SYS_openat2, &[HERE, PATH, SCRATCH, 24]),
    fatal("open_by_handle_at", libc::SYS_open_by_handle_at, &[HERE, SCRATCH, 0]),
    fatal("rename", libc::SYS_rename, &[PATH, OTHER_PATH]),
    fatal("unlink", libc::SYS_unlink, &[PATH]),
    fatal("link", libc::SYS_link, &[PATH, OTHER_PATH]),
    fatal("mkdir", libc::SYS_mkdir, &[OTHER_PATH, 0o777]),
    fatal("chmod", libc::SYS_chmod, &[PATH, 0o777]),
    fatal("mount", libc::SYS_mount, &[PATH, PATH, PATH, libc::MS_BIND, 0]),
    fatal("pivot_root", libc::SYS_pivot_root, &[PATH, PATH]),
    fatal("chroot", libc::SYS_chroot, &[PATH]),
    fatal("unshare", libc::SYS_unshare, &[libc::CLONE_NEWUSER as u64]),
    fatal("setns", libc::SYS_setns, &[3, 0]),
    fatal("socket", libc::SYS_socket, &[libc::AF_UNIX as u64, libc::SOCK_STREAM as u64, 0]),
    fatal("connect", libc::SYS_connect, &[3, SCRATCH, 16]),
    fatal("MSG_FASTOPEN", libc::SYS_sendmsg, &[3, SCRATCH, libc::MSG_FASTOPEN as u64]),
    fatal("fork", libc::SYS_fork, &[]),
    fatal("clone", libc::SYS_clone, &[libc::SIGCHLD as u64]),
    fatal("execve", libc::SYS_execve, &[PATH, 0, 0]),
    fatal("ptrace", libc::SYS_ptrace, &[libc::PTRACE_ATTACH as u64, INIT]),
    fatal("process_vm_readv", libc::SYS_process_vm_readv, &[INIT, SCRATCH, 1, SCRATCH, 1, 0]),
    fatal("kill", libc::SYS_kill, &[u64::MAX, KILL]),
    fatal("tgkill", libc::SYS_tgkill, &[INIT, INIT, KILL]),
    fatal("pidfd_open", libc::SYS_pidfd_open, &[INIT, 0]),
    fatal("pidfd_getfd", libc::SYS_pidfd_getfd, &[3, 0, 0]),
    fatal("move_pages", libc::SYS_move_pages, &[INIT, 1, SCRATCH, 0, SCRATCH, 0]),
    fatal("mmap", libc::SYS_mmap, &[0, 4096, EXECUTABLE, NO_FILE, u64::MAX, 0]),
    fatal("mprotect", libc::SYS_mprotect, &[SCRATCH, 4096, EXECUTABLE]),
    fatal("bpf", libc::SYS_bpf, &[0, SCRATCH, 64]),
    fatal("io_uring_setup", libc::SYS_io_uring_setup, &[8, SCRATCH]),
    fatal("io_uring_enter", libc::SYS_io_uring_enter, &[3, 1, 0, 0, 0, 0]),
    fatal("perf_event_open", libc::SYS_perf_event_open, &[SCRATCH, 0, u64::MAX, u64::MAX, 0]),
    fatal("userfaultfd", libc::SYS_userfaultfd, &[0]),
    fatal("keyctl", libc::SYS_keyctl, &[0, 0, 0]),
    fatal("setuid", libc::SYS_setuid, &[0]),
    fatal("TIOCSTI", libc::SYS_ioctl, &[2, libc::TIOCSTI, SCRATCH]),
    fatal("KVM_CREATE_VM", libc::SYS_ioctl, &[3, KVM_CREATE_VM, 0]),
    fatal("F_SETOWN", libc::SYS_fcntl, &[3, libc::F_SETOWN as u64, INIT]),
    fatal("memfd_create", libc::SYS_memfd_create, &[PATH, 0]),
    fatal("init_module", libc::SYS_init_module, &[SCRATCH, 4096, SCRATCH]),
    fatal("reboot", libc::SYS_reboot, &[0xfee1_dead, 672_274_793, RESTART, 0]),
    fatal("seccomp", libc::SYS_seccomp, &[0, 0, 0]),
];

/// What the attacker has found out about a descriptor: results of system calls, which are negative
/// error numbers where they failed.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Found {
    /// Position of the end.
    pub end: i64,
    /// Bytes read.
    pub read: i64,
    /// The beginning of what was read.
    pub text: String,
    /// Whether it shows where in the host's memory a page is.
    pub shows_frames: bool,
    /// Advice to another process.
    pub advise: i64,
    /// Bytes written at the beginning.
    pub write: i64,
    /// Allocation of 64 MiB.
    pub grow: i64,
    /// Discarding the first MiB.
    pub punch: i64,
    /// Setting the size to one MiB.
    pub resize: i64,
}

/// Whether a thread can change sizes of files.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Resize {
    No,
    Yes,
}

/// Takes the devices from the kernel's drivers.
fn unbind_drivers() -> std::io::Result<()> {
    for entry in std::fs::read_dir(DRIVERS)? {
        let name = entry?.file_name();
        if name.as_encoded_bytes().starts_with(b"LNRO0005") {
            std::fs::write(format!("{DRIVERS}/unbind"), name.as_encoded_bytes())?;
        }
    }
    Ok(())
}

/// The monitor's thread in the attacker's hands.
struct Attacker {
    device: Device,
    /// Address of the attacker's buffer.
    buffer: u64,
    /// Id of the thread that makes the system calls; 0 is the device's.
    thread: u64,
}

impl Attacker {
    fn new(paths: &[String]) -> Result<Self, String> {
        unbind_drivers().map_err(|error| format!("{DRIVERS}: {error}"))?;
        let (window, memory) = (Window::open(ENTROPY)?, Memory::allocate(1)?);
        let mut device = Device { window, memory, next: [0; QUEUES], size: RING_SIZE };
        device.negotiate(1 << 32);
        device.prepare(0);
        device.window.set(Register::Status, ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK);
        let mut attacker = Self { device, buffer: 0, thread: 0 };
        attacker.buffer = attacker.request(WHERE, &[], &[], 0).0 as u64;
        for (offset, path) in [PATH_OFFSET, OTHER_PATH_OFFSET].into_iter().zip(paths) {
            attacker.write(offset, &[path.as_bytes(), &[0]].concat());
        }
        Ok(attacker)
    }

    /// Returns the result and the data of the answer. Does not return if the monitor ends.
    fn request(&mut self, kind: u64, words: &[u64], data: &[u8], length: usize) -> (i64, Vec<u8>) {
        let mut arguments = [0; 8];
        arguments[..words.len()].copy_from_slice(words);
        let head = [&[MAGIC, kind], &arguments[..]].concat();
        let mut bytes: Vec<u8> = head.iter().flat_map(|word| word.to_le_bytes()).collect();
        bytes.extend(data);
        let start = self.device.memory.prey();
        self.device.memory.prey_mut()[..bytes.len()].copy_from_slice(&bytes);
        let request = Descriptor::readable(start, bytes.len() as u32);
        let answer = Descriptor::writable(start + ANSWER_OFFSET as u64, 8 + length as u32);
        self.device.send_within(Queue::Inflate, &[request, answer], LIMIT);
        let answer = &self.device.memory.prey_mut()[ANSWER_OFFSET..][..8 + length];
        let result = answer.first_chunk().copied().map_or(0, i64::from_le_bytes);
        (result, answer[8..].to_vec())
    }

    /// Writes to the attacker's buffer.
    fn write(&mut self, offset: u64, data: &[u8]) {
        self.request(WRITE, &[self.buffer + offset], data, 0);
    }

    /// Reads from the attacker's buffer.
    fn read(&mut self, offset: u64, bytes: usize) -> Vec<u8> {
        self.request(READ, &[self.buffer + offset, bytes as u64], &[], bytes).1
    }

    fn call(&mut self, number: libc::c_long, arguments: &[u64]) -> i64 {
        let address = |argument: &u64| match *argument {
            PATH => self.buffer + PATH_OFFSET,
            OTHER_PATH => self.buffer + OTHER_PATH_OFFSET,
            SCRATCH => self.buffer + SCRATCH_OFFSET,
            other => other,
        };
        let mut words = vec![self.thread, number as u64];
        words.extend(arguments.iter().map(address));
        self.request(CALL, &words, &[], 0).0
    }

    /// Numbers of all open descriptors.
    fn descriptors(&mut self) -> Vec<u64> {
        (0..DESCRIPTORS)
            .filter(|fd| self.call(libc::SYS_fcntl, &[*fd, libc::F_GETFD as u64]) >= 0)
            .collect()
    }

    /// Whether a descriptor is readable within this time.
    fn is_readable(&mut self, fd: u64, milliseconds: u64) -> bool {
        let entry = fd | (libc::POLLIN as u64) << 32;
        let time = [milliseconds / 1000, milliseconds % 1000 * 1_000_000];
        let timeout = [entry, time[0], time[1]].map(u64::to_le_bytes).concat();
        self.write(SCRATCH_OFFSET, &timeout);
        let places = [self.buffer + SCRATCH_OFFSET, self.buffer + SCRATCH_OFFSET + 8];
        self.call(libc::SYS_ppoll, &[places[0], 1, places[1], 0, 8]) > 0
    }

    /// Uses each descriptor for what only a file is meant for. Only a thread for migrations may
    /// make the calls that change a file's size.
    fn as_files(&mut self, may: Resize) -> BTreeMap<u64, Found> {
        let mut all = BTreeMap::new();
        for fd in self.descriptors() {
            self.write(SCRATCH_OFFSET, &[0; 64]);
            let mut found = Found {
                end: self.call(libc::SYS_lseek, &[fd, 0, libc::SEEK_END as u64]),
                read: self.call(libc::SYS_pread64, &[fd, SCRATCH, 64, 0]),
                ..Found::default()
            };
            let mut text = self.read(SCRATCH_OFFSET, 64);
            text.truncate(text.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1));
            found.text = String::from_utf8_lossy(&text).into_owned();
            // An entry of /proc/self/pagemap, as its reader with all rights sees it.
            let entry = (self.buffer + SCRATCH_OFFSET) / PAGE_BYTES as u64 * 8;
            if self.call(libc::SYS_pread64, &[fd, SCRATCH, 8, entry]) == 8 {
                let entry = self.read(SCRATCH_OFFSET, 8).first_chunk().copied();
                let entry = entry.map_or(0, u64::from_le_bytes);
                found.shows_frames = entry >> 63 == 1 && entry & ((1 << 55) - 1) != 0;
            }
            let range = [self.buffer + SCRATCH_OFFSET, 4096].map(u64::to_le_bytes).concat();
            self.write(SCRATCH_OFFSET, &range);
            let cold = libc::MADV_COLD as u64;
            found.advise = self.call(libc::SYS_process_madvise, &[fd, SCRATCH, 1, cold, 0]);
            found.write = self.call(libc::SYS_pwrite64, &[fd, SCRATCH, 16, 0]);
            found.grow = self.call(libc::SYS_fallocate, &[fd, 0, 0, 64 << 20]);
            let punch = (libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE) as u64;
            found.punch = self.call(libc::SYS_fallocate, &[fd, punch, 0, 1 << 20]);
            self.call(libc::SYS_fdatasync, &[fd]);
            self.call(libc::SYS_fcntl, &[fd, libc::F_DUPFD_CLOEXEC as u64, 900]);
            found.resize = match may {
                Resize::Yes => self.call(libc::SYS_ftruncate, &[fd, 1 << 20]),
                Resize::No => -1,
            };
            all.insert(fd, found);
        }
        all
    }

    /// Reads from each descriptor, and writes to it; the monitor or the guest may not survive this.
    fn as_streams(&mut self) -> usize {
        let all = self.descriptors();
        for fd in all.iter().copied() {
            self.write(SCRATCH_OFFSET, &1_u64.to_le_bytes());
            self.call(libc::SYS_ioctl, &[fd, libc::FIONBIO, SCRATCH]);
            if self.is_readable(fd, 0) {
                self.call(libc::SYS_read, &[fd, SCRATCH, 4096]);
            }
        }
        for fd in all.iter().copied() {
            self.write(SCRATCH_OFFSET, &[0xff; 64]);
            for bytes in [1, 8, 64] {
                self.call(libc::SYS_write, &[fd, SCRATCH, bytes]);
            }
        }
        all.len()
    }

    /// Sends requests to the monitor's companion, which answers the first one. Returns the answers.
    fn ask_companion(&mut self, requests: &[String]) -> Vec<String> {
        let mut answers = Vec::new();
        let Some((first, others)) = requests.split_first() else { return answers };
        let mut sockets = self.descriptors();
        sockets.retain(|fd| {
            // Only sockets have no positions and no room to allocate.
            let errors = [
                self.call(libc::SYS_lseek, &[*fd, 0, libc::SEEK_END as u64]),
                self.call(libc::SYS_fallocate, &[*fd, 0, 0, 1]),
            ];
            errors == [libc::ESPIPE, libc::ENODEV].map(|error| -i64::from(error))
                && self.send(*fd, first)
        });
        // Any of them may be the companion's.
        let started = Instant::now();
        let mut answering = Vec::new();
        while answering.is_empty() && started.elapsed() < Duration::from_secs(10) {
            answering.clone_from(&sockets);
            answering.retain(|fd| self.is_readable(*fd, 50));
        }
        for fd in answering {
            for (index, request) in [first].into_iter().chain(others).enumerate() {
                let is_answered =
                    index == 0 || self.send(fd, request) && self.is_readable(fd, 2000);
                if !is_answered {
                    continue;
                }
                let length = self.call(libc::SYS_read, &[fd, SCRATCH, 4096]).max(0);
                let answer = self.read(SCRATCH_OFFSET, length as usize);
                answers.push(format!("{request}: {}", String::from_utf8_lossy(&answer)));
            }
        }
        answers
    }

    /// Writes `text` to a descriptor; returns whether that was possible.
    fn send(&mut self, fd: u64, text: &str) -> bool {
        self.write(SCRATCH_OFFSET, text.as_bytes());
        self.call(libc::SYS_write, &[fd, SCRATCH, text.len() as u64]) > 0
    }

    /// Calls that fail as on a kernel without them.
    fn missing(&mut self) -> Vec<i64> {
        [
            (libc::SYS_openat, &[HERE, PATH, libc::O_RDWR as u64][..]),
            (libc::SYS_clone3, &[SCRATCH, 88]),
            (libc::SYS_prctl, &[libc::PR_SET_DUMPABLE as u64, 1]),
        ]
        .map(|(number, arguments)| self.call(number, arguments))
        .to_vec()
    }
}

/// Makes the attack, and prints what came of it.
pub fn main(words: &[String]) -> ExitCode {
    let attack = || -> Result<serde_json::Value, String> {
        let (name, rest) = words.split_first().ok_or("no attack")?;
        let mut attacker = Attacker::new(rest)?;
        attacker.thread = rest.get(2).and_then(|thread| thread.parse().ok()).unwrap_or(0);
        let result = match name.as_str() {
            "missing" => serde_json::to_value(attacker.missing()),
            "files" => serde_json::to_value(attacker.as_files(Resize::No)),
            "files and sizes" => serde_json::to_value(attacker.as_files(Resize::Yes)),
            "streams" => serde_json::to_value(attacker.as_streams()),
            "companion" => serde_json::to_value(attacker.ask_companion(rest)),
            name => {
                let fatal = FATAL.iter().find(|fatal| fatal.name == name);
                let fatal = fatal.ok_or_else(|| format!("no attack {name}"))?;
                serde_json::to_value(attacker.call(fatal.number, fatal.arguments))
            }
        };
        result.map_err(|error| error.to_string())
    };
    match attack() {
        Ok(result) => {
            println!("{result}");
            ExitCode::SUCCESS
        }
        Err(problem) => {
            eprintln!("{problem}");
            ExitCode::FAILURE
        }
    }
}
