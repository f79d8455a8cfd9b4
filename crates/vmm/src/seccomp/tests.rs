use super::*;

/// Runs `action` in a child process behind the filter of `kind`, and returns how the child ended.
fn in_child(kind: ThreadKind, action: impl Fn()) -> i32 {
    let filters = Filters::new(Switch::On).unwrap();
    // SAFETY: the child only installs the filter, runs `action`, which makes plain system calls,
    // and leaves with _exit.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0);
    if pid == 0 {
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

fn open_for_writing() {
    // SAFETY: a constant path and flags.
    unsafe { libc::openat(libc::AT_FDCWD, c"/dev/null".as_ptr(), libc::O_WRONLY) };
}

fn open_for_reading() {
    // SAFETY: a constant path and flags.
    unsafe { libc::openat(libc::AT_FDCWD, c"/dev/null".as_ptr(), libc::O_RDONLY) };
}

fn create_new() {
    let flags = libc::O_WRONLY | libc::O_CREAT | libc::O_EXCL;
    // It exists, so the call fails without a filter as well.
    // SAFETY: a constant path and flags.
    unsafe { libc::openat(libc::AT_FDCWD, c"/dev/null".as_ptr(), flags, 0o600) };
}

fn execute() {
    let argv = [c"/bin/true".as_ptr(), std::ptr::null()];
    // SAFETY: both arrays end with a null pointer.
    unsafe { libc::execve(argv[0], argv.as_ptr(), argv[1..].as_ptr()) };
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
    assert_eq!(in_child(ThreadKind::Api, open_for_reading), 0);
}

#[test]
fn threads_may_do_nothing_else() {
    for kind in ThreadKind::ALL {
        assert_eq!(in_child(kind, execute), EXIT_CODE, "{kind:?}");
        assert_eq!(in_child(kind, open_for_writing), EXIT_CODE, "{kind:?}");
        assert_eq!(in_child(kind, create_new), EXIT_CODE, "{kind:?}");
        assert_eq!(in_child(kind, make_executable_memory), EXIT_CODE, "{kind:?}");
        assert_eq!(in_child(kind, create_a_vm), EXIT_CODE, "{kind:?}");
    }
    assert_eq!(in_child(ThreadKind::Vcpu, open_for_reading), EXIT_CODE);
    assert_eq!(in_child(ThreadKind::Migrate, open_for_reading), EXIT_CODE);
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
        let expected = if kind == ThreadKind::Migrate { 0 } else { EXIT_CODE };
        assert_eq!(in_child(kind, || write_snapshot(&ram, &file)), expected, "{kind:?}");
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
    let calls: [&dyn Fn(); 3] = [
        &|| drop(socket(AddressFamily::UNIX, SocketType::STREAM, None)),
        &|| {
            let _ = connect_unspec(&ours);
        },
        &|| drop(getsockname(&ours)),
    ];
    for kind in ThreadKind::ALL {
        for (index, call) in calls.iter().enumerate() {
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
    assert!(filters.for_thread(ThreadKind::Vcpu).programs.is_none());
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
