//! `ebb merge-broker` as a process, behind its system call filter and without capabilities.

#![allow(clippy::expect_used)]

use ebb_page_merge::Nodes;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::sync::Arc;
use std::time::Duration;

use ebb_guest_ram::{StableSegments, StableSlot};
use ebb_page_merge::broker::{BrokerStatus, BrokerStore, MemberConfig, ask_status};
use ebb_page_merge::{Answer, Node, PageHasher, StableStore};

fn ebb(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_ebb")).args(arguments).output().expect("ebb runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A broker; killed when dropped.
struct Broker {
    child: Child,
    path: PathBuf,
    output: BufReader<ChildStdout>,
    _folder: tempfile::TempDir,
}

impl Broker {
    fn start(arguments: &[&str]) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("broker");
        let address = format!("unix:{}", path.display());
        let mut child = Command::new(env!("CARGO_BIN_EXE_ebb"))
            .args(["merge-broker", "--listen", &address])
            .args(arguments)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("ebb runs");
        let output = BufReader::new(child.stdout.take().expect("its output"));
        Self { child, path, output, _folder: folder }
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).expect("a line");
        line.trim_end().to_owned()
    }

    fn status(&self) -> BrokerStatus {
        let path = self.path.to_str().expect("a path");
        let output = ebb(&["merge-broker", "--status", path, "--json"]);
        assert!(output.status.success(), "{}", text(&output.stderr));
        serde_json::from_slice(&output.stdout).expect("a state")
    }

    /// Ends it by a signal and returns its standard error.
    fn end(mut self, signal: rustix::process::Signal) -> String {
        let pid = rustix::process::Pid::from_raw(self.child.id() as i32).expect("a process");
        rustix::process::kill_process(pid, signal).expect("it lives");
        let status = self.child.wait().expect("it ends");
        let mut errors = String::new();
        let mut stream = self.child.stderr.take().expect("its errors");
        std::io::Read::read_to_string(&mut stream, &mut errors).expect("text");
        assert_eq!(status.code(), Some(0), "{errors}");
        assert!(!self.path.exists(), "the socket is left behind");
        errors
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn join(
    path: &Path,
    domain: &str,
    placement: Nodes,
) -> (BrokerStore<Arc<StableSegments>>, Arc<StableSegments>) {
    let segments = StableSegments::new();
    let config = MemberConfig::new(path.to_owned(), domain.parse().expect("a name"), placement);
    (BrokerStore::connect(&config, Arc::clone(&segments)).expect("a broker"), segments)
}

#[test]
fn clients_share_pages_and_the_broker_ends_at_a_signal() {
    let mut broker = Broker::start(&["--domain", "web", "--domain", "numa", "--quota", "64M"]);
    assert_eq!(broker.line(), format!("listening on unix:{}", broker.path.display()));
    let page = vec![0x42; 4096];
    for (domain, placement, node) in
        [("web", Nodes::Across, Node::ANY), ("numa", Nodes::Apart, Node(0))]
    {
        let (mut a, _) = join(&broker.path, domain, placement);
        let (mut b, segments) = join(&broker.path, domain, placement);
        let hash = PageHasher::new(&a.secret()).hash(&page);
        let mut slots: Vec<StableSlot> = Vec::new();
        a.publish(node, &[hash], &page, &mut slots).expect("room");
        a.shared(slots[0]);
        let mut answers = Vec::new();
        b.query(node, &[hash], &mut answers).expect("an answer");
        assert_eq!(answers, [Answer::Stable(slots[0])]);
        let mut content = vec![0; 4096];
        let slot = slots[0];
        segments.read(slot, &mut content).expect("the page");
        assert_eq!(content, page);
        b.shared(slots[0]);
        a.take_notifications(&mut Vec::new());
        b.take_notifications(&mut Vec::new());
        let status = broker.status();
        let found =
            status.domains.iter().find(|found| found.name.as_str() == domain).expect("the domain");
        assert_eq!((found.nodes[0].stable_pages, found.nodes[0].sharers), (1, 2));
        // Undo everything, including the closing of a segment.
        for store in [&mut a, &mut b] {
            store.release(slots[0]);
            store.take_notifications(&mut Vec::new());
        }
    }
    let output = ebb(&["merge-broker", "--status", broker.path.to_str().expect("a path")]);
    assert!(text(&output.stdout).starts_with("clients "), "{}", text(&output.stdout));
    assert_eq!(broker.end(rustix::process::Signal::TERM), "");
}

#[test]
fn it_has_a_filter_and_no_capabilities() {
    let mut broker = Broker::start(&["--json"]);
    let line: serde_json::Value = serde_json::from_str(&broker.line()).expect("JSON");
    assert_eq!(line["listening"], format!("unix:{}", broker.path.display()));
    // When it answers, it has dropped its capabilities.
    broker.status();
    let status =
        std::fs::read_to_string(format!("/proc/{}/status", broker.child.id())).expect("its state");
    let field = |name: &str| {
        let line = status.lines().find(|line| line.starts_with(name)).expect("a field");
        line.split_whitespace().nth(1).expect("a value").to_owned()
    };
    assert_eq!(field("CapEff:"), "0000000000000000");
    assert_eq!(field("Seccomp:"), "2");
    assert_eq!(field("NoNewPrivs:"), "1");
    broker.end(rustix::process::Signal::INT);
}

/// Another user's question for the state is refused, and the broker serves on.
#[test]
fn a_stranger_does_not_learn_the_state() {
    const STRANGER: u32 = 65534;

    if !rustix::process::geteuid().is_root() {
        eprintln!("not tested: only root can ask as another user");
        return;
    }
    let mut broker = Broker::start(&["--domain", &format!("blue={STRANGER}")]);
    broker.line();
    let folder = broker.path.parent().expect("a folder");
    std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o755)).expect("root may");
    let path = broker.path.clone();
    let asked = std::thread::spawn(move || {
        rustix::thread::set_thread_uid(rustix::process::Uid::from_raw(STRANGER)).expect("root may");
        ask_status(&path, Duration::from_secs(5))
    });
    let answer = asked.join().expect("no panic");
    assert!(answer.is_err(), "{answer:?}");
    let status = broker.status();
    assert_eq!((status.clients, status.refused), (0, 1), "{answer:?}");
}

#[test]
fn wrong_usage_is_reported() {
    for arguments in [
        &["merge-broker"][..],
        &["merge-broker", "--listen", "nowhere"],
        &["merge-broker", "--listen", "unix:/x", "--domain", "a/b"],
        &["merge-broker", "--listen", "unix:/x", "--domain", "a=root"],
        &["merge-broker", "--listen", "unix:/x", "--max-page-sharing", "1"],
        &["merge-broker", "--listen", "unix:/x", "--status", "/x"],
    ] {
        let output = ebb(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {}", text(&output.stderr));
    }
    for (arguments, reason) in [
        (&["merge-broker", "--listen", "tcp:127.0.0.1:1"][..], "unix:PATH"),
        (
            &["merge-broker", "--listen", "unix:/nonexistent/folder/socket"],
            "/nonexistent/folder/socket",
        ),
        (&["merge-broker", "--status", "/nonexistent/socket"], "/nonexistent/socket"),
        (&["merge-broker", "--listen", "unix:/x", "--quota", "0"], "--quota leaves no room"),
        (&["merge-broker", "--listen", "unix:/x", "--total", "4095"], "--total leaves no room"),
    ] {
        let output = ebb(arguments);
        assert_eq!(output.status.code(), Some(1), "{arguments:?}");
        assert!(text(&output.stderr).contains(reason), "{}", text(&output.stderr));
    }
    // A file that is not a socket and the socket of a running broker are not replaced.
    let mut broker = Broker::start(&[]);
    broker.line();
    let file = broker.path.with_file_name("file");
    std::fs::write(&file, "content").expect("a file");
    for (path, reason) in [(&broker.path, "another process"), (&file, "not a socket")] {
        let address = format!("unix:{}", path.display());
        let output = ebb(&["merge-broker", "--listen", &address]);
        assert_eq!(output.status.code(), Some(1), "{}", text(&output.stdout));
        assert!(text(&output.stderr).contains(reason), "{}", text(&output.stderr));
    }
    assert_eq!(std::fs::read_to_string(&file).expect("the file"), "content");
    broker.status();
}

#[test]
fn a_second_broker_is_refused_and_a_killed_one_is_replaced() {
    let mut first = Broker::start(&[]);
    assert!(first.line().starts_with("listening on "));
    let address = format!("unix:{}", first.path.display());
    let second = ebb(&["merge-broker", "--listen", &address]);
    assert_eq!(second.status.code(), Some(1));
    assert!(
        text(&second.stderr).contains("another process listens at"),
        "{}",
        text(&second.stderr)
    );
    assert_eq!(first.status().clients, 0, "the first one continues to serve");

    first.child.kill().expect("it lives");
    first.child.wait().expect("it ends");
    assert!(first.path.exists(), "the socket of the killed broker exists");
    let mut third = Command::new(env!("CARGO_BIN_EXE_ebb"))
        .args(["merge-broker", "--listen", &address])
        .stdout(Stdio::piped())
        .spawn()
        .expect("ebb runs");
    let mut line = String::new();
    BufReader::new(third.stdout.take().expect("its output")).read_line(&mut line).expect("a line");
    assert!(line.starts_with("listening on "), "{line}");
    assert_eq!(first.status().clients, 0);
    third.kill().expect("it lives");
    third.wait().expect("it ends");
}
