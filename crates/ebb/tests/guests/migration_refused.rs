//! Failed migrations: the guest continues at the source, and the destination's monitor ends without
//! leaving files behind.

use std::ffi::OsString;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::thread;
use std::time::{Duration, Instant};

use ebb_agent::protocol::Command;
use ebb_vmm::api::VmState;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair, KeyUsagePurpose};
use rustix::process::Signal;

use crate::clocks::{complaints, watch, watched, watched_since};
use crate::guest::{Guest, MIB};
use crate::harness::{Scene, Test, eventually, when};
use crate::moved::{Migrate, Receive, Route, move_to, unix, unused_address, wait_sending};
use crate::saved::boot_files;
use crate::setup::Setup;

/// The tests.
pub const TESTS: &[Test] = &[
    Test::new("migration::nobody_there", 240, nobody_there),
    Test::new("migration::cut_off", 400, cut_off),
    Test::new("migration::cancelled_or_late", 300, cancelled_or_late),
    Test::new("migration::strangers", 240, strangers),
    Test::new("migration::does_not_fit", 240, does_not_fit),
    Test::new("migration::described_paths_are_not_opened", 240, described_paths_are_not_opened),
    Test::new("migration::over_tls", 240, over_tls),
    Test::new(
        "migration::guest_ends_or_starts_again_on_the_way",
        300,
        guest_ends_or_starts_again_on_the_way,
    ),
];

const NONE: [&str; 0] = [];

/// Runs a migration that must fail, checks that the guest still runs, and returns the message.
#[track_caller]
fn refused(scene: &Scene, guest: &Guest, address: &str, options: &[&str]) -> String {
    let seen = watched(guest);
    let (code, report, message) = Migrate::new(scene, guest, address).args(options).run();
    assert_ne!(code, Some(0), "{report} {message}");
    runs_on(guest);
    watched_since(guest, &seen);
    let error = report["error"].as_str().unwrap_or_default();
    format!("{error}\n{message}")
}

/// Checks that the guest still runs at the source, with its memory.
#[track_caller]
fn runs_on(guest: &Guest) {
    assert_eq!(guest.vm().state, VmState::Running);
    assert_eq!(guest.wrong_pages(), 0);
}

fn start(scene: &Scene) -> Guest {
    let guest = Setup::new(scene).memory("size=256M").balloon("reporting=on,hinting=on").start();
    guest.run(Command::Hold { bytes: 96 * MIB, pattern: 51 });
    watch(&guest);
    guest
}

fn nobody_there(scene: &Scene) {
    let guest = start(scene);
    let message = refused(scene, &guest, &unused_address(), &[]);
    assert!(message.contains("refused"), "{message}");
    let message = refused(scene, &guest, &unix(&scene.path("nothing")), &[]);
    assert!(message.contains("nothing"), "{message}");
    let message = refused(scene, &guest, "tcp:127.0.0.1", &[]);
    assert!(message.contains("HOST:PORT"), "{message}");
    // Also refused on this host, where any user could listen.
    for address in ["tcp:192.0.2.1:4444", "tcp:localhost:4444"] {
        let message = refused(scene, &guest, address, &[]);
        assert!(message.contains("--insecure") && message.contains("--tls-cert"), "{message}");
    }
    assert_eq!(complaints(&guest), "");
}

/// Either monitor is killed while memory is sent.
fn cut_off(scene: &Scene) {
    let mut guest = start(scene);
    for (round, sent) in [0, 8 * MIB, 40 * MIB].into_iter().enumerate() {
        let (mut receiver, address) =
            Receive::new(scene, &format!("victim{round}"), Route::Unix).start();
        let mut client = Migrate::new(scene, &guest, &address).args(["--bandwidth", "20M"]).spawn();
        if sent > 0 {
            wait_sending(&guest, sent);
        }
        receiver.signal(Signal::KILL);
        receiver.wait_end();
        assert_ne!(client.wait().unwrap().code(), Some(0));
        runs_on(&guest);
    }
    // A receiver whose source dies ends by itself.
    let (mut receiver, address) = Receive::new(scene, "orphan", Route::Tcp).start();
    let mut client = Migrate::new(scene, &guest, &address).args(["--bandwidth", "20M"]).spawn();
    wait_sending(&guest, 8 * MIB);
    guest.signal(Signal::KILL);
    guest.wait_end();
    assert_ne!(client.wait().unwrap().code(), Some(0));
    let (code, log) = receiver.wait_end();
    assert_eq!(code, Some(1), "{log}");
    assert!(!receiver.socket().exists(), "the socket is left behind");
}

fn cancelled_or_late(scene: &Scene) {
    let guest = start(scene);
    let slow = ["--bandwidth", "10M"];
    let (mut receiver, address) = Receive::new(scene, "cancelled", Route::Tcp).start();
    let mut client = Migrate::new(scene, &guest, &address).args(slow).spawn();
    wait_sending(&guest, MIB);
    // No second migration, and no operation that needs exclusive access to the machine.
    let message = refused_while_moving(scene, &guest, &address);
    assert!(message.contains("migrat"), "{message}");
    let message = guest.try_save(&scene.path("no.snapshot")).unwrap_err();
    assert!(message.contains("migrat"), "{message}");
    // Pause and resume are allowed.
    guest.put("/vm/pause");
    guest.put("/vm/resume");
    guest.put("/vm/migration/cancel");
    assert_ne!(client.wait().unwrap().code(), Some(0));
    assert_eq!(receiver.wait_end().0, Some(1));
    runs_on(&guest);

    let (mut receiver, address) = Receive::new(scene, "late", Route::Tcp).start();
    let message = refused(scene, &guest, &address, &["--bandwidth", "10M", "--timeout", "2"]);
    assert!(message.contains("2 s"), "{message}");
    assert_eq!(receiver.wait_end().0, Some(1));
    // The guest can still be migrated.
    let (guest, _) = move_to(Receive::new(scene, "third", Route::Unix), guest, NONE);
    runs_on(&guest);
    assert_eq!(complaints(&guest), "");
}

#[track_caller]
fn refused_while_moving(scene: &Scene, guest: &Guest, address: &str) -> String {
    let (code, report, message) = Migrate::new(scene, guest, address).run();
    assert_ne!(code, Some(0), "{report} {message}");
    format!("{report} {message}")
}

/// The peer does not use Ebb's protocol.
fn strangers(scene: &Scene) {
    let guest = start(scene);
    let path = scene.path("stranger");
    let listener = UnixListener::bind(&path).unwrap();
    let stranger = thread::spawn(move || {
        let (mut peer, _) = listener.accept().unwrap();
        peer.write_all(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n").unwrap();
        let _ = peer.read(&mut [0; 64]);
    });
    let message = refused(scene, &guest, &unix(&path), &[]);
    assert!(message.contains("Ebb"), "{message}");
    stranger.join().unwrap();
    // A peer that accepts the connection and closes it.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("tcp:{}", listener.local_addr().unwrap());
    let stranger = thread::spawn(move || drop(listener.accept()));
    refused(scene, &guest, &address, &[]);
    stranger.join().unwrap();

    // Other clients do not prevent a receiver from accepting its guest.
    let (receiver, address) = Receive::new(scene, "second", Route::Tcp).start();
    let to = address.strip_prefix("tcp:").unwrap();
    for garbage in [&b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"[..], &[0xff; 5000], b"EBB-MIG\n", b""] {
        let mut peer = std::net::TcpStream::connect(to).unwrap();
        let _ = peer.write_all(garbage);
        thread::sleep(Duration::from_millis(20));
    }
    let (code, report, message) = Migrate::new(scene, &guest, &address).run();
    assert_eq!(code, Some(0), "{report} {message} {}", receiver.log());
    runs_on(&receiver);
}

/// A destination that does not match the guest's configuration.
fn does_not_fit(scene: &Scene) {
    let disk = scene.path("disk");
    std::fs::write(&disk, vec![0; 1 << 20]).unwrap();
    let guest = Setup::new(scene)
        .memory("size=256M")
        .args(["--disk", &format!("path={}", disk.display())])
        .start();
    guest.run(Command::Hold { bytes: 32 * MIB, pattern: 52 });
    watch(&guest);
    let other = scene.path("other");
    std::fs::write(&other, vec![0; 2 << 20]).unwrap();
    let wrong_disk = Receive::new(scene, "smaller", Route::Unix);
    let (mut receiver, address) =
        wrong_disk.args(["--disk", &format!("path={}", other.display())]).start();
    let message = refused(scene, &guest, &address, &[]);
    assert!(message.contains("disk"), "{message}");
    let (code, log) = receiver.wait_end();
    assert_eq!(code, Some(1), "{log}");
    assert!(log.contains("disk"), "{log}");
    assert!(!receiver.socket().exists(), "the socket is left behind");
}

/// A receiver does not open the paths in the source's description of its machine, unless an option
/// allows it.
fn described_paths_are_not_opened(scene: &Scene) {
    let (disk, fifo) = (scene.path("disk"), scene.path("fifo"));
    std::fs::write(&disk, vec![0; 1 << 20]).unwrap();
    let image = format!("path={}", disk.display());
    let guest = Setup::new(scene)
        .memory("size=256M")
        .args(["--disk", &image, "--on-reboot", "reset"])
        .start();
    guest.run(Command::Hold { bytes: 32 * MIB, pattern: 55 });
    watch(&guest);
    let world = &scene.world;
    let kernel = world.vmlinux.display().to_string();
    let named = |index: usize, arguments: &[&str]| {
        Receive::without_names(scene, &format!("receiver{index}"), Route::Unix)
            .args(arguments)
            .start()
    };
    for (index, (arguments, words)) in [
        (&[][..], &["--kernel", "--on-reboot exit", "--disk", "--trust-paths"][..]),
        (&["--disk", &image], &["--kernel"]),
        (&["--on-reboot", "exit"], &["--disk"]),
        (&["--kernel", &kernel], &["--disk"]),
    ]
    .into_iter()
    .enumerate()
    {
        let (mut receiver, address) = named(index, arguments);
        let message = refused(scene, &guest, &address, &[]);
        let (code, log) = receiver.wait_end();
        assert_eq!(code, Some(1), "{log}");
        for word in words {
            assert!(message.contains(word) && log.contains(word), "{word}: {message} {log}");
        }
    }
    // A FIFO in place of the kernel is refused and does not block.
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, 0o600.into(), 0)
        .unwrap();
    let (mut receiver, address) = named(4, &["--kernel", fifo.to_str().unwrap(), "--disk", &image]);
    let message = refused(scene, &guest, &address, &[]);
    assert!(message.contains("FIFO"), "{message}");
    assert_eq!(receiver.wait_end().0, Some(1));
    // A machine that needs no kernel here can be migrated further, and with `--trust-paths` the
    // options need not be repeated.
    let ends = ["--on-reboot", "exit", "--disk", &image];
    let (guest, _) =
        move_to(Receive::without_names(scene, "ends", Route::Unix).args(ends), guest, NONE);
    assert_eq!(guest.vm().kernel, "");
    let trusting = Receive::without_names(scene, "trusting", Route::Unix).args(["--trust-paths"]);
    let (guest, _) = move_to(trusting, guest, NONE);
    runs_on(&guest);
    assert_eq!(guest.read_file("/sys/block/vda/size").trim(), "2048");
    assert_eq!(complaints(&guest), "");
}

/// Certificates with the right names allow a migration; those for other names do not.
fn over_tls(scene: &Scene) {
    let authority = Authority::new(scene);
    let (here, there) = (authority.certificate("a.example"), authority.certificate("127.0.0.1"));
    let stranger = authority.certificate("b.example");
    let guest = start(scene);
    let receive = |name: &str| {
        let receiver = Receive::without_names(scene, name, Route::Tcp).args(boot_files(scene));
        receiver.args(&there).args(["--peer-name", "a.example"]).start()
    };
    let (receiver, address) = receive("second");
    let seen = watched(&guest);
    for (certificate, more, words) in [
        (&stranger, &[][..], "refuses the certificate of this side"),
        (&here, &["--peer-name", "c.example"], "not valid for name \"c.example\""),
    ] {
        let mut migrate =
            Migrate::with_defaults(scene, &guest, &address).args(certificate).args(more);
        let (code, report, message) = migrate.run();
        assert_eq!(code, Some(1), "{report} {message}");
        assert!(message.contains(words), "{message}");
        runs_on(&guest);
    }
    watched_since(&guest, &seen);
    // None of them has prevented the receiver from accepting its guest.
    let (code, report, message) = Migrate::with_defaults(scene, &guest, &address).args(&here).run();
    assert_eq!(code, Some(0), "{report} {message} {}", receiver.log());
    runs_on(&receiver);
    assert_eq!(complaints(&receiver), "");
}

/// A certificate authority, with its certificates in files of the test.
struct Authority<'a> {
    scene: &'a Scene,
    issuer: CertifiedIssuer<'static, KeyPair>,
}

impl<'a> Authority<'a> {
    fn new(scene: &'a Scene) -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        std::fs::write(scene.path("ca.pem"), issuer.pem()).unwrap();
        Self { scene, issuer }
    }

    /// The options of a monitor with a certificate for `name`.
    fn certificate(&self, name: &str) -> Vec<OsString> {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        let file = |suffix: &str| self.scene.path(&format!("{name}.{suffix}"));
        std::fs::write(file("pem"), certificate.pem()).unwrap();
        std::fs::write(file("key"), key.serialize_pem()).unwrap();
        let files = [
            ("--tls-cert", file("pem")),
            ("--tls-key", file("key")),
            ("--tls-ca", self.scene.path("ca.pem")),
        ];
        files.into_iter().flat_map(|(option, path)| [option.into(), path.into()]).collect()
    }
}

/// A guest that powers off or reboots while its memory is sent.
fn guest_ends_or_starts_again_on_the_way(scene: &Scene) {
    let slow = ["--bandwidth", "10M"];
    let guest = Setup::new(scene)
        .memory("size=256M")
        .balloon("reporting=on,hinting=on")
        .args(["--on-reboot", "reset"])
        .start();
    guest.run(Command::Hold { bytes: 96 * MIB, pattern: 53 });
    let (moved, address) = Receive::new(scene, "again", Route::Unix).start();
    let mut client = Migrate::new(scene, &guest, &address).args(slow).spawn();
    wait_sending(&guest, 16 * MIB);
    guest.send(Command::Reboot);
    let asked = Instant::now();
    // Whether its agent restarts at the source or the destination is a race of boot and migration.
    assert_eq!(client.wait().unwrap().code(), Some(0));
    eventually("the machine runs there", 60, || {
        let state = moved.vm().state;
        when(state == VmState::Running, || format!("{state:?}"))
    });
    eventually("the agent answers there", 120, || {
        let id = moved.send(Command::MemInfo);
        thread::sleep(Duration::from_secs(1));
        when(moved.poll(id).is_some(), || "it does not".to_owned())
    });
    let uptime = moved.read_file("/proc/uptime");
    let uptime_s: f64 = uptime.split(' ').next().unwrap().parse().unwrap();
    assert!(uptime_s < asked.elapsed().as_secs_f64() + 1.0, "up for {uptime}: it has not rebooted");
    moved.run(Command::Hold { bytes: 96 * MIB, pattern: 54 });
    runs_on(&moved);

    let (mut receiver, address) = Receive::new(scene, "never", Route::Unix).start();
    let mut guest = moved;
    let mut client = Migrate::new(scene, &guest, &address).args(slow).spawn();
    wait_sending(&guest, MIB);
    guest.send(Command::PowerOff);
    let (code, log) = guest.wait_end();
    assert_eq!(code, Some(0), "{log}");
    assert_ne!(client.wait().unwrap().code(), Some(0));
    let (code, log) = receiver.wait_end();
    assert_eq!(code, Some(1), "{log}");
    assert!(!receiver.socket().exists(), "the socket is left behind");
}
