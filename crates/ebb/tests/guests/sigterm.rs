//! SIGTERM ends a monitor at once, whatever it does.

use std::fs::{self, File};
use std::process::{Child, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use ebb_agent::protocol::Command;
use ebb_vmm::api::VmState;
use rustix::process::{Pid, Signal, kill_process};

use crate::guest::{Guest, MIB};
use crate::harness::{Scene, Test, eventually, when};
use crate::lifecycle::inflating;
use crate::moved::{Migrate, Receive, Route, wait_sending};
use crate::saved::Restore;
use crate::setup::Setup;
use crate::tiny_kernel;

/// The tests.
pub const TESTS: &[Test] = &[
    Test::new("sigterm::of_a_machine", 300, of_a_machine),
    Test::new("sigterm::while_saving_and_restoring", 300, while_saving_and_restoring),
    Test::new("sigterm::of_both_sides_of_a_migration", 300, of_both_sides_of_a_migration),
    Test::new("sigterm::of_floods", 300, of_floods),
    Test::new("sigterm::at_the_start", 300, at_the_start),
];

/// Exit code of a monitor that a signal has ended.
const SIGNALLED: i32 = 6;

/// Ends the monitor and checks that nothing is left of it.
#[track_caller]
fn end(what: &str, mut guest: Guest) {
    let started = Instant::now();
    guest.signal(Signal::TERM);
    let (code, log) = guest.wait_end();
    println!("    {what}: {} ms", started.elapsed().as_millis());
    assert_eq!(code, Some(SIGNALLED), "{what}: {log}");
    assert!(log.contains("SIGTERM"), "{what}: {log}");
    assert!(!guest.socket().exists(), "{what}: the socket is left behind");
}

/// The same of a monitor that is not a [`Guest`], because its output is not read.
#[track_caller]
fn end_unread(what: &str, mut process: Child) -> Option<i32> {
    let started = Instant::now();
    let pid = Pid::from_raw(process.id().cast_signed()).unwrap();
    kill_process(pid, Signal::TERM).unwrap();
    let status = eventually("the monitor ends", 30, || {
        process.try_wait().unwrap().ok_or_else(|| "it runs".to_owned())
    });
    println!("    {what}: {} ms", started.elapsed().as_millis());
    status.code()
}

fn of_a_machine(scene: &Scene) {
    end("as soon as the API answers", Setup::new(scene).start_api());
    let guest = Setup::new(scene).words("loglevel=7").start_api();
    sleep(Duration::from_millis(300));
    end("booting", guest);

    let guest = Setup::new(scene).args(["--cpus", "2"]).start();
    guest.put("/vm/pause");
    end("paused", guest);

    end("inflating", inflating(Setup::new(scene)));

    // A client of the API that never completes its request, and one that does not read.
    let guest = Setup::new(scene).start();
    let clients = [0; 4].map(|_| std::os::unix::net::UnixStream::connect(guest.socket()).unwrap());
    for mut client in &clients {
        std::io::Write::write_all(&mut client, b"PUT /vm/snapshot HTTP/1.1\r\nContent-Le").unwrap();
    }
    end("with slow clients", guest);
}

fn while_saving_and_restoring(scene: &Scene) {
    let file = scene.path("vm.snapshot");
    let setup = || Setup::new(scene).memory("size=1G");
    let guest = setup().start();
    guest.run(Command::Hold { bytes: 600 * MIB, pattern: 71 });
    guest.save(&file);
    // While memory is copied, if that is seen.
    let second = scene.path("second.snapshot");
    let mut program = std::process::Command::new(&scene.world.ebb);
    program.arg("ctl").arg(guest.socket()).arg("snapshot").arg(&second);
    let mut client = program.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    while client.try_wait().unwrap().is_none() && guest.vm().state != VmState::Saving {}
    end("saving", guest);
    client.wait().unwrap();

    for (what, arguments) in [("restoring", &[][..]), ("verifying", &["--verify"])] {
        for delay_ms in [5, 50, 200] {
            let mut guest = Restore::new(scene, &file).args(arguments).spawn();
            sleep(Duration::from_millis(delay_ms));
            let started = Instant::now();
            guest.signal(Signal::TERM);
            let (code, log) = guest.wait_end();
            println!("    {what} for {delay_ms} ms: {} ms", started.elapsed().as_millis());
            // Until it takes signals over, the signal itself.
            assert!(matches!(code, None | Some(SIGNALLED)), "{code:?} {log}");
            eventually("its socket is removed", 20, || {
                when(!guest.socket().exists(), || "it exists".to_owned())
            });
        }
    }
}

fn of_both_sides_of_a_migration(scene: &Scene) {
    let (receiver, _) = Receive::new(scene, "waiting", Route::Tcp).start();
    end("waiting for a machine", receiver);

    let start = || {
        let guest = Setup::new(scene).memory("size=256M").start();
        guest.run(Command::Hold { bytes: 96 * MIB, pattern: 72 });
        guest
    };
    let guest = start();
    for (index, streams) in ["1", "3"].into_iter().enumerate() {
        let (mut receiver, address) =
            Receive::new(scene, &format!("source{index}"), Route::Tcp).start();
        let slow = ["--bandwidth", "10M", "--streams", streams];
        let mut client = Migrate::new(scene, &guest, &address).args(slow).spawn();
        wait_sending(&guest, 4 * MIB);
        if index == 0 {
            end("receiving", receiver);
            assert_eq!(client.wait().unwrap().code(), Some(1));
            assert_eq!(guest.wrong_pages(), 0);
            continue;
        }
        end("sending", guest);
        assert_ne!(client.wait().unwrap().code(), Some(0));
        assert_eq!(receiver.wait_end().0, Some(1));
        return;
    }
}

fn of_floods(scene: &Scene) {
    // The console's pipe is full, and the monitor's log is not read either.
    let kernel = scene.path("flood");
    fs::write(&kernel, tiny_kernel::elf(tiny_kernel::FLOOD)).unwrap();
    let mut program = Setup::new(scene).kernel(&kernel).program();
    program.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let process = program.spawn().unwrap();
    sleep(Duration::from_secs(1));
    assert_eq!(end_unread("an unread console", process), Some(SIGNALLED));

    let image = scene.path("disk");
    File::create(&image).unwrap().set_len(64 * MIB).unwrap();
    let disk = format!("path={}", image.display());
    let guest = Setup::new(scene).args(["--cpus", "2", "--disk", &disk]).start();
    let script = "while :; do dd if=/dev/zero of=/dev/vda bs=1M count=64; done";
    let argv = ["/bin/busybox", "sh", "-c", script].map(str::to_owned).to_vec();
    for _ in 0..2 {
        guest.send(Command::Exec { argv: argv.clone() });
    }
    eventually("the guest floods its disk", 60, || {
        let bytes =
            fs::metadata(&image).map(|file| std::os::unix::fs::MetadataExt::blocks(&file) * 512);
        when(bytes.is_ok_and(|bytes| bytes > 8 * MIB), || "not yet".to_owned())
    });
    end("a flooded disk", guest);

    // Limited so much that requests wait for seconds.
    let disk = format!("path={},bandwidth=16K", image.display());
    let guest = Setup::new(scene).args(["--disk", &disk]).start();
    guest.send(Command::Exec { argv });
    sleep(Duration::from_secs(1));
    end("a limited disk", guest);
}

fn at_the_start(scene: &Scene) {
    for memory in ["size=256M", "size=1536M,prealloc=on", "size=1536M,prealloc=on,thp=off"] {
        for delay_ms in [10, 100, 400] {
            let mut program = Setup::new(scene).memory(memory).program();
            program.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
            let process = program.spawn().unwrap();
            sleep(Duration::from_millis(delay_ms));
            let code = end_unread(&format!("{memory} after {delay_ms} ms"), process);
            assert!(matches!(code, None | Some(SIGNALLED)), "{code:?}");
            eventually("its socket is removed", 20, || {
                when(!scene.path("api").exists(), || "it exists".to_owned())
            });
        }
    }
}
