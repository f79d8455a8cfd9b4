//! What a forked machine has alone: sockets, disks, a cgroup, random numbers.

use std::collections::BTreeSet;
use std::fs;
use std::io::{Read as _, Write as _};
use std::path::Path;

use ebb_agent::protocol::Command;
use ebb_agent::vsock::Service;
use ebb_vmm::api::NetInfo;
use serde_json::Value;

use crate::forked::{document, ebb, failure, fork, silently, start_agent, unique};
use crate::guest::Guest;
use crate::harness::{Scene, Test, counts, eventually, when};
use crate::net::Tap;
use crate::setup::Setup;

/// The tests.
pub const TESTS: &[Test] = &[
    Test::new("fork_alone::what_each_has_alone", 300, what_each_has_alone),
    Test::new("fork_alone::what_its_guest_is_told", 300, what_its_guest_is_told),
    Test::new("fork_alone::its_network_address", 300, its_network_address),
];

/// Sockets, disks, interfaces and cgroups.
fn what_each_has_alone(scene: &Scene) {
    let path = |name: &str| scene.path(name).to_str().unwrap().to_owned();
    fs::write(path("base"), vec![0x5a; 8 << 20]).unwrap();
    let disk = format!("path={},overlay={}", path("base"), path("overlay"));
    let vsock = format!("path={}", path("vsock"));
    let parent = Setup::new(scene).args(["--forkable", "--disk", &disk, "--vsock", &vsock]).start();
    let shell = |guest: &Guest, line: &str| {
        let argv = ["/bin/busybox", "sh", "-c", line].map(str::to_owned).to_vec();
        let result = guest.run(Command::Exec { argv });
        assert_eq!(result["code"], 0, "{line}: {result}");
    };
    let write = |guest: &Guest, text: &str| {
        let line = format!("printf {text} | dd of=/dev/vda bs=4096 seek=3 conv=notrunc,fsync");
        shell(guest, &line);
    };
    let check = |guest: &Guest, text: &str| {
        shell(guest, "echo 3 > /proc/sys/vm/drop_caches");
        let line = format!("[ $(dd if=/dev/vda bs=4096 skip=3 count=1 | head -c 6) = {text} ]");
        shell(guest, &line);
    };
    write(&parent, "before");
    let serving = parent.send(Command::VsockServe { port: 52, service: Service::Echo });
    parent.wait_started(serving);
    // Its disk is copied in the moment of the checkpoint.
    let name = unique(scene, "own");
    let socket = parent.socket().to_str().unwrap();
    let copies = ["--copy-disks", &path("")];
    silently(scene, &[&["ctl", socket, "checkpoint", &name], &copies[..]].concat());
    write(&parent, "parent");
    // The same by hand, of a machine that is paused.
    parent.put("/vm/pause");
    let plain = unique(scene, "plain");
    silently(scene, &["ctl", socket, "checkpoint", &plain]);
    let nowhere = ["ctl", socket, "checkpoint", "nowhere", "--copy-disks", "/nowhere"];
    assert!(failure(scene, &nowhere).contains("/nowhere"));
    fs::copy(path("overlay"), path("by-hand")).unwrap();
    let modified = fs::metadata(path("overlay")).unwrap().modified().unwrap();
    let by_hand = fs::File::options().write(true).open(path("by-hand")).unwrap();
    by_hand.set_modified(modified).unwrap();
    parent.put("/vm/resume");
    write(&parent, "newest");

    let refused_of = |name: &str, api: &str, more: &[&str]| {
        let text = failure(scene, &[&["fork", name, "--api", api], more].concat());
        for left in ["refused", "refused.vsock", "refused.disk"] {
            assert!(!scene.path(left).exists(), "{left}: {text}");
        }
        text
    };
    let refused = |more: &[&str]| refused_of(&name, &path("refused"), more);
    let other_vsock = format!("path={}", path("refused.vsock"));
    let text = refused(&["--vsock", &other_vsock]);
    assert!(text.contains("--disk path=FILE"), "{text}");
    assert!(refused(&["--disk", &disk, "--vsock", &other_vsock]).contains("in use"));
    let new = format!("path={},overlay={}", path("base"), path("refused.disk"));
    assert!(refused(&["--disk", &new]).contains("--vsock path=PATH"));
    let raw = format!("path={}", path("refused.disk"));
    assert!(refused(&["--disk", &raw, "--vsock", &other_vsock]).contains("overlay=FILE"));
    // After its disk was made.
    let text = refused_of(&name, socket, &["--disk", &new, "--vsock", &other_vsock]);
    assert!(text.contains("another process listens"), "{text}");
    let more = ["--disk", &new, "--vsock", &other_vsock];
    let text = refused_of(&plain, &path("refused"), &more);
    assert!(text.contains("no copy"), "{text}");
    fs::copy(path("overlay"), path("changed")).unwrap();
    let changed = format!("path={},overlay={}", path("base"), path("changed"));
    let text = refused(&["--disk", &changed, "--vsock", &other_vsock]);
    assert!(text.contains("--accept-changed-disks"), "{text}");

    let disks = format!("path={},overlay={}", path("base"), path("overlay{}"));
    let sockets = format!("path={}", path("vsock{}"));
    let cgroup = format!("path={}/{{}},pids_max=64", unique(scene, "forks"));
    let root = Path::new("/sys/fs/cgroup");
    let cgroups = root.join(unique(scene, "forks"));
    fs::create_dir(&cgroups).unwrap();
    for folder in [root, &cgroups] {
        fs::write(folder.join("cgroup.subtree_control"), "+memory +pids +cpu").unwrap();
    }
    let more = ["--disk", &disks, "--vsock", &sockets, "--cgroup", &cgroup];
    let forks = fork(scene, &name, "a", 2, &more);
    let by_hand = format!("path={},overlay={}", path("base"), path("by-hand"));
    let of_plain = format!("path={}", path("of-plain.vsock"));
    let more = ["--disk", &by_hand, "--vsock", &of_plain];
    check(&fork(scene, &plain, "of-plain", 1, &more)[0].guest, "parent");
    let direct = format!("path={},overlay={}", path("base"), path("direct"));
    let of_direct = format!("path={}", path("direct.vsock"));
    let more = ["--disk", &direct, "--vsock", &of_direct];
    check(&fork(scene, socket, "direct-", 1, &more)[0].guest, "newest");
    for (number, fork) in forks.iter().enumerate() {
        check(&fork.guest, "before");
        write(&fork.guest, &format!("fork-{number}"));
        let mut stream = crate::vsock::connect(&scene.path(&format!("vsock{number}")), 52).unwrap();
        stream.write_all(b"hello").unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert_eq!(answer, "hello");
        let folder = cgroups.join(number.to_string());
        let processes = fs::read_to_string(folder.join("cgroup.procs")).unwrap();
        let monitor = fork.monitor.as_raw_nonzero().to_string();
        assert!(processes.lines().any(|line| line == monitor), "{processes}");
        assert_eq!(fs::read_to_string(folder.join("pids.max")).unwrap(), "64\n");
    }
    for (number, fork) in forks.iter().enumerate() {
        check(&fork.guest, &format!("fork-{number}"));
    }
    check(&parent, "newest");
    for (number, fork) in forks.into_iter().enumerate() {
        fork.guest.put("/vm/kill");
        fork.wait_end();
        let folder = cgroups.join(number.to_string());
        let socket = scene.path(&format!("vsock{number}"));
        eventually("socket and cgroup are removed", 20, || {
            when(!folder.exists() && !socket.exists(), || {
                format!("{} {}", folder.display(), socket.display())
            })
        });
    }
    fs::remove_dir(&cgroups).unwrap();
    silently(scene, &["checkpoints", "remove", &name, &plain]);
}

/// Scripts in the guest, and random numbers that no two machines have in common. Their raw disks
/// are made of the checkpoint's copy.
fn what_its_guest_is_told(scene: &Scene) {
    let vsock = format!("path={}", scene.path("vsock").display());
    fs::write(scene.path("raw"), "content\n".repeat(1 << 15)).unwrap();
    let disk = format!("path={}", scene.path("raw").display());
    let disks = format!("path={}", scene.path("raw{}").display());
    let parent = Setup::new(scene)
        .initrd(&scene.world.hostile_initrd)
        .args(["--forkable", "--vsock", &vsock, "--disk", &disk])
        .start();
    let socket = parent.socket().to_str().unwrap();
    let sockets = format!("path={}", scene.path("vsock{}").display());
    let forks = |source: &str, count: usize| {
        let (pattern, count) = (scene.path("fork{}"), count.to_string());
        let pattern = pattern.to_str().unwrap();
        let more = ["--api", pattern, "--vsock", &sockets, "--disk", &disks, "--json"];
        document(scene, &[&["fork", source, "-n", &count], &more[..]].concat())
    };
    let kill_all = |report: &Value| {
        for (number, made) in report["machines"].as_array().unwrap().iter().enumerate() {
            silently(scene, &["ctl", made["api"].as_str().unwrap(), "kill"]);
            fs::remove_file(scene.path(&format!("raw{number}"))).unwrap();
        }
    };
    // Without an agent.
    let report = forks(socket, 1);
    assert_eq!(report["machines"][0]["reseeded"], false, "{report}");
    kill_all(&report);

    start_agent(scene, &parent);
    let shell = |socket: &str, line: &str| {
        let arguments =
            ["exec", "--wait", "60", "-n", socket, "--", "/bin/busybox", "sh", "-c", line];
        let output = ebb(scene, &arguments);
        assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let script = "mkdir -p /etc/ebb/fork.d && cd /etc/ebb/fork.d && \
        echo '#!/bin/busybox sh\necho $* >> /moments; [ ! -e /fails ] || exit 3' > 10-note && \
        chmod +x 10-note";
    shell(socket, &script.replace("\\n", "\n"));
    let name = unique(scene, "told");
    let folder = scene.path("");
    let copies = ["--copy-disks", folder.to_str().unwrap()];
    silently(scene, &[&["ctl", socket, "checkpoint", &name], &copies[..]].concat());
    assert_eq!(shell(socket, "cat /moments"), "before\ncontinue\n");
    let mut randoms = BTreeSet::new();
    let batch = 16;
    for _ in 0..counts(2, 64) {
        let report = forks(&name, batch);
        for (number, made) in report["machines"].as_array().unwrap().iter().enumerate() {
            assert_eq!(made["reseeded"], true, "{report}");
            assert!(made["answered_us"].as_u64() >= made["elapsed_us"].as_u64(), "{report}");
            let line = "head -c 16 /dev/urandom | od -An -tx1; cat /moments; head -n 1 /dev/vda";
            let said = shell(made["api"].as_str().unwrap(), line);
            let (random, moments) = said.split_once('\n').unwrap();
            assert_eq!(moments, format!("before\nfork {number}\ncontent\n"));
            assert!(randoms.insert(random.to_owned()), "{random}");
        }
        kill_all(&report);
    }
    assert_eq!(shell(socket, "cat /moments"), "before\ncontinue\n");

    // A script that fails.
    shell(socket, "touch /fails");
    let second = unique(scene, "untold");
    let text = failure(scene, &["ctl", socket, "checkpoint", &second]);
    assert!(text.contains("10-note before") && text.contains("--hooks off"), "{text}");
    assert_eq!(shell(socket, "cat /moments; rm /fails"), "before\ncontinue\n".repeat(2));
    silently(scene, &["ctl", socket, "checkpoint", &second, "--hooks", "off"]);
    assert_eq!(shell(socket, "cat /moments; touch /fails"), "before\ncontinue\n".repeat(2));
    let failing = unique(scene, "fails");
    let arguments = ["ctl", socket, "checkpoint", &failing, "--hooks", "off"];
    silently(scene, &[&arguments, &copies[..]].concat());
    let api = scene.path("fails");
    let more = ["--vsock", &sockets, "--disk", &disks];
    let arguments = [&["fork", &failing, "--api", api.to_str().unwrap()], &more[..]].concat();
    let output = ebb(scene, &arguments);
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(1) && text.contains("10-note fork 0"), "{text}");
    // It runs.
    silently(scene, &["ctl", api.to_str().unwrap(), "kill"]);
    silently(scene, &["checkpoints", "remove", &name, &second, &failing]);
}

/// The addresses of interfaces, which the agent sets, also in the fork of a fork.
fn its_network_address(scene: &Scene) {
    let taps = [0, 1, 2].map(|number| Tap::new(scene, number));
    let first = format!("tap={},mac=02:00:00:00:00:07", taps[0].name);
    let vsock = format!("path={}", scene.path("vsock").display());
    let parent = Setup::new(scene)
        .initrd(&scene.world.hostile_initrd)
        .args(["--forkable", "--vsock", &vsock, "--net", &first])
        .start();
    start_agent(scene, &parent);
    let guests = |guest: &Guest| guest.read_file("/sys/class/net/eth0/address").trim().to_owned();
    let devices = |guest: &Guest| {
        let info: NetInfo = guest.client().get("/net").unwrap();
        info.devices[0].mac.to_string()
    };
    let forked = |of: &Guest, name: &str, net: &str| {
        let vsock = format!("path={}", scene.path(&format!("{name}.vsock")).display());
        let socket = of.socket().to_str().unwrap().to_owned();
        // The agent that answers is the one that was forked.
        fork(scene, &socket, name, 1, &["--vsock", &vsock, "--net", net]).remove(0)
    };
    let child = forked(&parent, "child", &format!("tap={},mac=random", taps[1].name));
    let random = devices(&child.guest);
    assert_ne!(random, "02:00:00:00:00:07");
    assert_eq!(guests(&child.guest), random);
    assert_eq!(guests(&parent), "02:00:00:00:00:07");
    let net = format!("tap={},mac=02:00:00:00:00:09", taps[2].name);
    let grandchild = forked(&child.guest, "grandchild", &net);
    assert_eq!(guests(&grandchild.guest), "02:00:00:00:00:09");
    assert_eq!(devices(&grandchild.guest), "02:00:00:00:00:09");
    assert_eq!(guests(&child.guest), random);
    drop((grandchild, child));
    // Without another address it keeps the first machine's.
    let same = forked(&parent, "same", &format!("tap={}", taps[1].name));
    assert_eq!((guests(&same.guest), devices(&same.guest)), (guests(&parent), devices(&parent)));
    // One that the guest has set by itself stays.
    let argv = ["/bin/busybox", "ifconfig", "eth0", "hw", "ether", "02:00:00:00:00:0a"];
    let result = parent.run(Command::Exec { argv: argv.map(str::to_owned).to_vec() });
    assert_eq!(result["code"], 0, "{result}");
    let own = forked(&parent, "own", &format!("tap={},mac=random", taps[2].name));
    assert_eq!(guests(&own.guest), "02:00:00:00:00:0a");
}
