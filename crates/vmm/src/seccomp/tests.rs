use super::ioctls::kvm;
use super::*;

/// Runs `action` in a child process behind the filter of `kind`, and returns how the child ended.
fn in_child(kind: ThreadKind, action: impl Fn()) -> i32 {
    in_child_with(&Filters::new(Switch::On).unwrap(), kind, &|| (), &action)
}

/// The same with a function that is called before the filter is installed.
fn in_child_with(filters: &Filters, kind: ThreadKind, before: &dyn Fn(), action: &dyn Fn()) -> i32 {
    // SAFETY: the child only installs the filter, runs `action`, which makes plain system calls,
    // and leaves with _exit.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0);
    if pid == 0 {
        before();
        let status = if filters.for_thread(kind).apply().is_ok() {
            action();
            0
        } else {
            1
        };
        // SAFETY: ends the child without running the parent's cleanup.
        unsafe { libc::_exit(status) };
    }
    let mut status = 0;
    // SAFETY: `pid` is our child, and `status` a valid place for its status.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    assert!(libc::WIFEXITED(status), "status {status:#x}");
    libc::WEXITSTATUS(status)
}

/// Ends the process if a call was successful.
fn must_fail(result: libc::c_int) {
    if result >= 0 {
        // SAFETY: ends the child without running the parent's cleanup.
        unsafe { libc::_exit(1) };
    }
}

fn open_for_writing() {
    // SAFETY: a constant path and flags.
    must_fail(unsafe { libc::openat(libc::AT_FDCWD, c"/dev/null".as_ptr(), libc::O_WRONLY) });
}

fn open_for_reading() {
    // SAFETY: a constant path and flags.
    must_fail(unsafe { libc::openat(libc::AT_FDCWD, c"/dev/null".as_ptr(), libc::O_RDONLY) });
}

fn create_new() {
    let flags = libc::O_WRONLY | libc::O_CREAT | libc::O_EXCL;
    // It exists, so the call fails without a filter as well.
    // SAFETY: a constant path and flags.
    must_fail(unsafe { libc::openat(libc::AT_FDCWD, c"/dev/null".as_ptr(), flags, 0o600) });
}

fn execute() {
    let argv = [c"/bin/true".as_ptr(), std::ptr::null()];
    // SAFETY: both arrays end with a null pointer.
    unsafe { libc::execve(argv[0], argv.as_ptr(), argv[1..].as_ptr()) };
}

fn signal_another_process() {
    // SAFETY: signal 0 has no effect.
    unsafe { libc::syscall(libc::SYS_tgkill, 1, 1, 0) };
}

fn make_namespaces() {
    let flags = libc::CLONE_NEWUSER | libc::SIGCHLD;
    // SAFETY: a call that is allowed makes a process that has a copy of the stack, like fork.
    unsafe { libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) };
}

fn make_a_process() {
    // SAFETY: a call that is allowed makes a process that has a copy of the stack, like fork.
    unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) };
}

/// Connects a socket without connect(2).
fn send_to_connect() {
    // SAFETY: the descriptor is no socket: without a filter the call only fails.
    unsafe { libc::syscall(libc::SYS_sendmsg, -1, 0, libc::MSG_FASTOPEN) };
}

fn move_pages_of_another_process() {
    // SAFETY: the call concerns no pages.
    unsafe { libc::syscall(libc::SYS_move_pages, 1, 0, 0, 0, 0, 0) };
}

fn make_executable_memory() {
    // SAFETY: an anonymous mapping at an address of the kernel's choice.
    unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            4096,
            libc::PROT_READ | libc::PROT_EXEC,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
}

fn allocate() {
    drop(std::hint::black_box(vec![1u8; 8 << 20]));
}

fn create_a_vm() {
    const KVM_CREATE_VM: u64 = kvm(0, 0x01, 0);
    // SAFETY: the descriptor is no KVM one: without a filter the call only fails.
    unsafe { libc::ioctl(0, KVM_CREATE_VM, 0) };
}

#[test]
fn threads_may_do_what_they_need() {
    for kind in ThreadKind::ALL {
        assert_eq!(in_child(kind, allocate), 0, "{kind:?}");
    }
}

/// The kinds of threads of a monitor.
fn of_the_monitor() -> impl Iterator<Item = ThreadKind> {
    let others = [ThreadKind::Companion, ThreadKind::Broker];
    ThreadKind::ALL.into_iter().filter(move |kind| !others.contains(kind))
}

#[test]
fn threads_may_do_nothing_else() {
    for kind in ThreadKind::ALL {
        assert_eq!(in_child(kind, execute), EXIT_CODE, "{kind:?}");
        assert_eq!(in_child(kind, make_executable_memory), EXIT_CODE, "{kind:?}");
        // One kind makes processes and machines; and nothing else that others may not do.
        let of_fork = if kind == ThreadKind::Fork { 0 } else { EXIT_CODE };
        assert_eq!(in_child(kind, create_a_vm), of_fork, "{kind:?}");
        assert_eq!(in_child(kind, signal_another_process), EXIT_CODE, "{kind:?}");
        assert_eq!(in_child(kind, make_namespaces), EXIT_CODE, "{kind:?}");
        assert_eq!(in_child(kind, make_a_process), of_fork, "{kind:?}");
        assert_eq!(in_child(kind, send_to_connect), EXIT_CODE, "{kind:?}");
        assert_eq!(in_child(kind, move_pages_of_another_process), EXIT_CODE, "{kind:?}");
    }
    for kind in of_the_monitor() {
        assert_eq!(in_child(kind, open_for_reading), 0, "{kind:?}");
        assert_eq!(in_child(kind, open_for_writing), 0, "{kind:?}");
        assert_eq!(in_child(kind, create_new), 0, "{kind:?}");
    }
    assert_eq!(in_child(ThreadKind::Broker, open_for_writing), EXIT_CODE);
    assert_eq!(in_child(ThreadKind::Broker, create_new), EXIT_CODE);
}

#[test]
fn missing_calls_only_fail() {
    for kind in ThreadKind::ALL {
        let make = || {
            for call in missing(kind).filter(|call| MISSING.contains(call)) {
                // SAFETY: a call without arguments, or with invalid ones.
                must_fail(unsafe { libc::syscall(call, 0, 0, 0) } as libc::c_int);
            }
        };
        assert_eq!(in_child(kind, make), 0, "{kind:?}");
    }
}

/// Calls that reach something outside of the machine: by a path, by a new socket or descriptor, in
/// other processes, or in the kernel.
#[rustfmt::skip]
const OUTSIDE: &[c_long] = &[
    libc::SYS_access, libc::SYS_acct, libc::SYS_add_key, libc::SYS_bind, libc::SYS_bpf,
    libc::SYS_chdir, libc::SYS_chmod, libc::SYS_chown, libc::SYS_chroot, libc::SYS_connect,
    libc::SYS_creat, libc::SYS_delete_module, libc::SYS_execve, libc::SYS_execveat,
    libc::SYS_faccessat, libc::SYS_faccessat2, libc::SYS_fanotify_init, libc::SYS_fanotify_mark,
    libc::SYS_fchmodat, libc::SYS_fchownat, libc::SYS_fork, libc::SYS_fsconfig,
    libc::SYS_fsmount, libc::SYS_fsopen, libc::SYS_fspick, libc::SYS_futimesat,
    libc::SYS_getcwd, libc::SYS_getdents64, libc::SYS_getxattr, libc::SYS_init_module,
    libc::SYS_finit_module, libc::SYS_inotify_add_watch, libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register, libc::SYS_io_uring_setup, libc::SYS_ioperm, libc::SYS_iopl,
    libc::SYS_kexec_load, libc::SYS_keyctl, libc::SYS_kill, libc::SYS_landlock_restrict_self,
    libc::SYS_lchown, libc::SYS_link, libc::SYS_linkat, libc::SYS_listen, libc::SYS_listxattr,
    libc::SYS_lstat, libc::SYS_mkdir, libc::SYS_mkdirat, libc::SYS_mknod, libc::SYS_mknodat,
    libc::SYS_mount, libc::SYS_mount_setattr, libc::SYS_move_mount, libc::SYS_mq_open,
    libc::SYS_name_to_handle_at, libc::SYS_newfstatat, libc::SYS_open,
    libc::SYS_open_by_handle_at, libc::SYS_open_tree, libc::SYS_openat, libc::SYS_openat2,
    libc::SYS_perf_event_open, libc::SYS_pidfd_getfd, libc::SYS_pidfd_open,
    libc::SYS_pidfd_send_signal, libc::SYS_pivot_root, libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev, libc::SYS_ptrace, libc::SYS_quotactl, libc::SYS_readlink,
    libc::SYS_readlinkat, libc::SYS_reboot, libc::SYS_rename, libc::SYS_renameat,
    libc::SYS_renameat2, libc::SYS_request_key, libc::SYS_rmdir, libc::SYS_rt_sigqueueinfo,
    libc::SYS_rt_tgsigqueueinfo, libc::SYS_seccomp, libc::SYS_sethostname, libc::SYS_setns,
    libc::SYS_setuid, libc::SYS_setxattr, libc::SYS_shmget, libc::SYS_socket,
    libc::SYS_socketpair, libc::SYS_stat, libc::SYS_statfs, libc::SYS_statx, libc::SYS_swapon,
    libc::SYS_symlink, libc::SYS_symlinkat, libc::SYS_tkill, libc::SYS_truncate,
    libc::SYS_umount2, libc::SYS_unlink, libc::SYS_unlinkat, libc::SYS_unshare,
    libc::SYS_uselib, libc::SYS_userfaultfd, libc::SYS_utime, libc::SYS_utimensat,
    libc::SYS_utimes, libc::SYS_vfork,
];

/// Most system calls that all threads of a monitor have together, without the one that forks, of
/// which a captured one can
/// make use by changing another one's stack. Firecracker's three lists have 50 (of August 2026,
/// resources/seccomp).
const MOST_CALLS: usize = 49;
/// The same where checkpoints are allowed.
const MOST_CALLS_FORKABLE: usize = 61;

#[test]
fn no_thread_of_a_monitor_reaches_outside() {
    let mut union = std::collections::BTreeSet::new();
    for kind in of_the_monitor().filter(|&kind| kind != ThreadKind::Fork) {
        let rules = rules(kind).unwrap();
        let outside: Vec<_> = OUTSIDE.iter().filter(|call| rules.contains_key(call)).collect();
        assert!(outside.is_empty(), "{kind:?}: {outside:?}");
        union.extend(rules.into_keys());
    }
    assert!(union.len() <= MOST_CALLS, "{}: {union:?}", union.len());
    let rules = rules(ThreadKind::Fork).unwrap();
    // Its threads restrict themselves.
    let outside: Vec<_> = OUTSIDE.iter().filter(|call| rules.contains_key(call)).collect();
    assert_eq!(outside, [&libc::SYS_seccomp]);
    union.extend(rules.into_keys());
    assert!(union.len() <= MOST_CALLS_FORKABLE, "{}: {union:?}", union.len());
}

/// Number of calls that were refused in this process.
static REFUSED: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);

extern "C" fn count_refused(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
    REFUSED.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
}

/// Makes every call that `allowed` does not contain, those of other personalities included. Ends
/// the process if one is not refused.
fn make_all_calls(kind: ThreadKind, allowed: &Rules) {
    /// Above the highest number of Linux 7.
    const NUMBERS: c_long = 600;
    /// x32 (arch/x86/include/uapi/asm/unistd.h).
    const X32: c_long = 0x4000_0000;
    /// Made by code that the kernel itself has placed; filters do not see them (Linux
    /// kernel/seccomp.c, `seccomp_uprobe_exception`), and elsewhere they end the process.
    const UPROBES: std::ops::RangeInclusive<c_long> = 335..=336;
    let refused = || REFUSED.load(std::sync::atomic::Ordering::Relaxed);
    let forbidden = (0..NUMBERS).filter(|call| {
        !allowed.contains_key(call)
            && missing(kind).all(|missing| missing != *call)
            && !UPROBES.contains(call)
    });
    for call in forbidden.chain((0..NUMBERS).map(|call| call | X32)).chain([-1, i64::MAX]) {
        let before = refused();
        // SAFETY: a refused call has no effect; of others, zeros are no valid arguments.
        unsafe { libc::syscall(call, 0, 0, 0, 0, 0, 0) };
        if refused() != before + 1 {
            // SAFETY: ends the child without running the parent's cleanup.
            unsafe { libc::_exit(1) };
        }
    }
}

/// Forked processes use the filters of the first one.
#[test]
fn filters_name_the_process_that_installs_them() {
    let count = |program: &BpfProgram, value: u32| {
        program.iter().filter(|instruction| instruction.k == value).count()
    };
    for kind in ThreadKind::ALL {
        let program = compile(kind).unwrap();
        let expected = usize::from(kind != ThreadKind::Fork);
        assert_eq!(count(&program, THIS_PROCESS), expected, "{kind:?}");
        let installed = for_this_process(&program);
        let pid = std::process::id();
        assert_eq!(count(&installed, pid), count(&program, pid) + expected, "{kind:?}");
        assert_eq!(count(&installed, THIS_PROCESS), 0);
    }
}

#[test]
fn every_call_that_is_not_listed_is_refused() {
    for kind in ThreadKind::ALL {
        let filters = Filters::new(Switch::On).unwrap();
        let allowed = rules(kind).unwrap();
        let child = in_child_with(
            &filters,
            kind,
            &|| {
                // The usual handler ends the process. This one takes its place before the filter,
                // which installs its own once.
                handler::install().unwrap();
                vmm_sys_util::signal::register_signal_handler(libc::SIGSYS, count_refused).unwrap();
            },
            &|| make_all_calls(kind, &allowed),
        );
        assert_eq!(child, 0, "{kind:?}");
    }
}

/// Writes a snapshot into a client's file.
fn write_snapshot(ram: &ebb_guest_ram::GuestRam, file: &std::fs::File) {
    use crate::snapshot::file::{Sizes, check_target};
    use crate::snapshot::tests::write_into;
    let done = check_target(std::path::Path::new("/x"), file).is_ok()
        && write_into(file, ram).is_ok()
        && crate::file::write_back(file, &|| false).is_ok()
        && Sizes::of(file).is_ok();
    // A refused call ends the process with another code.
    if !done {
        // SAFETY: ends the child without running the parent's cleanup.
        unsafe { libc::_exit(1) };
    }
}

#[test]
fn only_the_migration_thread_may_write_snapshots() {
    let ram = crate::snapshot::tests::ram();
    for kind in ThreadKind::ALL {
        let file = tempfile::tempfile().unwrap();
        // The second kind starts the first one in a forked monitor, which has both filters.
        let may = matches!(kind, ThreadKind::Migrate | ThreadKind::Fork);
        let expected = if may { 0 } else { EXIT_CODE };
        assert_eq!(in_child(kind, || write_snapshot(&ram, &file)), expected, "{kind:?}");
    }
}

#[test]
fn only_the_migration_thread_may_copy_memory_in_use() {
    let kinds = [
        (ThreadKind::Migrate, 0),
        (ThreadKind::Api, EXIT_CODE),
        (ThreadKind::Device, EXIT_CODE),
        (ThreadKind::Vcpu, EXIT_CODE),
    ];
    for (kind, expected) in kinds {
        let filters = Filters::new(Switch::On).unwrap();
        // A userfaultfd is that of one process.
        let ram = std::cell::OnceCell::new();
        let prepare = || {
            let ram = ram.get_or_init(crate::snapshot::tests::ram);
            ram.enable_background_saves().unwrap();
        };
        let file = tempfile::tempfile().unwrap();
        let save = || {
            let protected = ram.get().unwrap().prepare_background_save().unwrap().protect();
            protected.unwrap().write(&file, 0, &mut |_| {}, &|| false).unwrap();
        };
        assert_eq!(in_child_with(&filters, kind, &prepare, &save), expected, "{kind:?}");
    }
}

/// Sends from a thread of its own over a connected socket, as a migration does.
fn send_over(socket: &std::os::unix::net::UnixStream) {
    let send = || {
        rustix::net::sendmsg(
            socket,
            &[std::io::IoSlice::new(b"memory")],
            &mut rustix::net::SendAncillaryBuffer::default(),
            rustix::net::SendFlags::NOSIGNAL,
        )
    };
    let sent = std::thread::scope(|scope| scope.spawn(send).join());
    if !matches!(sent, Ok(Ok(_))) {
        // SAFETY: ends the child without running the parent's cleanup.
        unsafe { libc::_exit(1) };
    }
}

#[test]
fn the_migration_thread_may_send_from_new_threads() {
    use std::io::Read;
    let (ours, mut theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    assert_eq!(in_child(ThreadKind::Migrate, || send_over(&ours)), 0);
    drop(ours);
    let mut received = String::new();
    theirs.read_to_string(&mut received).unwrap();
    assert_eq!(received, "memory");
}

#[test]
fn nobody_may_connect() {
    use rustix::net::{AddressFamily, SocketType, connect_unspec, getsockname, socket};
    let (ours, _theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    let calls: [&dyn Fn(); 4] = [
        &|| drop(socket(AddressFamily::INET, SocketType::STREAM, None)),
        &|| drop(getsockname(&ours)),
        &|| drop(socket(AddressFamily::UNIX, SocketType::STREAM, None)),
        &|| {
            let _ = connect_unspec(&ours);
        },
    ];
    for kind in ThreadKind::ALL {
        // The companion connects a guest's socket device with sockets in the file system.
        let refused = if kind == ThreadKind::Companion { &calls[..2] } else { &calls };
        for (index, call) in refused.iter().enumerate() {
            assert_eq!(in_child(kind, call), EXIT_CODE, "{kind:?}: call {index}");
        }
    }
}

/// As with one thread for each data stream.
#[test]
fn many_threads_of_a_migration_may_allocate() {
    const THREADS: usize = 16;
    let allocate = || {
        let all_run = std::sync::Barrier::new(THREADS);
        std::thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(|| {
                    drop(std::hint::black_box(vec![1u8; 64]));
                    all_run.wait();
                });
            }
        });
    };
    assert_eq!(in_child(ThreadKind::Migrate, allocate), 0);
}

#[test]
fn filters_can_be_left_out() {
    let filters = Filters::new(Switch::Off).unwrap();
    assert!(filters.for_thread(ThreadKind::Vcpu).program.is_none());
}

#[test]
fn no_capability_is_left() {
    // On a thread of its own: the test runner must keep its capabilities.
    let left = std::thread::spawn(|| {
        handler::drop_all().unwrap();
        rustix::thread::capabilities(None).unwrap()
    });
    let left = left.join().unwrap();
    assert!(left.effective.is_empty() && left.permitted.is_empty() && left.inheritable.is_empty());
}

/// Asks over a connected socket, as the main thread asks the companion.
fn ask(socket: &std::os::fd::OwnedFd) {
    use rustix::net::{RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendFlags};
    let (sent, mut byte) = ([std::io::IoSlice::new(b"x")], [0]);
    let mut received = [std::io::IoSliceMut::new(&mut byte)];
    let (mut none, mut nothing) = (SendAncillaryBuffer::default(), RecvAncillaryBuffer::default());
    let _ = rustix::net::sendmsg(socket, &sent, &mut none, SendFlags::NOSIGNAL);
    let _ = rustix::net::recvmsg(socket, &mut received, &mut nothing, RecvFlags::DONTWAIT);
}

#[test]
fn threads_that_remove_names_of_sockets_may_ask_the_companion() {
    let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
    let socket = std::os::fd::OwnedFd::from(socket);
    for kind in [ThreadKind::Main, ThreadKind::Api, ThreadKind::Migrate, ThreadKind::Companion] {
        assert_eq!(in_child(kind, || ask(&socket)), 0, "{kind:?}");
    }
}
