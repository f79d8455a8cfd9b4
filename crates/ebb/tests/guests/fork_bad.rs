//! Checkpoints and forks that are refused, and those where something is missing, slow or hostile:
//! a full disk, a slow one, a host without memory, a device that may not be opened, a guest's agent
//! that lies.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{IoSlice, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command as Program, Output};
use std::time::Duration;

use ebb_agent::protocol::Command;
use ebb_guest_agent::wire::PORT;
use ebb_vmm::api::{CheckpointReport, Client, CopiedWhile, VmInfo, VmState};
use ebb_vmm::checkpoint::Held;
use rustix::fs::statvfs;
use rustix::mount::{
    MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_bind, mount_change,
    mount_remount, unmount,
};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags,
    SocketType, recv, send, sendmsg, socketpair,
};
use rustix::thread::{UnshareFlags, unshare_unsafe};
use serde_json::Value;

use crate::false_agent;
use crate::forked::{checkpoint, failure, fork, holders, silently, unique};
use crate::guest::{Guest, MIB};
use crate::harness::{Scene, Test, eventually, when};
use crate::place::PROGRAM_IN_GUEST;
use crate::saved::Restore;
use crate::setup::Setup;

/// The tests.
pub const TESTS: &[Test] = &[
    Test::new("fork_bad::refused_requests", 240, refused_requests),
    Test::new("fork_bad::too_little_room_and_time", 400, too_little_room_and_time),
    Test::new("fork_bad::an_agent_that_lies", 400, an_agent_that_lies),
];

/// A file system of its own, which can become full.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn new(path: PathBuf) -> Self {
        fs::create_dir(&path).unwrap();
        mount("none", &path, "tmpfs", MountFlags::empty(), c"size=4m").unwrap();
        Self(path)
    }

    /// Also files without names take room.
    #[track_caller]
    fn assert_empty(&self) {
        let statistics = statvfs(&self.0).unwrap();
        assert_eq!(statistics.f_bfree, statistics.f_blocks);
        assert_eq!(fs::read_dir(&self.0).unwrap().count(), 0);
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = unmount(&self.0, UnmountFlags::DETACH);
    }
}

/// Checks that a machine goes on, and that nothing is left of a checkpoint that was not made: no
/// name, and no process besides those that there were `before`.
#[track_caller]
fn assert_no_checkpoint(guest: &Guest, name: &str, before: &BTreeSet<i64>) {
    assert_eq!(guest.vm().state, VmState::Running);
    guest.write_file("/tmp/note", name);
    assert_eq!(guest.read_file("/tmp/note"), name);
    assert!(!Path::new(&format!("/run/ebb/checkpoints/{name}.sock")).exists());
    assert_eq!(holders(), *before);
}

/// A checkpoint waits for clients that say nothing, or take their time, and serves others
/// meanwhile.
#[track_caller]
fn slow_clients(name: &str) {
    let connect = || {
        let path = format!("/run/ebb/checkpoints/{name}.sock");
        UnixStream::connect(path).unwrap()
    };
    let ask = |stream: &UnixStream| {
        let flags = SocketFlags::CLOEXEC;
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let rights = [theirs.as_fd()];
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(&rights)));
        let byte = [IoSlice::new(&[0])];
        sendmsg(stream, &byte, &mut ancillary, SendFlags::NOSIGNAL).unwrap();
        set_socket_timeout(&ours, Timeout::Recv, Some(Duration::from_secs(30))).unwrap();
        send(&ours, b"\"info\"", SendFlags::NOSIGNAL).unwrap();
        let mut answer = [0; 4096];
        let (length, _) = recv(&ours, &mut answer, RecvFlags::empty()).unwrap();
        let answer = String::from_utf8_lossy(&answer[..length]);
        assert!(answer.contains(name), "{answer}");
    };
    let (_silent, slow) = ([connect(), connect()], connect());
    ask(&connect());
    std::thread::sleep(Duration::from_millis(500));
    ask(&slow);
}

fn too_little_room_and_time(scene: &Scene) {
    let path = |name: &str| scene.path(name).to_str().unwrap().to_owned();
    let small = SmallDisk::new(scene.path("small"));
    fs::write(path("raw"), vec![0x5a; 64 << 20]).unwrap();
    let root = Path::new("/sys/fs/cgroup");
    fs::write(root.join("cgroup.subtree_control"), "+memory +cpu").unwrap();
    let cgroup = unique(scene, "limits");
    let parent = Setup::new(scene)
        .memory("size=192M")
        .args(["--forkable", "--log", "warn,ebb_vmm::vm::fork=debug"])
        .args(["--cgroup", &format!("path={cgroup}"), "--disk", &format!("path={}", path("raw"))])
        .start();
    let limit = |file: &str, value: &str| fs::write(root.join(&cgroup).join(file), value).unwrap();
    let socket = parent.socket().to_str().unwrap();
    let (name, before) = (unique(scene, "copied"), holders());

    // The disk that copies go to is full.
    let full = ["ctl", socket, "checkpoint", &name, "--copy-disks", &path("small")];
    let text = failure(scene, &full);
    assert!(text.contains("disk0") && text.contains("No space left on device"), "{text}");
    small.assert_empty();
    assert_no_checkpoint(&parent, &name, &before);
    let (api, disk) = (path("clone"), format!("path={}", path("small/clone")));
    let text = failure(scene, &["fork", socket, "--api", &api, "--disk", &disk]);
    assert!(text.contains("disk0") && text.contains("No space left on device"), "{text}");
    assert!(!Path::new(&api).exists());
    small.assert_empty();
    assert_no_checkpoint(&parent, &name, &before);

    // Copying takes longer than a guest may stand still: the monitor has a hundredth of a
    // processor's time.
    limit("cpu.max", "1000 100000");
    let slow = ["ctl", socket, "checkpoint", &name, "--copy-disks", &path("")];
    let text = failure(scene, &slow);
    limit("cpu.max", "max 100000");
    assert!(text.contains("longer than 1s until disk0 is copied"), "{text}");
    assert_no_checkpoint(&parent, &name, &before);

    huge_pages_without_memory(scene, &parent, &root.join(&cgroup), &name);
    slow_clients(&name);
    silently(scene, &["checkpoints", "remove", &name]);
    parent.end();
}

/// The memory that a checkpoint leaves in small pages cannot become huge again: there is room in
/// the cgroup for the machine, but not for one huge page more.
fn huge_pages_without_memory(scene: &Scene, parent: &Guest, cgroup: &Path, name: &str) {
    let read = |file: &str| fs::read_to_string(cgroup.join(file)).unwrap();
    parent.run(Command::Hold { bytes: 112 * MIB, pattern: 1 });
    checkpoint(scene, parent, name);
    // The same pages for the most part: the guest has not as many others.
    let waiting = StoppedThread::new(parent.pid(), "fork");
    parent.run(Command::Release);
    parent.run(Command::Hold { bytes: 112 * MIB, pattern: 2 });
    let _ = fs::write(cgroup.join("memory.swap.max"), "0");
    let used: u64 = read("memory.current").trim().parse().unwrap();
    fs::write(cgroup.join("memory.max"), (used + MIB).to_string()).unwrap();
    drop(waiting);
    let lines = |text: &str| {
        let log = parent.log();
        log.lines().filter(|line| line.contains(text)).map(str::to_owned).collect::<Vec<_>>()
    };
    let refused = eventually("two passes find no memory", 60, || {
        let refused = lines("there is no memory to make blocks huge");
        when(refused.len() >= 2, || parent.log()).map(|()| refused)
    });
    assert_ne!(refused[0], refused[1], "the next pass comes later");
    // Blocks that were huge already count, too.
    let huge = lines("are huge again").len();
    let events = read("memory.events");
    assert!(events.lines().any(|line| line == "oom_kill 0"), "{events}");
    fs::write(cgroup.join("memory.max"), "max").unwrap();
    eventually("memory is huge again", 120, || {
        when(lines("are huge again").len() > huge, || parent.log())
    });
    assert_eq!(parent.wrong_pages(), 0);
}

/// A thread of another process that stands still until this is dropped (ptrace(2)).
struct StoppedThread(libc::pid_t);

impl StoppedThread {
    fn new(process: u32, name: &str) -> Self {
        let threads = fs::read_dir(format!("/proc/{process}/task")).unwrap();
        let has_name = |thread: &PathBuf| {
            fs::read_to_string(thread.join("comm")).is_ok_and(|comm| comm.trim_end() == name)
        };
        let thread = threads.map(|thread| thread.unwrap().path()).find(has_name).unwrap();
        let thread = thread.file_name().unwrap().to_str().unwrap().parse().unwrap();
        ptrace(libc::PTRACE_SEIZE, thread);
        ptrace(libc::PTRACE_INTERRUPT, thread);
        // SAFETY: waits for the thread, and takes no status.
        let stopped = unsafe { libc::waitpid(thread, std::ptr::null_mut(), libc::__WALL) };
        assert_eq!(stopped, thread);
        Self(thread)
    }
}

impl Drop for StoppedThread {
    fn drop(&mut self) {
        ptrace(libc::PTRACE_DETACH, self.0);
    }
}

fn ptrace(request: libc::c_uint, thread: libc::pid_t) {
    // SAFETY: none of these requests has an address or data, or accesses memory.
    let result = unsafe { libc::ptrace(request, thread, 0_usize, 0_usize) };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
}

/// Text that a terminal only shows.
#[track_caller]
fn assert_plain(text: &str) {
    assert!(!text.chars().any(|c| c.is_control() && c != '\n'), "{text:?}");
}

/// Whatever the agents of guests say, or do not say, `ebb` ends, names it, and shows no control
/// characters; machines are made all the same.
fn an_agent_that_lies(scene: &Scene) {
    let vsock = scene.path("vsock");
    let parent = Setup::new(scene)
        .initrd(&scene.world.hostile_initrd)
        .memory("size=192M")
        .args(["--forkable", "--vsock", &format!("path={}", vsock.display())])
        .start();
    let argv = [PROGRAM_IN_GUEST, false_agent::ARGUMENT].map(str::to_owned).to_vec();
    let job = parent.send(Command::Exec { argv });
    parent.wait_started(job);
    eventually("the agent listens", 60, || crate::vsock::connect(&vsock, PORT).map(drop));
    let socket = parent.socket().to_str().unwrap();
    let (name, before) = (unique(scene, "lied-to"), holders());
    for said in false_agent::BEFORE {
        let text = failure(scene, &["ctl", socket, "checkpoint", &name]);
        assert!(text.contains(said) && text.contains("--hooks off"), "{said}: {text}");
        assert!(text.contains("after the checkpoint"), "{text}");
        assert_plain(&text);
        assert_no_checkpoint(&parent, &name, &before);
    }
    checkpoint_without_hooks(scene, socket, &name);
    // Silence is waited for once, in both.
    let (silent, forks) = std::thread::scope(|scope| {
        let never = unique(scene, "never");
        let silent = scope.spawn(move || failure(scene, &["ctl", socket, "checkpoint", &never]));
        let forks = fork_lied_to(scene, &name);
        (silent.join().unwrap(), forks)
    });
    assert!(silent.contains("have not ended after 60s"), "{silent}");
    assert_plain(&silent);
    let text = String::from_utf8_lossy(&forks.stderr);
    assert_eq!(forks.status.code(), Some(1), "{text}");
    assert!(text.contains("the machine runs, but its guest's agent has failed"), "{text}");
    assert_plain(&text);
    let report: Value = serde_json::from_slice(&forks.stdout).unwrap();
    let machines = report["machines"].as_array().unwrap();
    let reseeded: Vec<_> = machines.iter().map(|made| made["reseeded"].as_bool()).collect();
    let mut expected = vec![Some(false); false_agent::BAD_FORKS];
    expected.push(Some(true));
    assert_eq!(reseeded, expected, "{report}");
    for made in machines {
        let api = made["api"].as_str().unwrap();
        let vm: VmInfo = Client::new(api, Duration::from_secs(10)).get("/vm").unwrap();
        assert_eq!(vm.state, VmState::Running);
        silently(scene, &["ctl", api, "kill"]);
    }
    without_userfaultfd(scene, &name);
    silently(scene, &["checkpoints", "remove", &name]);
    parent.end();
}

fn checkpoint_without_hooks(scene: &Scene, socket: &str, name: &str) {
    silently(scene, &["ctl", socket, "checkpoint", name, "--hooks", "off"]);
}

/// One machine for each answer of its agent, and one whose agent does what it should.
fn fork_lied_to(scene: &Scene, name: &str) -> Output {
    let (api, sockets) = (scene.path("lied-to{}"), scene.path("lied-to{}.vsock"));
    let count = (false_agent::BAD_FORKS + 1).to_string();
    Program::new(&scene.world.ebb)
        .args(["fork", name, "-n", &count, "--json", "--api"])
        .arg(api)
        .arg("--vsock")
        .arg(format!("path={}", sockets.display()))
        .output()
        .unwrap()
}

/// A client that may not open /dev/userfaultfd makes a machine whose memory is copied while it
/// stands still.
fn without_userfaultfd(scene: &Scene, name: &str) {
    let vsock = format!("path={}", scene.path("clone.vsock").display());
    let more = ["--vsock", &vsock, "--hooks", "off"];
    let client = move || {
        let device = "/dev/userfaultfd";
        // SAFETY: this thread's root and working directory are its own from now on, and no other
        // code uses the thread.
        unsafe { unshare_unsafe(UnshareFlags::NEWNS) }.unwrap();
        mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC).unwrap();
        mount_bind(device, device).unwrap();
        mount_remount(device, MountFlags::BIND | MountFlags::NODEV, "").unwrap();
        let error = File::options().read(true).write(true).open(device).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::PermissionDenied);
        let forks = fork(scene, name, "clone", 1, &more);
        let guest = &forks[0].guest;
        guest.write_file("/tmp/note", "before");
        let saved = guest.save(&scene.path("of-a-fork.snapshot"));
        assert_eq!(saved.copied, CopiedWhile::Stopped, "{saved:?}");
        assert_eq!(guest.read_file("/tmp/note"), "before");
    };
    std::thread::scope(|scope| scope.spawn(client).join()).unwrap();
}

fn refused_requests(scene: &Scene) {
    let plain = Setup::new(scene).start();
    let socket = plain.socket().to_str().unwrap().to_owned();
    let name = unique(scene, "refused");
    let text = failure(scene, &["ctl", &socket, "checkpoint", &name]);
    assert!(text.contains("--forkable"), "{text}");
    assert!(failure(scene, &["fork", &socket]).contains("--forkable"));
    assert!(failure(scene, &["fork", &name]).contains("there is no checkpoint"));
    plain.end();

    let refused = |memory: &str| {
        let setup = Setup::new(scene).memory(memory).args(["--forkable"]);
        let (code, log) = setup.spawn().wait_end();
        assert_eq!(code, Some(2), "{log}");
        log
    };
    assert!(refused("size=512M,backing=memfd").contains("--forkable"));
    assert!(refused("size=512M,merge=owner").contains("--forkable"));

    let guest = Setup::new(scene).socket("second").args(["--forkable"]).start();
    let socket = guest.socket().to_str().unwrap().to_owned();
    for bad in ["a b", "..\u{e9}", &"x".repeat(65)] {
        let text = failure(scene, &["ctl", &socket, "checkpoint", bad]);
        assert!(text.contains("64 letters"), "{text}");
    }
    checkpoint(scene, &guest, &name);
    let text = failure(scene, &["ctl", &socket, "checkpoint", &name]);
    assert!(text.contains("another process listens"), "{text}");
    let api = scene.path("fork");
    let api = api.to_str().unwrap();
    let text = failure(scene, &["fork", &name, "-n", "2", "--api", api]);
    assert!(text.contains("{}"), "{text}");
    let vsock = format!("path={api}.vsock");
    let text = failure(scene, &["fork", &name, "--api", api, "--vsock", &vsock]);
    assert!(text.contains("0 socket devices"), "{text}");
    let text = failure(scene, &["fork", &name, "--api", api, "--disk", "path=/nowhere"]);
    assert!(text.contains("0 disks"), "{text}");
    let text = failure(scene, &["fork", &name, "-n", "10000"]);
    assert!(text.contains("room for"), "{text}");
    let text = failure(scene, &["fork", &name, "--api", &socket]);
    assert!(text.contains("another process listens"), "{text}");
    assert!(!Path::new(api).exists() && !Path::new(&format!("{api}.vsock")).exists());
    // The log of the second machine cannot be opened: the first one goes on.
    fs::create_dir(scene.path("log0")).unwrap();
    let (logs, pattern) = (scene.path("log{}/log"), scene.path("logged{}"));
    let (logs, pattern) = (logs.to_str().unwrap(), pattern.to_str().unwrap());
    let arguments = ["fork", &name, "-n", "3", "--api", pattern, "--log-file", logs];
    let text = failure(scene, &arguments);
    assert!(text.contains("machine 1") && text.contains("log1/log"), "{text}");
    assert!(!scene.path("logged1").exists() && !scene.path("logged2").exists());
    silently(scene, &["ctl", scene.path("logged0").to_str().unwrap(), "kill"]);
    // Not a socket, and none at all.
    let (status, text) = guest.refused("PUT", "/vm/checkpoint", r#"{"name": "x"}"#);
    assert_eq!(status, 422, "{text}");
    let target = serde_json::json!({ "name": "x" });
    let null = File::open("/dev/null").unwrap();
    let error = guest
        .client()
        .put_json_with::<CheckpointReport>("/vm/checkpoint", &target, &[null.as_fd()])
        .unwrap_err();
    assert!(error.to_string().contains("one socket"), "{error}");
    // Clients that say nothing, or nonsense, do not keep others from a checkpoint.
    let place = format!("/run/ebb/checkpoints/{name}.sock");
    let silent: Vec<_> = (0..4).map(|_| UnixStream::connect(&place).unwrap()).collect();
    let mut wrong = UnixStream::connect(&place).unwrap();
    wrong.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    // Nor do many that are at work, none of which loses its connection.
    let at_work: Vec<_> = (0..40).map(|_| Held::connect(Path::new(&place)).unwrap()).collect();
    for _ in 0..2 {
        let memory = at_work.iter().map(|held| held.info().unwrap().0.memory_bytes);
        assert!(memory.into_iter().all(|bytes| bytes >= 512 * MIB));
    }
    let forks = fork(scene, &name, "after", 1, &[]);
    assert_eq!(forks[0].guest.vm().state, VmState::Running);
    assert!(at_work.iter().all(|held| held.info().is_ok()));
    drop((silent, wrong, at_work));
    // A guest that has been paused, and one that has a snapshot written.
    guest.put("/vm/pause");
    assert_eq!(checkpoint(scene, &guest, &unique(scene, "paused")).paused_us, 0);
    let paused = fork(scene, &unique(scene, "paused"), "paused", 1, &[]);
    assert_eq!(paused[0].guest.vm().state, VmState::Running);
    let report = paused[0].guest.save(&scene.path("of-a-fork.snapshot"));
    assert_eq!(report.copied, CopiedWhile::Running, "{report:?}");
    assert_eq!(guest.vm().state, VmState::Paused);
    for name in [&name, &unique(scene, "paused")] {
        silently(scene, &["checkpoints", "remove", name]);
    }
    guest.put("/vm/resume");
    guest.end();
    let restored = Restore::new(scene, &scene.path("of-a-fork.snapshot"))
        .socket("restored")
        .args(["--forkable"])
        .start();
    // Memory that is mapped from a snapshot's file is forked, too.
    let socket = restored.socket().to_str().unwrap().to_owned();
    let forks = fork(scene, &socket, "of-restored", 2, &[]);
    restored.end();
    for fork in forks {
        fork.guest.write_file("/tmp/x", "written");
        assert_eq!(fork.guest.read_file("/tmp/x"), "written");
    }
}
