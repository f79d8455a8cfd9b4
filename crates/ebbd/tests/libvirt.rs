//! A real libvirtd of this test's own, with a Linux guest in QEMU; and servers that break the
//! protocol.

#![allow(clippy::unwrap_used)]

#[allow(dead_code, reason = "only the guest is used")]
mod machine;

use std::fs;
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use ebb_host_policy::{Action, Mean};
use ebb_virtual_host::kernel::Kernel;
use ebbd::clock::now_ms;
use ebbd::monitors::libvirt::Libvirt;
use ebbd::monitors::libvirt::documents::Domain;
use ebbd::monitors::{Monitor, Place, Trouble};
use serde_json::Value;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixListener;

use machine::{LIMIT, MIB, initramfs};

const SIZE: u64 = 256 * MIB;
const CEILING: u64 = 192 * MIB;
const UUID: &str = "e342c075-1883-44d2-8913-cd3246d26c68";
/// What the places of the domain, and of its QEMU's own socket, have in them.
const DOMAIN: &str = "libvirt-sock";
const OWN: &str = "own/guest.sock";
/// The user that libvirtd runs as. In session mode, root's uses the directories of the system.
const OTHER: u32 = 65534;

/// A libvirtd in session mode.
struct Libvirtd {
    child: Child,
    directory: TempDir,
}

impl Libvirtd {
    fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().to_owned();
        fs::create_dir_all(path.join("config/libvirt")).unwrap();
        fs::create_dir(path.join("run")).unwrap();
        fs::create_dir(path.join("own")).unwrap();
        // No virtlogd.
        let log = "stdio_handler = \"file\"\n";
        fs::write(path.join("config/libvirt/qemu.conf"), log).unwrap();
        fs::write(path.join("libvirtd.conf"), "").unwrap();
        let kernel = Kernel::find(None).unwrap();
        fs::write(path.join("initramfs"), initramfs(&kernel)).unwrap();
        let domain = format!(
            "<domain type='qemu' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>\
             <name>guest</name><uuid>{UUID}</uuid>\
             <memory unit='MiB'>256</memory><os><type arch='x86_64' machine='q35'>hvm</type>\
             <kernel>{}</kernel><initrd>{}</initrd>\
             <cmdline>console=ttyS0 quiet panic=-1 mitigations=off</cmdline></os>\
             <features><acpi/></features><devices><controller type='usb' model='none'/>\
             <memballoon model='virtio'/></devices><qemu:commandline><qemu:arg value='-qmp'/>\
             <qemu:arg value='unix:{},server=on,wait=off'/></qemu:commandline></domain>",
            kernel.image.display(),
            path.join("initramfs").display(),
            path.join(OWN).display()
        );
        fs::write(path.join("guest.xml"), domain).unwrap();
        if rustix::process::geteuid().is_root() {
            for name in ["", "config", "config/libvirt", "run", "own", "initramfs"] {
                chown(path.join(name), Some(OTHER), Some(OTHER)).unwrap();
            }
        }
        Self { child: spawn(&path), directory }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn socket(&self) -> PathBuf {
        self.path("run/libvirt/libvirt-sock")
    }

    fn end(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// What `virsh` prints.
    fn virsh(&self, words: &[&str]) -> String {
        let uri = format!("qemu+unix:///session?socket={}", self.socket().display());
        let output = Command::new("virsh").args(["-q", "-c", &uri]).args(words).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        text + &String::from_utf8_lossy(&output.stderr)
    }

    fn state(&self) -> String {
        self.virsh(&["domstate", "guest"]).trim().to_owned()
    }

    /// The domain of this start, as a place.
    fn place(&self) -> Place {
        let id = self.virsh(&["domid", "guest"]).trim().parse().unwrap();
        Place { socket: self.socket(), domain: Some(Domain { uuid: UUID.to_owned(), id }) }
    }

    /// What the balloon leaves.
    fn rest(&self) -> u64 {
        let text = self.virsh(&["dommemstat", "guest"]);
        let line = text.lines().find_map(|line| line.strip_prefix("actual "));
        line.map_or(0, |kib| kib.trim().parse::<u64>().unwrap() * 1024)
    }
}

impl Drop for Libvirtd {
    fn drop(&mut self) {
        self.virsh(&["destroy", "guest"]);
        self.end();
    }
}

fn spawn(path: &Path) -> Child {
    let mut command = if rustix::process::geteuid().is_root() {
        let mut command = Command::new("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "libvirtd"]);
        command
    } else {
        Command::new("libvirtd")
    };
    command.arg("-f").arg(path.join("libvirtd.conf")).current_dir("/").env("HOME", path);
    command.env("XDG_RUNTIME_DIR", path.join("run")).env("XDG_CONFIG_HOME", path.join("config"));
    command.env("XDG_CACHE_HOME", path.join("cache")).env("XDG_DATA_HOME", path.join("data"));
    command.stderr(Stdio::null()).spawn().unwrap()
}

/// A daemon for its domains; killed when dropped.
struct Daemon(Child);

impl Daemon {
    fn start(libvirtd: &Libvirtd, policy: &str) -> Self {
        let levels = "tight_percent = 3\npressed_percent = 2\nemergency_percent = 1\n";
        Self::configured(libvirtd, &format!("[policy]\n{levels}{policy}"))
    }

    /// On a host that counts as pressed, with a domain that is not in use and has nothing for a
    /// balloon.
    fn start_pressed(libvirtd: &Libvirtd) -> Self {
        let levels = "tight_percent = 99\npressed_percent = 98\nemergency_percent = 1\n";
        let profile = format!("class = \"parked\"\nreserve_bytes = {SIZE}\n");
        let policy = format!("[policy]\n{levels}[policy.default]\n{profile}");
        Self::configured(libvirtd, &format!("snapshots = \"/nonexistent\"\n{policy}"))
    }

    fn configured(libvirtd: &Libvirtd, more: &str) -> Self {
        let text = format!(
            "machines = [\"{}\"]\nlibvirt = [\"{}\"]\n{more}",
            libvirtd.path("own").display(),
            libvirtd.socket().display()
        );
        fs::write(libvirtd.path("ebbd.toml"), text).unwrap();
        let mut program = Command::new(env!("CARGO_BIN_EXE_ebbd"));
        program.arg("--config").arg(libvirtd.path("ebbd.toml"));
        program.arg("--state").arg(libvirtd.path("state"));
        Self(program.arg("--socket").arg(libvirtd.path("ebbd.sock")).spawn().unwrap())
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The daemon's status.
fn status(libvirtd: &Libvirtd) -> Value {
    use std::io::{Read as _, Write as _};
    let Ok(mut stream) = std::os::unix::net::UnixStream::connect(libvirtd.path("ebbd.sock")) else {
        return Value::Null;
    };
    let request = b"GET /status HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
    stream.write_all(request).unwrap();
    let mut text = String::new();
    let _ = stream.read_to_string(&mut text);
    let body = text.split_once("\r\n\r\n").map_or("", |(_, body)| body);
    serde_json::from_str(body).unwrap_or_default()
}

/// Of the status, the machine whose socket's path has this in it.
fn machine(libvirtd: &Libvirtd, socket: &str) -> Value {
    let status = status(libvirtd);
    let mut machines = status["machines"].as_array().into_iter().flatten();
    let is_meant = |it: &&Value| it["socket"].as_str().is_some_and(|it| it.contains(socket));
    machines.find(is_meant).cloned().unwrap_or_default()
}

#[track_caller]
fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let started = Instant::now();
    while !is_so() {
        assert!(started.elapsed() < LIMIT, "not in time: {what}");
        sleep(Duration::from_millis(100));
    }
}

/// Pauses that are this program's, and another client's.
async fn pause(libvirtd: &Libvirtd, place: &Place) {
    const PAUSE: Action = Action::Pause { for_ms: 1000 };
    let mut monitor = Monitor::at(place).await.unwrap();
    for _ in 0..2 {
        monitor.act(PAUSE, Duration::ZERO).await.unwrap();
        assert_eq!(libvirtd.state(), "paused");
    }
    assert!(monitor.look(now_ms(), 2000).await.unwrap().is_paused);
    monitor.act(Action::Resume, Duration::ZERO).await.unwrap();
    assert_eq!(libvirtd.state(), "running");
    libvirtd.virsh(&["suspend", "guest"]);
    let refused = monitor.act(PAUSE, Duration::ZERO).await;
    assert!(matches!(refused, Err(Trouble::Refused(_))), "{refused:?}");
    let absurd = Action::Balloon { target_bytes: SIZE };
    assert!(matches!(monitor.act(absurd, Duration::ZERO).await, Err(Trouble::Refused(_))));
    assert_eq!(libvirtd.state(), "paused");
    libvirtd.virsh(&["resume", "guest"]);
}

/// A connection over which the domain may be stopped.
async fn keeping(libvirtd: &Libvirtd) -> Monitor {
    let mut monitor = Monitor::at(&libvirtd.place()).await.unwrap();
    monitor.keep_in(Path::new("/nonexistent"));
    monitor
}

async fn may_be_stopped(libvirtd: &Libvirtd) -> bool {
    let seen = keeping(libvirtd).await.look(now_ms(), 2000).await.unwrap();
    seen.means.has(Mean::Stop)
}

/// Stops the domain, until that has ended.
async fn stop(libvirtd: &Libvirtd) -> Monitor {
    let mut monitor = keeping(libvirtd).await;
    monitor.act(Action::Stop, Duration::ZERO).await.unwrap();
    let again = monitor.act(Action::Stop, Duration::ZERO).await;
    assert!(matches!(again, Err(Trouble::Refused(_))), "{again:?}");
    let started = Instant::now();
    while monitor.is_stopping() {
        assert!(started.elapsed() < LIMIT, "it is not stopped in time");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    monitor
}

#[test]
fn a_domain_that_is_stopped_goes_on_with_its_next_start() {
    let libvirtd = Libvirtd::start();
    eventually("libvirtd serves its socket", || libvirtd.socket().exists());
    libvirtd.virsh(&["define", libvirtd.path("guest.xml").to_str().unwrap()]);
    let started = libvirtd.virsh(&["start", "guest"]);
    eventually("the domain runs", || libvirtd.state() == "running");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    assert!(runtime.block_on(may_be_stopped(&libvirtd)), "{started}");

    // What cannot be written is no reason to lose the machine.
    let images = libvirtd.path("config/libvirt/qemu/save");
    fs::rename(&images, libvirtd.path("moved")).unwrap();
    fs::write(&images, "no directory").unwrap();
    let mut monitor = runtime.block_on(stop(&libvirtd));
    assert_eq!(libvirtd.state(), "running");
    let seen = runtime.block_on(monitor.look(now_ms(), 2000)).unwrap();
    assert!(!seen.is_paused && !seen.means.has(Mean::Stop), "{seen:?}");

    fs::remove_file(&images).unwrap();
    fs::rename(libvirtd.path("moved"), &images).unwrap();
    let mut monitor = runtime.block_on(stop(&libvirtd));
    assert_eq!(libvirtd.state(), "shut off");
    let gone = runtime.block_on(monitor.look(now_ms(), 2000));
    assert!(gone.is_err(), "{gone:?}");
    start_again(&libvirtd);

    // A pause would last, and would be nobody's.
    libvirtd.virsh(&["suspend", "guest"]);
    assert!(!runtime.block_on(may_be_stopped(&libvirtd)));
    runtime.block_on(stop(&libvirtd));
    assert_eq!(libvirtd.state(), "paused");
    libvirtd.virsh(&["resume", "guest"]);

    // The daemon that has begun with it is killed.
    let mut daemon = Daemon::start_pressed(&libvirtd);
    eventually("it is being stopped", || libvirtd.state() != "running");
    daemon.0.kill().unwrap();
    daemon.0.wait().unwrap();
    eventually("it is stopped", || libvirtd.state() == "shut off");
    start_again(&libvirtd);
    drop(daemon);
    let _daemon = Daemon::start(&libvirtd, "");
    let journal = || fs::read_to_string(libvirtd.path("state/taken.json"));
    eventually("nothing is left to undo", || journal().is_ok_and(|text| text == "[]"));
    assert_eq!(libvirtd.state(), "running");
}

#[track_caller]
fn start_again(libvirtd: &Libvirtd) {
    libvirtd.virsh(&["start", "guest"]);
    eventually("it runs", || libvirtd.state() == "running");
    let reason = libvirtd.virsh(&["domstate", "--reason", "guest"]);
    assert!(reason.contains("restored"), "{reason}");
}

#[test]
fn a_domain_gets_everything_back() {
    let mut libvirtd = Libvirtd::start();
    eventually("libvirtd serves its socket", || libvirtd.socket().exists());
    let created = libvirtd.virsh(&["create", libvirtd.path("guest.xml").to_str().unwrap()]);
    eventually("the domain runs", || libvirtd.state() == "running");
    let squeeze =
        format!("[policy.default]\nceiling_bytes = {CEILING}\nreserve_bytes = {}\n", 16 * MIB);
    let mut daemon = Daemon::start(&libvirtd, &squeeze);
    eventually("the balloon is there", || (1..=CEILING).contains(&libvirtd.rest()));
    let domain = machine(&libvirtd, DOMAIN);
    assert_eq!(domain["name"], "guest", "{created} {domain}");
    assert_eq!(domain["monitor"], "libvirt");
    assert!(domain["machine"]["statistics"]["total_bytes"].is_u64(), "{domain}");
    let journal = fs::read_to_string(libvirtd.path("state/taken.json")).unwrap();
    let journal: Value = serde_json::from_str(&journal).unwrap();
    assert_eq!(journal[0]["domain"]["uuid"], UUID);
    // Its other socket is the same machine, which counts once.
    eventually("QEMU's own socket is known", || {
        let other = machine(&libvirtd, OWN);
        let trouble = other["trouble"].as_str().unwrap_or_default();
        other["machine"].is_null() && trouble.contains("domain guest of libvirt")
    });

    // It is killed: the watchdog releases the balloon.
    daemon.0.kill().unwrap();
    daemon.0.wait().unwrap();
    eventually("the balloon is released", || libvirtd.rest() == SIZE);

    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(pause(&libvirtd, &libvirtd.place()));
    assert!(!runtime.block_on(may_be_stopped(&libvirtd)), "nothing would start it again");

    // A pause that an earlier daemon has left ends; that of another client stays.
    libvirtd.virsh(&["suspend", "guest"]);
    let mut entry = journal[0].clone();
    entry["undo"] = "pause".into();
    let mut other = entry.clone();
    other["domain"]["id"] = (other["domain"]["id"].as_i64().unwrap() + 1).into();
    let path = libvirtd.path("state/taken.json");
    fs::write(&path, Value::from(vec![other]).to_string()).unwrap();
    daemon = Daemon::start(&libvirtd, "");
    let is_empty = || fs::read_to_string(&path).is_ok_and(|text| text == "[]");
    eventually("an entry of an earlier start is forgotten", is_empty);
    assert_eq!(libvirtd.state(), "paused");
    drop(daemon);
    fs::write(&path, Value::from(vec![entry]).to_string()).unwrap();
    let _daemon = Daemon::start(&libvirtd, "");
    eventually("the guest runs", || libvirtd.state() == "running");

    // libvirtd ends, and comes again; the domain outlives it.
    // The pause may end before the daemon has listed the domains.
    eventually("the domain is known", || machine(&libvirtd, DOMAIN)["machine"].is_object());
    let trouble = || machine(&libvirtd, DOMAIN)["trouble"].is_string();
    let pid = rustix::process::Pid::from_raw(libvirtd.child.id().cast_signed()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    eventually("the trouble is shown", trouble);
    libvirtd.end();
    libvirtd.child = spawn(libvirtd.directory.path());
    eventually("it works again", || {
        let machine = machine(&libvirtd, DOMAIN);
        machine["machine"].is_object() && machine["trouble"].is_null()
    });
    libvirtd.virsh(&["destroy", "guest"]);
    eventually("the machine has gone", || {
        status(&libvirtd)["machines"].is_array() && machine(&libvirtd, DOMAIN).is_null()
    });
}

/// What a server answers to everything.
async fn trouble_of(answer: Vec<u8>) -> Trouble {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut request = [0; 28];
        stream.read_exact(&mut request).await.unwrap();
        let _ = stream.write_all(&answer).await;
    });
    let domain = Domain { uuid: UUID.to_owned(), id: 1 };
    Libvirt::connect(&path, &domain).await.unwrap_err()
}

fn message(numbers: [u32; 7], content: &[u8]) -> Vec<u8> {
    let mut message: Vec<u8> = numbers.into_iter().flat_map(u32::to_be_bytes).collect();
    message.extend(content);
    message
}

#[tokio::test]
async fn servers_that_break_the_protocol_are_trouble() {
    const REMOTE: u32 = 0x2000_8086;
    let reply = |length, serial, status| [length, REMOTE, 1, 66, 1, serial, status];
    let event = message([28, REMOTE, 1, 107, 2, 0, 0], &[]);
    for (answer, words) in [
        (Vec::new(), "closed the connection"),
        (message(reply(u32::MAX, 1, 0), &[]), "a message of 4294967295 bytes"),
        (message(reply(4, 1, 0), &[]), "a message of 4 bytes"),
        (message(reply(36, 1, 0), &[0; 4]), "closed the connection"),
        (message(reply(28, 2, 0), &[]), "a reply to (2, 66), not (1, 66)"),
        (message(reply(28, 1, 0), &[]), "ends too early"),
        (message(reply(32, 1, 0), &[255; 4]), "ends too early"),
        (message(reply(32, 1, 7), &[0; 4]), "a message with the header"),
        (message(reply(36, 1, 0), &[0, 0, 0, 1, 0, 0, 0, 1]), "wants a password"),
        (message(reply(44, 1, 1), b"\0\0\0\0\0\0\0\0\0\0\0\x01\0\0\0\0"), "it refused"),
        (event.repeat(40_000), "no answer within"),
    ] {
        let trouble = trouble_of(answer).await.to_string();
        assert!(trouble.contains(words), "{words}: {trouble}");
    }
}
