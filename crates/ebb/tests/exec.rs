//! `ebb exec` and `ebb cp` with the agent's sessions, as ordinary processes of this machine: a
//! socket of the test takes the place of a machine's vsock path.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::fs;
use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use ebb_guest_agent::server::session;
use ebb_guest_agent::wire::PORT;
use serde_json::Value;
use tempfile::TempDir;

/// A directory with a vsock path whose guest has an agent, for as long as the test runs.
struct Guest {
    directory: TempDir,
}

impl Guest {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(directory.path().join("vsock")).unwrap();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                std::thread::spawn(move || answer(stream.unwrap()));
            }
        });
        Self { directory }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn exec(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ebb"));
        command.args(["exec", "--vsock"]).arg(self.path("vsock"));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// `ebb exec` with these options, and a shell that runs `script`.
    fn shell(&self, options: &[&str], script: &str) -> Command {
        let mut command = self.exec();
        command.args(options).args(["--", "sh", "-c", script]);
        command
    }

    fn cp(&self, source: &str, destination: &str) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ebb"));
        let replace =
            |text: &str| text.replace("VM:", &format!("{}:", self.path("vsock").display()));
        command.args(["cp", "--vsock", &replace(source), &replace(destination)]);
        command.current_dir(self.directory.path()).output().unwrap()
    }
}

/// What a monitor does on its vsock path.
fn answer(mut stream: UnixStream) {
    let mut line = Vec::new();
    let mut byte = [0];
    while !line.ends_with(b"\n") {
        stream.read_exact(&mut byte).unwrap();
        line.push(byte[0]);
    }
    // Other ports have no listener.
    if line == format!("CONNECT {PORT}\n").as_bytes() {
        stream.write_all(b"OK 1073741824\n").unwrap();
        let _ = session(OwnedFd::from(stream));
    }
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

fn wait_for(path: &Path) {
    let begin = Instant::now();
    while !path.exists() {
        assert!(begin.elapsed() < Duration::from_secs(60), "{} never appears", path.display());
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn written(child: &mut Child, bytes: &[u8]) {
    child.stdin.take().unwrap().write_all(bytes).unwrap();
}

#[test]
fn a_commands_streams_and_its_code_are_passed_on() {
    let guest = Guest::new();
    let output = guest.shell(&[], "echo out; echo err >&2; exit 3").output().unwrap();
    assert_eq!(output.status.code(), Some(3));
    assert_eq!((text(&output.stdout), text(&output.stderr)), ("out\n", "err\n"));

    let output = guest.shell(&["--json"], "echo out; echo err >&2; kill -9 $$").output().unwrap();
    assert_eq!(output.status.code(), Some(128 + 9));
    let document: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((document["signal"].as_i64(), &document["exit_code"]), (Some(9), &Value::Null));
    assert_eq!((&document["stdout"], &document["stderr"]), (&"out\n".into(), &"err\n".into()));
    assert!(document["pid"].as_u64().unwrap() > 1);

    for (command, code) in [("/no/such/program", 127), ("/etc/passwd", 126)] {
        let output = guest.exec().args(["--", command]).output().unwrap();
        assert_eq!(output.status.code(), Some(code));
        assert!(text(&output.stderr).contains(command), "{output:?}");
    }
}

#[test]
fn environment_user_and_directory() {
    let guest = Guest::new();
    let shown = |options: &[&str], script: &str| {
        let output = guest.shell(options, script).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        text(&output.stdout).trim().to_owned()
    };
    assert_eq!(shown(&["--env", "NAME=a=b c"], "echo $NAME"), "a=b c");
    assert_eq!(shown(&["-C", "/usr"], "pwd"), "/usr");
    // Nothing of the agent's own environment.
    assert_eq!(shown(&[], "echo $CARGO"), "");
    assert_eq!(shown(&[], "echo $HOME $USER"), "/root root");
    if rustix::process::geteuid().is_root() {
        let ids = shown(&["--user", "nobody"], "id -u; id -g; id -G; echo $USER");
        assert_eq!(ids, "65534\n65534\n65534\nnobody");
        assert_eq!(shown(&["--user", "77:88"], "id -u; id -G").as_str(), "77\n88");
    }
    for (options, problem) in [
        (["--user", "no-such-user"], "no user no-such-user"),
        (["-C", "/no/such/directory"], "no directory /no/such/directory"),
    ] {
        let output = guest.shell(&options, "true").output().unwrap();
        assert_eq!(output.status.code(), Some(125));
        assert!(text(&output.stderr).contains(problem), "{output:?}");
    }
}

#[test]
fn a_lot_of_data_goes_through_in_order() {
    let guest = Guest::new();
    let data: Vec<u8> =
        (0..20_000_000_u32).map(|number| (number / 7 + number / 255) as u8).collect();
    fs::write(guest.path("data"), &data).unwrap();
    let mut command = guest.exec();
    command.args(["--", "cat"]).stdin(fs::File::open(guest.path("data")).unwrap());
    let output = command.output().unwrap();
    assert!(output.status.success());
    assert!(output.stdout == data);
    // A command that does not read its input: the rest of it is not waited for.
    let mut command = guest.exec();
    command.args(["--", "true"]).stdin(fs::File::open(guest.path("data")).unwrap());
    assert!(command.status().unwrap().success());
    // A process that the command leaves behind keeps its output open.
    let output = guest.shell(&[], "sleep 600 & echo $!").output().unwrap();
    let pid = text(&output.stdout).trim().to_owned();
    assert!(Path::new("/proc").join(&pid).exists());
    Command::new("kill").arg(pid).status().unwrap();
}

#[test]
fn signals_reach_the_command_and_its_children() {
    let guest = Guest::new();
    let script = "trap 'echo caught; exit 7' TERM; sleep 600 & touch \"$0\"; wait";
    let mut command = guest.exec();
    let ready = guest.path("ready");
    let child = command.args(["--", "sh", "-c", script]).arg(&ready).spawn().unwrap();
    wait_for(&ready);
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), text(&output.stdout)), (Some(7), "caught\n"));
}

#[test]
fn an_abandoned_command_is_hung_up() {
    let guest = Guest::new();
    let mark = guest.path("mark");
    let mut command = guest.exec();
    command.args(["--", "sh", "-c", "echo $$ > $0.pid; mv $0.pid $0; exec sleep 600"]).arg(&mark);
    let mut child = command.spawn().unwrap();
    wait_for(&mark);
    child.kill().unwrap();
    child.wait().unwrap();
    let command = Path::new("/proc").join(fs::read_to_string(&mark).unwrap().trim());
    let begin = Instant::now();
    while command.exists() {
        assert!(begin.elapsed() < Duration::from_secs(60), "the command goes on");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_detached_command_goes_on() {
    let guest = Guest::new();
    let mark = guest.path("mark");
    let script = format!("sleep 0.2; touch {}", mark.display());
    let output = guest.shell(&["--detach"], &script).output().unwrap();
    assert!(text(&output.stdout).trim().parse::<u32>().is_ok(), "{output:?}");
    wait_for(&mark);
}

#[test]
fn a_terminal_has_a_size_that_follows() {
    use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
    use rustix::termios::{Winsize, tcsetwinsize};
    let guest = Guest::new();
    let outer = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
    grantpt(&outer).unwrap();
    unlockpt(&outer).unwrap();
    let name = ptsname(&outer, Vec::new()).unwrap();
    let size =
        |rows, columns| Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    tcsetwinsize(&outer, size(33, 77)).unwrap();
    let inner = || {
        let flags = rustix::fs::OFlags::RDWR | rustix::fs::OFlags::NOCTTY;
        Stdio::from(rustix::fs::open(&name, flags, rustix::fs::Mode::empty()).unwrap())
    };
    // `setsid` makes the new terminal the controlling one, which gets signals of its size.
    let mut child = Command::new("setsid")
        .args(["--ctty", "--wait", env!("CARGO_BIN_EXE_ebb"), "exec", "-t", "--vsock"])
        .arg(guest.path("vsock"))
        .args(["--", "sh", "-c", "while :; do stty size; sleep 0.1; done"])
        .stdin(inner())
        .stdout(inner())
        .stderr(inner())
        .spawn()
        .unwrap();
    let mut outer = fs::File::from(outer);
    let mut seen = String::new();
    for (rows, columns) in [(33, 77), (44, 88)] {
        tcsetwinsize(&outer, size(rows, columns)).unwrap();
        while !seen.contains(&format!("{rows} {columns}\r\n")) {
            let mut buffer = [0; 256];
            let length = outer.read(&mut buffer).unwrap();
            seen.push_str(&String::from_utf8_lossy(&buffer[..length]));
        }
    }
    // Ctrl-C is for the guest's terminal.
    outer.write_all(&[3]).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(128 + 2));
}

#[test]
fn files_and_directories_are_copied_both_ways() {
    let guest = Guest::new();
    let tree = guest.path("tree");
    fs::create_dir_all(tree.join("sub")).unwrap();
    fs::write(tree.join("sub/file"), vec![1; 3_000_000]).unwrap();
    fs::set_permissions(tree.join("sub/file"), fs::Permissions::from_mode(0o750)).unwrap();
    let there = guest.path("there");
    fs::create_dir(&there).unwrap();

    let output = guest.cp("tree", &format!("VM:{}/", there.display()));
    assert!(output.status.success(), "{output:?}");
    assert!(text(&output.stderr).contains("3 entries"), "{output:?}");
    assert_eq!(fs::read(there.join("tree/sub/file")).unwrap(), vec![1; 3_000_000]);

    let output = guest.cp(&format!("VM:{}", there.join("tree/sub").display()), "back");
    assert!(output.status.success(), "{output:?}");
    let metadata = fs::metadata(guest.path("back/file")).unwrap();
    assert_eq!((metadata.len(), metadata.permissions().mode() & 0o7777), (3_000_000, 0o750));

    for (source, destination, problem) in [
        ("nothere", "VM:/tmp", "nothere"),
        ("VM:/no/such/file", ".", "/no/such/file"),
        ("tree", "VM:/no/such/directory/", "no directory /no/such/directory"),
        ("VM:/etc/passwd", "no/such/", "no directory no/such/"),
        ("tree", "there", "neither path is in a guest"),
        ("VM:/", "there/", "has no name"),
    ] {
        let output = guest.cp(source, destination);
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        assert!(text(&output.stderr).contains(problem), "{output:?}");
    }
}

#[test]
fn a_guest_without_an_agent_is_an_error_that_says_what_to_do() {
    let guest = Guest::new();
    let output = guest.shell(&["--port", "9"], "true").output().unwrap();
    assert_eq!(output.status.code(), Some(125));
    assert!(text(&output.stderr).contains("install ebb-guest-agent"), "{output:?}");
    let output = guest.shell(&["--port", "9", "--wait", "1"], "true").output().unwrap();
    assert!(text(&output.stderr).contains("no agent answered within 1 s"), "{output:?}");
    let output = guest.exec().args(["-t", "--", "true"]).output().unwrap();
    assert!(text(&output.stderr).contains("no terminal"), "{output:?}");
}

/// Commands side by side, each with its own streams.
#[test]
fn many_commands_run_at_once() {
    let guest = Guest::new();
    let mut children: Vec<_> = (0..40)
        .map(|number| {
            let mut child = guest.exec();
            child.stdin(Stdio::piped());
            let child = child.args(["--", "sh", "-c", "read line; echo $line $0"]);
            child.arg(number.to_string()).spawn().unwrap()
        })
        .collect();
    for (number, child) in children.iter_mut().enumerate().rev() {
        written(child, format!("line{number}\n").as_bytes());
    }
    for (number, child) in children.into_iter().enumerate() {
        let output = child.wait_with_output().unwrap();
        assert_eq!(text(&output.stdout), format!("line{number} {number}\n"));
    }
}
