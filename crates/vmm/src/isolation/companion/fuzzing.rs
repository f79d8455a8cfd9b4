//! Fuzz targets: a monitor that is in the hands of its guest, and a companion that is in the hands
//! of such a monitor.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{MetadataExt as _, symlink};
use std::path::{Path, PathBuf};
use std::sync::PoisonError;

use ebb_local_io::SocketFile;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::net::Shutdown;

use super::message::{Reply, Request};
use super::{
    AllowedDirectory, Companion, CompanionError, ConnectLink, KeptName, NewFile, pair, serve,
};
use crate::config::Switch;
use crate::fuzzing::{self, Input, Leak, prepared};
use crate::packet;

/// How a snapshot begins.
const MAGIC: &[u8] = b"EBB-VM\r\n";
/// Most messages of a run: all answers to them fit into a socket's buffer.
const MESSAGES: usize = 40;

/// A companion as it serves a running machine, and a monitor that sends it anything: nothing
/// outside of the allowed directory is created, removed or changed, inside only files of snapshots
/// come and go, no other socket than the one that was given is removed, and no descriptor is kept.
pub fn fuzz_companion_requests(data: &[u8]) {
    prepared(send_requests(data));
}

/// Names relative to the scene's directory that a monitor might try.
const PATHS: [&str; 18] = [
    "allowed/a",
    "allowed/b",
    "allowed/inner/c",
    "allowed/diary",
    "allowed/out/new",
    "allowed/out/snapshot",
    "allowed/out",
    "allowed/../outside/new",
    "allowed/inner/../../outside/snapshot",
    "allowed/inner/..",
    "allowed/",
    "allowed/.",
    "allowed",
    "allowed/missing/d",
    "outside/snapshot",
    "outside/new",
    "sockets/other",
    "",
];

/// All files below a directory, by path: mode, inode, and content or target.
type Listing = BTreeMap<PathBuf, (u32, u64, Vec<u8>)>;

fn list(directory: &Path) -> io::Result<Listing> {
    let mut listing = Listing::new();
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        let kind = fs::symlink_metadata(&path)?;
        let content = if kind.is_file() {
            fs::read(&path)?
        } else if kind.is_symlink() {
            fs::read_link(&path)?.as_os_str().as_bytes().to_vec()
        } else {
            Vec::new()
        };
        if kind.is_dir() {
            listing.extend(list(&path)?);
        }
        listing.insert(path, (kind.mode(), kind.ino(), content));
    }
    Ok(listing)
}

fn send_requests(data: &[u8]) -> io::Result<()> {
    let scene = tempfile::tempdir()?;
    let path = |name: &str| scene.path().join(name);
    for name in ["allowed", "allowed/inner", "outside", "sockets"] {
        fs::create_dir(path(name))?;
    }
    symlink(path("outside"), path("allowed/out"))?;
    fs::write(path("allowed/diary"), "not a snapshot")?;
    // Could be replaced, if it were allowed.
    fs::write(path("outside/snapshot"), MAGIC)?;
    let listen = |name: &str| {
        let mode = Mode::RUSR | Mode::WUSR;
        SocketFile::listen(&path(name), mode, 16).map_err(io::Error::other)
    };
    let (given, (_other, listener)) = (listen("sockets/given")?.0, listen("sockets/other")?);
    let _port = listen("sockets/given_1")?;
    let mut before = list(scene.path())?;
    before.remove(&path("sockets/given"));

    let (ours, theirs) = pair()?;
    let hostile = ours.try_clone()?;
    let thread = std::thread::spawn(move || serve::serve_on(&theirs));
    let companion = Companion::over(ours);
    let ready = || -> Result<(KeptName, ConnectLink), CompanionError> {
        let name = companion.keep_vsock(given)?;
        companion
            .allow(&AllowedDirectory::open(&path("allowed")).map_err(CompanionError::Start)?)?;
        companion.begin(Switch::On)?;
        Ok(name)
    };
    let (given, link) = ready().map_err(io::Error::other)?;

    let leak = Leak::new()?;
    let mut input = Input::new(data);
    for _ in 0..MESSAGES {
        if input.is_empty() || !send_one(&mut input, scene.path(), &hostile, &leak)? {
            break;
        }
    }
    connect_some(&mut input, &link, &leak)?;
    leak.check()?;
    drop((hostile, link));
    let accepted = rustix::net::accept(&listener);
    assert!(accepted.is_err(), "a socket without a port was connected");
    companion.0.socket.lock().unwrap_or_else(PoisonError::into_inner).take();
    assert!(thread.join().is_ok(), "the companion panics");
    drop(given);

    let after = list(scene.path())?;
    assert!(!after.contains_key(&path("sockets/given")), "the given name is left");
    let allowed = path("allowed");
    for (path, found) in &after {
        match before.remove(path) {
            Some(expected) => assert!(found == &expected, "{} has changed", path.display()),
            None => assert!(
                path.starts_with(&allowed) && found.0 & libc::S_IFMT == libc::S_IFREG,
                "{} was created",
                path.display()
            ),
        }
        assert!(path.extension() != Some(OsStr::new("partial")), "{} is left", path.display());
    }
    assert!(before.is_empty(), "{before:?} were removed");
    Ok(())
}

/// Sends a message with some descriptors, and receives what has been answered; returns false when
/// the companion has closed the connection.
fn send_one(
    input: &mut Input<'_>,
    scene: &Path,
    hostile: &OwnedFd,
    leak: &Leak,
) -> io::Result<bool> {
    let sockets = File::open(scene.join("sockets"))?;
    let outside = File::open(scene.join("outside"))?;
    let directory = input.one(&[sockets.as_fd(), outside.as_fd(), leak.descriptor()]);
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let other = rustix::fs::open(scene.join("sockets/other"), flags, Mode::empty())?;
    let (mut is_answered, mut descriptors) = (true, Vec::new());
    let request = match input.byte() % 8 {
        0 if input.rarely() => {
            is_answered = false;
            descriptors.extend([other.as_fd(), other.as_fd()]);
            Some(Request::Split)
        }
        0 => None,
        1 => {
            is_answered = false;
            descriptors.extend([directory, other.as_fd()]);
            let name = input.one(&["other", "snapshot", "../outside/snapshot", "."]).into();
            Some(Request::Keep { name })
        }
        2 if input.rarely() => {
            is_answered = false;
            descriptors.push(leak.descriptor());
            let domain = "red".parse().map_err(io::Error::other)?;
            Some(Request::Broker { path: scene.join("sockets/other"), domain })
        }
        2 => {
            is_answered = false;
            descriptors.push(directory);
            Some(Request::Allow { path: scene.to_owned() })
        }
        3 => match input.byte() % 4 {
            0 => Some(Request::Begin { seccomp: Switch::Off }),
            _ => Some(Request::Remove { index: u32::from(input.byte() % 3) }),
        },
        4 => Some(Request::Publish),
        5 => Some(Request::Discard),
        choice => {
            let mut path = scene.join(input.one(&PATHS)).into_os_string();
            let length = if input.rarely() { input.below(20) } else { 0 };
            path.push(OsStr::from_bytes(input.take(length)));
            let path = PathBuf::from(path);
            // Nothing here is below a directory for images.
            let open = choice == 7 && input.rarely();
            let readonly = if input.rarely() { Switch::On } else { Switch::Off };
            Some(if open { Request::Open { path, readonly } } else { Request::Create { path } })
        }
    };
    let more = if input.rarely() { input.below(60) } else { 0 };
    descriptors.extend(std::iter::repeat_n(leak.descriptor(), more));
    let text = if let Some(request) = request {
        // A path that is not UTF-8 has no form in JSON.
        serde_json::to_vec(&request).unwrap_or_default()
    } else {
        is_answered = false;
        let length = 1 + input.below(200);
        input.take(length).to_vec()
    };
    if text.is_empty() {
        return Ok(true);
    }
    if fuzzing::send(hostile, &text, &descriptors).is_err() {
        return Ok(false);
    }
    let wait = if is_answered { fuzzing::PATIENCE } else { Timespec { tv_sec: 0, tv_nsec: 0 } };
    let ready = poll(&mut [PollFd::new(hostile, PollFlags::IN)], Some(&wait))?;
    assert!(ready == 1 || !is_answered, "no answer to {}", String::from_utf8_lossy(&text));
    if ready == 0 {
        return Ok(true);
    }
    let Ok(Some((_, files))) = packet::receive::<Reply>(hostile) else { return Ok(false) };
    assert!(files.len() <= 1, "one file at a time");
    for file in files {
        File::from(file).write_all(MAGIC)?;
    }
    Ok(true)
}

/// Sends a vsock device's requests: ports, and anything else. An answer comes to each port, and a
/// socket only for the one that has a listener.
fn connect_some(input: &mut Input<'_>, link: &ConnectLink, leak: &Leak) -> io::Result<()> {
    let wait = || poll(&mut [PollFd::new(link, PollFlags::IN)], Some(&fuzzing::PATIENCE));
    for _ in 0..input.below(8) {
        let port = u32::from(input.byte() % 4);
        // Nonsense on the other connection has ended both.
        if link.request(port).is_err() {
            return Ok(());
        }
        assert!(wait()? == 1, "no answer for a port");
        let Ok(answer) = link.answer() else { return Ok(()) };
        assert!(matches!(answer, Some(Ok(_))) == (port == 1), "port {port}: {answer:?}");
    }
    if input.rarely() {
        let length = 1 + input.below(60);
        let text = input.take(length);
        let descriptors = vec![leak.descriptor(); input.below(60)];
        if !text.is_empty() && fuzzing::send(link, text, &descriptors).is_ok() {
            // It answers or ends.
            assert!(wait()? == 1, "neither an answer nor an end");
        }
    }
    Ok(())
}

/// Any text of `--allow-dir`: an open directory has an absolute path.
pub(crate) fn fuzz_allowed_directory(path: &Path) {
    if let Ok(directory) = AllowedDirectory::open(path) {
        assert!(directory.path.is_absolute());
    }
}

/// A monitor whose companion answers anything, with any descriptors: every call returns, and no
/// descriptor is kept.
pub fn fuzz_companion_replies(data: &[u8]) {
    prepared(send_replies(data));
}

fn send_replies(data: &[u8]) -> io::Result<()> {
    let mut input = Input::new(data);
    let (ours, theirs) = pair()?;
    let leak = Leak::new()?;
    for _ in 0..input.below(12) {
        let reply = |error| serde_json::to_vec(&Reply { error });
        let text = match input.byte() % 4 {
            0 => {
                let length = input.below(120);
                input.take(length).to_vec()
            }
            1 => reply(Some("no".to_owned()))?,
            _ => reply(None)?,
        };
        let count = if input.rarely() { input.below(60) } else { input.below(3) };
        fuzzing::send(&theirs, &text, &vec![leak.descriptor(); count])?;
    }
    // No call waits for more.
    rustix::net::shutdown(&theirs, Shutdown::Write)?;
    let companion = Companion::over(ours);
    let top = AllowedDirectory::open(Path::new("/"))?;
    let mut created = Vec::new();
    while !input.is_empty() {
        match input.byte() % 6 {
            0 => drop(companion.begin(Switch::On)),
            1 => drop(companion.allow(&top)),
            2 => drop(KeptName { companion: companion.clone(), index: 0 }),
            3 => drop(created.pop()),
            4 => {
                if let Some((_file, new)) = created.pop() {
                    let new: NewFile = new;
                    let _ = new.publish();
                }
            }
            _ => created.extend(companion.create(Path::new("/new"))),
        }
    }
    drop(created);
    drop(companion);
    leak.check()
}
