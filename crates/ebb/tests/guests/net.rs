//! Network devices: streams in both directions over tap interfaces, links, limits, and connections
//! that continue over snapshots and migrations.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::process::Command as Program;
use std::thread::JoinHandle;
use std::time::Duration;

use ebb_agent::protocol::Command;
use ebb_vmm::api::{LimitsChange, LimitsInfo, LinkState, NetChange, NetInfo, RateLimits};

use crate::guest::{Guest, MIB};
use crate::harness::{Scene, Test, eventually, when};
use crate::moved::{Receive, Route, move_to};
use crate::saved::Restore;
use crate::setup::Setup;

/// The tests.
pub const TESTS: &[Test] = &[
    Test::new("net::streams_links_and_limits", 240, streams_links_and_limits),
    Test::new("net::connections_go_on", 300, connections_go_on),
    Test::new("net::interfaces_that_cannot_be_used", 120, interfaces_that_cannot_be_used),
];

const HOST: &str = "10.77.0.1";
const GUEST: &str = "10.77.0.2";
const MAC: &str = "02:00:00:00:00:07";
/// Time after which a connection without progress is a failure.
const PATIENCE: Duration = Duration::from_secs(60);

/// A tap interface; removed when dropped.
pub struct Tap<'a> {
    scene: &'a Scene,
    pub name: String,
}

impl<'a> Tap<'a> {
    pub fn new(scene: &'a Scene, number: u8) -> Self {
        let tap = Self { scene, name: format!("ebbtap{number}") };
        // Left behind by an earlier run, perhaps.
        let _ = tap.remove();
        assert!(tap.busybox(&["tunctl", "-t", &tap.name]), "{} cannot be created", tap.name);
        tap
    }

    /// Removes the interface, also from a process that uses it; returns whether it was there.
    fn remove(&self) -> bool {
        self.busybox(&["ip", "link", "delete", "dev", &self.name])
    }

    fn busybox(&self, arguments: &[&str]) -> bool {
        let output = Program::new(&self.scene.world.busybox).args(arguments).output().unwrap();
        output.status.success()
    }

    /// Gives the host's address to this interface.
    fn up(&self) {
        let netmask = ["netmask", "255.255.255.0"];
        let address = ["ifconfig", &self.name, HOST];
        assert!(self.busybox(&[&address[..], &netmask, &["up"]].concat()));
    }

    fn down(&self) {
        assert!(self.busybox(&["ifconfig", &self.name, "0.0.0.0", "down"]));
    }

    /// The value of `--net`.
    fn option(&self, more: &str) -> String {
        format!("tap={}{more}", self.name)
    }
}

impl Drop for Tap<'_> {
    fn drop(&mut self) {
        self.remove();
    }
}

fn shell(line: &str) -> Command {
    Command::Exec { argv: ["/bin/busybox", "sh", "-c", line].map(str::to_owned).to_vec() }
}

/// Runs a command line in the guest, which must succeed; returns its output.
#[track_caller]
pub fn run(guest: &Guest, line: &str) -> String {
    let result = guest.run(shell(line));
    assert_eq!(result["code"], 0, "{line}: {result}");
    result["stdout"].as_str().unwrap().to_owned()
}

#[track_caller]
fn start(scene: &Scene, tap: &Tap<'_>, more: &str) -> Guest {
    let option = tap.option(&format!(",mac={MAC}{more}"));
    let guest = Setup::new(scene).memory("256M").args(["--net", &option]).start();
    run(&guest, &format!("ifconfig eth0 {GUEST} netmask 255.255.255.0 up"));
    guest
}

/// Numbers that do not repeat within a stream, so that lost or swapped parts are found.
fn content(bytes: usize, seed: u64) -> Vec<u8> {
    let mut state = seed;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    std::iter::repeat_with(&mut next).flatten().take(bytes).collect()
}

/// A listener of the host, and its port.
fn listen() -> (TcpListener, u16) {
    let listener = TcpListener::bind((HOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    (listener, port)
}

fn accept(listener: &TcpListener) -> TcpStream {
    let (stream, _) = listener.accept().unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// Sends `content` to the guest, which sends it back from its file.
#[track_caller]
fn there_and_back(guest: &Guest, content: &[u8]) {
    let (listener, port) = listen();
    let receives = guest.send(shell(&format!("nc {HOST} {port} > /tmp/data")));
    accept(&listener).write_all(content).unwrap();
    assert_eq!(guest.outcome(receives).unwrap()["code"], 0);
    let sends = guest.send(shell(&format!("nc {HOST} {port} < /tmp/data")));
    let mut back = Vec::new();
    accept(&listener).read_to_end(&mut back).unwrap();
    assert_eq!(guest.outcome(sends).unwrap()["code"], 0);
    assert_eq!(back.len(), content.len());
    assert!(back == content, "the content differs");
}

fn net(guest: &Guest) -> NetInfo {
    guest.client().get("/net").unwrap()
}

fn set_link(guest: &Guest, link: LinkState) {
    let change = NetChange { device: "net0".to_owned(), link };
    let info: NetInfo = guest.client().put_json("/net", &change).unwrap();
    assert_eq!(info.devices[0].link, link);
}

fn wait_carrier(guest: &Guest, wanted: &str) {
    eventually("the guest sees its link", 30, || {
        let found = guest.read_file("/sys/class/net/eth0/carrier");
        when(found.trim() == wanted, || found)
    });
}

fn streams_links_and_limits(scene: &Scene) {
    let tap = Tap::new(scene, 0);
    tap.up();
    let guest = start(scene, &tap, ",mtu=1400");
    assert_eq!(guest.read_file("/sys/class/net/eth0/address").trim(), MAC);
    assert_eq!(guest.read_file("/sys/class/net/eth0/mtu").trim(), "1400");
    let device = &net(&guest).devices[0];
    assert_eq!((device.backend.as_str(), device.driver), (tap.option("").as_str(), true));

    let stream = content(8 << 20, 1);
    there_and_back(&guest, &stream);
    for direction in ["rx", "tx"] {
        let metric = |name| guest.metric(&format!("ebb_net_{name}{{kind=\"net0_{direction}\"}}"));
        let (frames, bytes) = (metric("frames_total"), metric("bytes_total"));
        assert!((8 * MIB..16 * MIB).contains(&bytes), "{direction}: {bytes}");
        // More than a packet of this MTU, although acknowledgements are counted as well: whole
        // segments pass, which the other side's kernel cuts.
        assert!(bytes / frames > 1500, "{direction}: {frames} frames of {bytes} bytes");
    }

    set_link(&guest, LinkState::Down);
    wait_carrier(&guest, "0");
    assert_ne!(guest.run(shell(&format!("ping -c 1 -W 1 {HOST}")))["code"], 0);
    set_link(&guest, LinkState::Up);
    wait_carrier(&guest, "1");
    run(&guest, &format!("ping -c 1 -W 30 {HOST}"));

    // A limit that nothing passes, until it is removed.
    let limit = |ops| {
        let limits = RateLimits { bandwidth: Some(ops), ..RateLimits::default() };
        let change = LimitsChange { device: "net0_tx".to_owned(), limits };
        let _: LimitsInfo = guest.client().put_json("/limits", &change).unwrap();
    };
    limit(1);
    let ping = guest.send(shell(&format!("ping -c 3 -W 40 {HOST}")));
    eventually("a frame is delayed", 30, || {
        let delayed = guest.metric("ebb_delayed_requests_total{kind=\"net0_tx\"}");
        when(delayed > 0, || delayed.to_string())
    });
    limit(0);
    assert_eq!(guest.outcome(ping).unwrap()["code"], 0);

    // Without its interface, the machine goes on.
    assert!(tap.remove());
    wait_carrier(&guest, "0");
    let device = &net(&guest).devices[0];
    assert_eq!((device.link, device.wanted_link), (LinkState::Down, LinkState::Up));
    assert!(guest.log().contains("the link is down"), "{}", guest.log());
    assert_ne!(guest.run(shell(&format!("ping -c 1 -W 1 {HOST}")))["code"], 0);
}

/// A connection over which the host sends a stream piece by piece.
struct Sender {
    stream: TcpStream,
    content: Vec<u8>,
    sent: usize,
}

impl Sender {
    fn new(guest: &Guest, seed: u64) -> (Self, u64) {
        let (listener, port) = listen();
        let command = guest.send(shell(&format!("nc {HOST} {port} > /tmp/data")));
        guest.wait_started(command);
        (Self { stream: accept(&listener), content: content(6 << 20, seed), sent: 0 }, command)
    }

    /// Starts to send the next part, in the background.
    fn send(mut self, bytes: usize) -> JoinHandle<Self> {
        std::thread::spawn(move || {
            let end = self.sent + bytes;
            self.stream.write_all(&self.content[self.sent..end]).unwrap();
            self.sent = end;
            self
        })
    }
}

/// The guest has received everything, and sends it back over a new connection.
#[track_caller]
fn finish(guest: &Guest, sender: Sender, command: u64) {
    let rest = sender.content.len() - sender.sent;
    let Sender { content, stream, .. } = sender.send(rest).join().unwrap();
    drop(stream);
    assert_eq!(guest.outcome(command).unwrap()["code"], 0);
    let (listener, port) = listen();
    let sends = guest.send(shell(&format!("nc {HOST} {port} < /tmp/data")));
    let mut back = Vec::new();
    accept(&listener).read_to_end(&mut back).unwrap();
    assert_eq!(guest.outcome(sends).unwrap()["code"], 0);
    assert!(back == content, "the content differs: {} of {} bytes", back.len(), content.len());
}

/// A connection continues after a restore, and after a migration to an interface with another name.
fn connections_go_on(scene: &Scene) {
    let (first, second) = (Tap::new(scene, 0), Tap::new(scene, 1));
    first.up();
    let guest = start(scene, &first, "");
    let (sender, command) = Sender::new(&guest, 2);
    let sending = sender.send(2 << 20);
    let file = scene.path("vm.snapshot");
    guest.save_and_end(&file);

    // Nothing in a snapshot is opened unasked.
    let (code, log) = Restore::new(scene, &file).refused();
    assert!(code == Some(1) && log.contains("--net"), "{log}");
    let twice = ["--net", "user", "--net", "user"];
    let (code, log) = Restore::new(scene, &file).args(twice).refused();
    assert!(code == Some(1) && log.contains("1 network devices"), "{log}");
    let guest = Restore::new(scene, &file).args(["--net", &first.option("")]).start();
    assert_eq!(net(&guest).devices[0].mac.to_string(), MAC);
    let sender = sending.join().unwrap();

    let sending = sender.send(2 << 20);
    let receive = Receive::new(scene, "second", Route::Unix).args(["--net", &second.option("")]);
    let (guest, _) = move_to(receive, guest, [] as [&str; 0]);
    first.down();
    second.up();
    finish(&guest, sending.join().unwrap(), command);
    // The driver has announced itself, and has said so: it is not asked again.
    let announced = "ebb_net_frames_total{kind=\"net0_tx\"}";
    assert!(guest.metric(announced) > 0);
    there_and_back(&guest, &content(1 << 20, 3));

    // With another address: the guest finds it in the device, but keeps its own.
    guest.save_and_end(&file);
    let option = second.option(",mac=02:00:00:00:00:08");
    let guest = Restore::new(scene, &file).args(["--net", &option]).start();
    assert_eq!(net(&guest).devices[0].mac.to_string(), "02:00:00:00:00:08");
    there_and_back(&guest, &content(1 << 20, 4));
}

fn interfaces_that_cannot_be_used(scene: &Scene) {
    let tap = Tap::new(scene, 0);
    tap.up();
    let refused = |option: &str| {
        let (code, log) =
            Setup::new(scene).socket("other").args(["--net", option]).spawn().wait_end();
        assert_eq!(code, Some(1), "{option}: {log}");
        log
    };
    let log = refused("tap=ebbnone");
    assert!(log.contains("ip tuntap add dev ebbnone mode tap user"), "{log}");
    assert!(!fs::exists("/sys/class/net/ebbnone").unwrap(), "it was created");
    assert!(refused("tap=lo").contains("not a tap interface"));
    assert!(refused("fd=77").contains("not open"));
    let _guest = start(scene, &tap, "");
    assert!(refused(&tap.option("")).contains("in use by another process"));
}
