//! System call filters, one list for each kind of thread.
//!
//! A guest that takes over a thread of the monitor can do no more than that kind of thread needs:
//! there is no `execve`, no `socket`, no writable `open`, no executable mapping. A refused call
//! ends the process with a line that names the thread and the call.

use std::collections::BTreeMap;
use std::sync::Arc;

use libc::c_long;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch, sock_filter,
};
use thiserror::Error;
use vmm_sys_util::signal::SIGRTMIN;

use crate::config::Switch;
use crate::isolation::ThreadRights;

mod handler;
mod ioctls;

pub use handler::EXIT_CODE;
use ioctls::ioctls;

/// The task of a thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ThreadKind {
    /// Waits for the end of the guest, feeds the console.
    Main,
    /// Serves the API socket.
    Api,
    /// Runs a vCPU.
    Vcpu,
    /// Processes a device's queues.
    Device,
    /// Moves frames of a network device.
    Net,
    /// Processes the queues of a socket device and the host's sockets.
    Vsock,
    /// Processes a disk's queue, or executes its requests.
    Disk,
    /// Writes the output of the serial line.
    Console,
    /// Moves the machine to another monitor, or receives one; writes snapshots and parks the guest.
    /// The threads of data streams inherit the filter.
    Migrate,
    /// Reads the working set of a snapshot ahead of the guest.
    ReadAhead,
    /// Merges equal pages of guest memory.
    Merge,
    /// Forks the process, for checkpoints; in the new one, serves the checkpoint, and builds
    /// machines from it. Only in monitors that were started for that.
    Fork,
    /// The process beside the monitor that removes its sockets.
    Companion,
    /// Not part of a monitor: the broker of shared pages.
    Broker,
}

impl ThreadKind {
    const ALL: [Self; 14] = [
        Self::Main,
        Self::Api,
        Self::Vcpu,
        Self::Device,
        Self::Net,
        Self::Vsock,
        Self::Disk,
        Self::Console,
        Self::Migrate,
        Self::ReadAhead,
        Self::Merge,
        Self::Fork,
        Self::Companion,
        Self::Broker,
    ];
}

/// The filters could not be built or installed.
#[derive(Debug, Error)]
#[error(
    "system call filter for {kind:?} threads: {problem}; \
     start with --seccomp off to run without filters"
)]
pub struct SeccompError {
    kind: ThreadKind,
    problem: String,
}

/// Compiled filters, and the rights that threads give up with them.
#[derive(Debug, Clone)]
pub struct Filters {
    programs: Option<Arc<[Arc<BpfProgram>]>>,
    rights: Rights,
}

/// The filter for one thread.
#[derive(Debug, Clone)]
pub struct ThreadFilter {
    kind: ThreadKind,
    rights: Rights,
    program: Option<Arc<BpfProgram>>,
}

/// What a thread does about its rights before its filter is installed.
#[derive(Debug, Clone, Copy)]
enum Rights {
    /// It gives these up, and its capabilities.
    GiveUp(ThreadRights),
    /// The thread that started it has given up everything.
    GivenUp,
}

impl Filters {
    /// Compiles all lists, or none.
    pub fn new(switch: Switch) -> Result<Self, SeccompError> {
        let rights = Rights::GiveUp(ThreadRights::default());
        if !switch.is_on() {
            return Ok(Self { programs: None, rights });
        }
        handler::limit_arenas();
        let compile = |&kind| compile(kind).map(Arc::new);
        let programs = ThreadKind::ALL.iter().map(compile).collect::<Result<_, _>>()?;
        Ok(Self { programs: Some(programs), rights })
    }

    /// Makes threads also give up these rights.
    #[must_use]
    pub(crate) fn with_rights(self, rights: ThreadRights) -> Self {
        Self { rights: Rights::GiveUp(rights), ..self }
    }

    /// For a process whose only thread has given up all rights.
    #[must_use]
    pub(crate) fn without_rights(self) -> Self {
        Self { rights: Rights::GivenUp, ..self }
    }

    /// Returns the filter for a thread of `kind`.
    pub fn for_thread(&self, kind: ThreadKind) -> ThreadFilter {
        let program = self.programs.as_ref().and_then(|programs| programs.get(kind as usize));
        ThreadFilter { kind, rights: self.rights, program: program.cloned() }
    }
}

impl ThreadFilter {
    /// The only filter of a process, or none. Its threads give up their capabilities with it.
    ///
    /// # Errors
    /// [`SeccompError`] if it cannot be compiled.
    pub fn alone(kind: ThreadKind, switch: Switch) -> Result<Self, SeccompError> {
        let rights = Rights::GiveUp(ThreadRights::default());
        let program = switch.is_on().then(|| {
            handler::limit_arenas();
            compile(kind).map(Arc::new)
        });
        Ok(Self { kind, rights, program: program.transpose()? })
    }

    /// Restricts the calling thread permanently: drops its rights and capabilities (with or without
    /// filters), and installs the filter of its kind.
    pub fn apply(&self) -> Result<(), SeccompError> {
        let failed = |problem: String| SeccompError { kind: self.kind, problem };
        if let Rights::GiveUp(rights) = self.rights {
            rustix::thread::set_no_new_privs(true)
                .map_err(|errno| failed(format!("forbidding new privileges: {errno}")))?;
            rights.drop().map_err(|error| failed(format!("dropping rights: {error}")))?;
            handler::drop_all()
                .map_err(|error| failed(format!("dropping capabilities: {error}")))?;
        }
        let Some(program) = &self.program else { return Ok(()) };
        handler::install().map_err(|error| failed(error.to_string()))?;
        let program = for_this_process(program);
        seccompiler::apply_filter(&program).map_err(|error| failed(error.to_string()))
    }
}

/// Stands for the process's number in a compiled filter, since forked processes use the filters of
/// the first one. No process has this number (Linux include/linux/threads.h, `PID_MAX_LIMIT`).
const THIS_PROCESS: u32 = i32::MAX as u32;

/// The filter with the number of this process.
fn for_this_process(program: &BpfProgram) -> BpfProgram {
    let pid = std::process::id();
    let number = |k| if k == THIS_PROCESS { pid } else { k };
    program.iter().map(|line| sock_filter { k: number(line.k), ..line.clone() }).collect()
}

fn compile(kind: ThreadKind) -> Result<BpfProgram, SeccompError> {
    let error =
        |problem: seccompiler::BackendError| SeccompError { kind, problem: problem.to_string() };
    let rules = rules(kind).map_err(error)?;
    let program: BpfProgram =
        SeccompFilter::new(rules, SeccompAction::Trap, SeccompAction::Allow, TargetArch::x86_64)
            .and_then(TryInto::try_into)
            .map_err(error)?;
    Ok(fail_missing(kind).chain(program).collect())
}

/// Calls of every Rust thread over glibc: memory, locks, signals, time, exit.
const COMMON: &[c_long] = &[
    libc::SYS_brk,
    libc::SYS_clock_gettime,
    libc::SYS_close,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_futex,
    // Before tgkill, by glibc.
    libc::SYS_getpid,
    libc::SYS_getrandom,
    libc::SYS_madvise,
    libc::SYS_munmap,
    libc::SYS_ppoll,
    libc::SYS_read,
    libc::SYS_restart_syscall,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_write,
];

/// Calls that discard guest memory.
const DISCARD: &[c_long] = &[libc::SYS_fallocate, libc::SYS_process_madvise];

/// Further calls of the API thread: its clients, the companion, sizes of memory, the locks of
/// disks.
const API: &[c_long] = &[
    libc::SYS_accept4,
    libc::SYS_fadvise64,
    libc::SYS_flock,
    libc::SYS_fstat,
    libc::SYS_lseek,
    libc::SYS_mincore,
    libc::SYS_pread64,
    // The tables of a qcow2 image that gets another size.
    libc::SYS_pwrite64,
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_shutdown,
];

/// Calls of disks.
const DISK: &[c_long] = &[
    libc::SYS_fdatasync,
    libc::SYS_lseek,
    libc::SYS_pread64,
    libc::SYS_preadv2,
    libc::SYS_pwrite64,
    libc::SYS_pwritev2,
];

/// Calls of network devices: frames between guest memory and an open descriptor.
const NET: &[c_long] = &[libc::SYS_preadv2, libc::SYS_pwritev2];
/// Calls of the socket device: connections that exist, clients of its listener, the companion.
const VSOCK: &[c_long] = &[
    libc::SYS_accept4,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_shutdown,
];

/// Calls of the main thread at the end and when the guest reboots: reload the images, have the
/// companion remove the socket's name, shut down connections.
const MAIN: &[c_long] = &[
    libc::SYS_flock,
    libc::SYS_fstat,
    libc::SYS_lseek,
    libc::SYS_mincore,
    libc::SYS_pread64,
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_shutdown,
];

/// Calls of a migration: connections that exist, the listener of a receiver and the users at its
/// other end, dirty logs, resident memory, threads for data streams, the locks of disks, and files
/// of snapshots that clients have opened.
const MIGRATE: &[c_long] = &[
    libc::SYS_accept4,
    libc::SYS_fadvise64,
    libc::SYS_fdatasync,
    libc::SYS_flock,
    libc::SYS_fstat,
    libc::SYS_ftruncate,
    libc::SYS_getsockopt,
    libc::SYS_lseek,
    // Before the log of the monitor's own writes is trusted.
    libc::SYS_membarrier,
    libc::SYS_mincore,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_shutdown,
    libc::SYS_sync_file_range,
    // By new threads.
    libc::SYS_rseq,
];

/// Calls of merging: shared pages in memory files, a broker's socket.
const MERGE: &[c_long] = &[
    libc::SYS_fstat,
    libc::SYS_ftruncate,
    libc::SYS_lseek,
    libc::SYS_mbind,
    libc::SYS_memfd_create,
    libc::SYS_move_pages,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_shutdown,
];

/// Calls of the broker: sockets and liveness of its clients, memory files of shared pages on their
/// nodes.
const BROKER: &[c_long] = &[
    libc::SYS_accept4,
    libc::SYS_clock_nanosleep,
    libc::SYS_fstat,
    libc::SYS_ftruncate,
    libc::SYS_getsockopt,
    libc::SYS_lstat,
    libc::SYS_mbind,
    libc::SYS_memfd_create,
    libc::SYS_newfstatat,
    libc::SYS_pidfd_open,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_shutdown,
    libc::SYS_statx,
    libc::SYS_unlink,
    libc::SYS_unlinkat,
];

/// Calls of a thread that makes a checkpoint, of the process that it forks, and of the machines
/// that this one builds: copies of disks, a session of its own, descriptors that take the place of
/// others or are closed, events, the file systems of disks, filters for the threads, and what the
/// threads do before those.
const FORK: &[c_long] = &[
    libc::SYS_close_range,
    libc::SYS_copy_file_range,
    libc::SYS_dup3,
    libc::SYS_epoll_create1,
    libc::SYS_eventfd2,
    libc::SYS_fstatfs,
    libc::SYS_getsockopt,
    libc::SYS_prlimit64,
    libc::SYS_rt_sigaction,
    libc::SYS_seccomp,
    libc::SYS_setsid,
    libc::SYS_signalfd4,
];

/// Calls of the companion: requests, names of sockets, files below its directories, connections to
/// sockets and to a broker, which must be of its user or of root.
const COMPANION: &[c_long] = &[
    libc::SYS_connect,
    libc::SYS_fstat,
    libc::SYS_fsync,
    libc::SYS_geteuid,
    libc::SYS_getsockopt,
    libc::SYS_linkat,
    libc::SYS_newfstatat,
    libc::SYS_openat,
    libc::SYS_openat2,
    libc::SYS_pread64,
    libc::SYS_recvmsg,
    libc::SYS_renameat,
    libc::SYS_sendmsg,
    libc::SYS_shutdown,
    libc::SYS_unlinkat,
];

type Rules = BTreeMap<c_long, Vec<SeccompRule>>;

fn rules(kind: ThreadKind) -> Result<Rules, seccompiler::BackendError> {
    let mut rules = Rules::new();
    let mut allow = |calls: &[c_long]| rules.extend(calls.iter().map(|&call| (call, Vec::new())));
    allow(COMMON);
    match kind {
        ThreadKind::Main => {
            allow(DISCARD);
            allow(MAIN);
        }
        ThreadKind::Api => {
            allow(DISCARD);
            allow(API);
        }
        ThreadKind::Vcpu => allow(DISCARD),
        // Its files take turns.
        ThreadKind::Console => allow(&[libc::SYS_ftruncate]),
        ThreadKind::Device => {
            allow(DISCARD);
            allow(&[libc::SYS_lseek, libc::SYS_pread64]);
        }
        ThreadKind::Disk => {
            allow(DISCARD);
            allow(DISK);
        }
        ThreadKind::Net => allow(NET),
        ThreadKind::Vsock => allow(VSOCK),
        ThreadKind::Migrate => {
            allow(DISCARD);
            allow(MIGRATE);
        }
        ThreadKind::ReadAhead => allow(&[libc::SYS_fadvise64]),
        ThreadKind::Merge => {
            allow(DISCARD);
            allow(MERGE);
        }
        // The threads of a machine that it builds are restricted further.
        ThreadKind::Fork => {
            for calls in [DISCARD, API, DISK, NET, VSOCK, MAIN, MIGRATE, MERGE, FORK] {
                allow(calls);
            }
        }
        ThreadKind::Companion => allow(COMPANION),
        ThreadKind::Broker => allow(BROKER),
    }
    // No memory may become executable.
    let not_executable = || masked(2, libc::PROT_EXEC as u64, 0);
    rules.insert(libc::SYS_mmap, vec![not_executable()?]);
    rules.insert(libc::SYS_mprotect, vec![not_executable()?]);
    // The allocator moves its mappings. Discarding memory that is mapped from a snapshot moves
    // fresh memory over it.
    let moves = libc::MREMAP_MAYMOVE as u64;
    let replaces = moves | (libc::MREMAP_FIXED | libc::MREMAP_DONTUNMAP) as u64;
    rules.insert(libc::SYS_mremap, vec![equal(3, moves)?, equal(3, replaces)?]);
    // Only the broker opens files of the system, for reading.
    if kind == ThreadKind::Broker {
        let writable = (libc::O_ACCMODE | libc::O_CREAT | libc::O_EXCL | libc::O_TRUNC) as u64;
        rules.insert(libc::SYS_openat, vec![masked(2, writable, libc::O_RDONLY as u64)?]);
    }
    // Threads of data streams, in the same namespaces; no processes, which could outlive the
    // monitor.
    if kind == ThreadKind::Migrate {
        let thread = libc::CLONE_THREAD as u64;
        rules.insert(libc::SYS_clone, vec![masked(0, NEW_NAMESPACES | thread, thread)?]);
    }
    if kind == ThreadKind::Fork {
        let same = || masked(0, NEW_NAMESPACES, 0);
        rules.insert(libc::SYS_clone, vec![same()?]);
        let controls = [
            libc::PR_SET_NO_NEW_PRIVS,
            libc::PR_SET_NAME,
            libc::PR_GET_NAME,
            libc::PR_SET_DUMPABLE,
            libc::PR_SCHED_CORE,
            PR_GET_MEMORY_MERGE,
        ];
        let controls = controls.into_iter().map(|control| equal(0, control as u64));
        rules.insert(libc::SYS_prctl, controls.collect::<Result<_, _>>()?);
    }
    // With this flag, a TCP socket that is no longer connected would be connected anew (tcp(7)).
    if let Some(conditions) = rules.get_mut(&libc::SYS_sendmsg) {
        conditions.push(masked(2, libc::MSG_FASTOPEN as u64, 0)?);
    }
    if kind == ThreadKind::Companion {
        rules.insert(libc::SYS_socket, vec![equal(0, libc::AF_UNIX as u64)?]);
        rules.insert(libc::SYS_socketpair, vec![equal(0, libc::AF_UNIX as u64)?]);
    }
    // The nodes of this process's own pages.
    if matches!(kind, ThreadKind::Merge | ThreadKind::Fork) {
        rules.insert(libc::SYS_move_pages, vec![equal(0, 0)?]);
    }
    // Signals for the threads of this process only.
    let signals = match kind {
        // No filter of a process knows the numbers of those that are forked from it. The filters
        // of their threads do.
        ThreadKind::Fork => vec![equal(2, SIGRTMIN() as u64)?, equal(2, libc::SIGABRT as u64)?],
        _ => vec![equal(0, THIS_PROCESS.into())?],
    };
    rules.insert(libc::SYS_tgkill, signals);
    let requests =
        ioctls(kind).iter().map(|&request| equal(1, request)).collect::<Result<Vec<_>, _>>()?;
    rules.insert(libc::SYS_ioctl, requests);
    // Builds with debug assertions check that a descriptor is open before they close it.
    let mut controls = vec![libc::F_GETFD, libc::F_DUPFD_CLOEXEC];
    match kind {
        ThreadKind::Merge | ThreadKind::Broker => {
            controls.extend([libc::F_GETFL, libc::F_GET_SEALS, libc::F_ADD_SEALS]);
        }
        // Whether a client's file is open for writing.
        ThreadKind::Migrate => controls.push(libc::F_GETFL),
        ThreadKind::Fork => {
            controls.extend([libc::F_GETFL, libc::F_SETFL, libc::F_GET_SEALS, libc::F_ADD_SEALS]);
        }
        _ => {}
    }
    let controls = controls.into_iter().map(|control| equal(1, control as u64));
    rules.insert(libc::SYS_fcntl, controls.collect::<Result<_, _>>()?);
    Ok(rules)
}

/// Flags of clone(2) that make namespaces.
const NEW_NAMESPACES: u64 = (libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWNET
    | libc::CLONE_NEWNS
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWUTS) as u64
    | CLONE_NEWTIME;

/// include/uapi/linux/sched.h.
const CLONE_NEWTIME: u64 = 0x80;

/// Whether the kernel may merge pages of this process, whose snapshots stop it then
/// (include/uapi/linux/prctl.h).
const PR_GET_MEMORY_MERGE: libc::c_int = 68;

/// Calls that fail as on a kernel without them, instead of ending the monitor: glibc and the
/// standard library make them, mostly when a thread starts or ends, and do without.
const MISSING: &[c_long] = &[
    // Its flags are in memory, where a filter cannot examine them: glibc uses clone(2).
    libc::SYS_clone3,
    libc::SYS_gettid,
    // Names of threads and arenas.
    libc::SYS_prctl,
    libc::SYS_sched_getaffinity,
    // A hint of spinning locks and channels.
    libc::SYS_sched_yield,
    libc::SYS_set_robust_list,
    libc::SYS_sigaltstack,
];

/// The calls that fail for threads of `kind`: in a monitor also opening files. glibc opens one of
/// its own accord (when the heap of a thread shrinks: malloc/arena.c, `shrink_heap`), and does
/// without.
fn missing(kind: ThreadKind) -> impl Iterator<Item = c_long> {
    let opens = !matches!(kind, ThreadKind::Companion | ThreadKind::Broker);
    let usual = MISSING.iter().copied().chain(opens.then_some(libc::SYS_openat));
    usual.filter(move |&call| kind != ThreadKind::Fork || call != libc::SYS_prctl)
}

/// The beginning of each filter, which fails those calls (Linux
/// Documentation/userspace-api/seccomp_filter.rst).
fn fail_missing(kind: ThreadKind) -> impl Iterator<Item = sock_filter> {
    let instruction = |code: u32, jf, k| sock_filter { code: code as u16, jt: 0, jf, k };
    let load_number = instruction(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0);
    let fails = missing(kind).flat_map(move |call| {
        let skip_unless = instruction(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 1, call as u32);
        let error = libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32;
        [skip_unless, instruction(libc::BPF_RET | libc::BPF_K, 0, error)]
    });
    std::iter::once(load_number).chain(fails)
}

fn equal(argument: u8, value: u64) -> Result<SeccompRule, seccompiler::BackendError> {
    let condition =
        SeccompCondition::new(argument, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, value)?;
    SeccompRule::new(vec![condition])
}

fn masked(argument: u8, mask: u64, value: u64) -> Result<SeccompRule, seccompiler::BackendError> {
    let condition = SeccompCondition::new(
        argument,
        SeccompCmpArgLen::Dword,
        SeccompCmpOp::MaskedEq(mask),
        value,
    )?;
    SeccompRule::new(vec![condition])
}

#[cfg(test)]
mod tests;
