use std::fs::{self, File};
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};

use rustix::fs::FlockOperation;

use super::*;

const OWNER: Mode = Mode::RUSR.union(Mode::WUSR);

fn bind(path: &Path) -> Result<(SocketFile, OwnedFd), ListenError> {
    SocketFile::listen(path, OWNER, 1)
}

fn names(directory: &Path) -> Vec<String> {
    let names = fs::read_dir(directory).unwrap();
    names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn only_the_socket_is_created_with_its_permissions_and_removed_on_drop() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s");
    for mode in [0o600, 0o666] {
        let listener = SocketFile::listen(&path, Mode::from_bits_retain(mode), 1).unwrap();
        let metadata = fs::symlink_metadata(&path).unwrap();
        assert!(metadata.file_type().is_socket());
        assert_eq!(metadata.permissions().mode() & 0o777, mode);
        assert_eq!(names(directory.path()), ["s"]);
        UnixStream::connect(&path).unwrap();
        drop(listener);
        assert!(names(directory.path()).is_empty());
    }
}

/// Any user with read permission on a directory can lock it: `flock /run sleep inf`.
#[test]
fn a_lock_on_the_directory_does_not_prevent_listening() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s");
    let lock = File::open(directory.path()).unwrap();
    rustix::fs::flock(&lock, FlockOperation::LockExclusive).unwrap();
    drop(bind(&path).unwrap());
    // Also over the socket of a killed process.
    drop(UnixListener::bind(&path).unwrap());
    drop(bind(&path).unwrap());
}

#[test]
fn live_sockets_are_not_taken_over() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("stream");
    let first = bind(&path).unwrap();
    assert!(matches!(bind(&path), Err(ListenError::InUse { path: named }) if named == path));
    // Also with a full backlog.
    let address = SocketAddrUnix::new(&path).unwrap();
    let clients: Vec<_> = (0..8).map(|_| stream_socket().unwrap()).collect();
    let connect = |socket| rustix::net::connect(socket, &address);
    assert!(clients.iter().any(|client| connect(client) == Err(Errno::AGAIN)));
    assert!(matches!(bind(&path), Err(ListenError::InUse { .. })));
    drop(first);
    let path = directory.path().join("datagram");
    let _other = UnixDatagram::bind(&path).unwrap();
    assert!(matches!(bind(&path), Err(ListenError::InUse { .. })));
    assert_eq!(names(directory.path()), ["datagram"]);
}

#[test]
fn one_of_many_concurrent_listeners_takes_over_a_stale_socket() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s");
    drop(UnixListener::bind(&path).unwrap());
    let listeners: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> =
            (0..8).map(|_| scope.spawn(|| SocketFile::listen(&path, OWNER, 16))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(listeners.iter().filter(|listener| listener.is_ok()).count(), 1);
    UnixStream::connect(&path).unwrap();
}

#[test]
fn another_file_that_took_the_name_is_kept() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s");
    let listener = bind(&path).unwrap();
    fs::remove_file(&path).unwrap();
    fs::write(&path, "precious").unwrap();
    drop(listener);
    assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
    assert!(matches!(bind(&path), Err(ListenError::NotASocket { .. })));
    assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
}

/// A process is killed, and the next one takes over the name: file systems give its socket the
/// inode number of the first.
#[test]
fn the_socket_of_the_next_process_is_kept() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s");
    for _ in 0..50 {
        let (mut file, socket) = SocketFile::listen(&path, OWNER, 1).unwrap();
        drop(socket);
        // Otherwise the next socket may get the number of the lock.
        tempfile::NamedTempFile::new_in(directory.path()).unwrap().keep().unwrap();
        fs::remove_file(&path).unwrap();
        let next = UnixListener::bind(&path).unwrap();
        file.remove();
        assert!(path.exists());
        drop(next);
        fs::remove_file(&path).unwrap();
    }
}

#[test]
fn invalid_paths_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let missing = directory.path().join("missing/s");
    assert!(matches!(bind(&missing), Err(ListenError::NoDirectory { path }) if path == missing));
    let long = directory.path().join("a".repeat(120));
    assert!(matches!(bind(&long), Err(ListenError::BadPath { length, .. }) if length > 120));
    assert!(matches!(bind(Path::new("")), Err(ListenError::BadPath { .. })));
    assert!(matches!(bind(Path::new("a\0b")), Err(ListenError::BadPath { .. })));
    assert!(matches!(bind(directory.path()), Err(ListenError::NotASocket { .. })));
    let link = directory.path().join("link");
    std::os::unix::fs::symlink("nowhere", &link).unwrap();
    assert!(matches!(bind(&link), Err(ListenError::NotASocket { .. })));
    assert_eq!(fs::read_link(&link).unwrap(), Path::new("nowhere"));
}

/// In a directory that other users may write to, they can create any file in place of the lock.
#[test]
fn other_files_in_place_of_the_lock_are_neither_followed_nor_changed() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s");
    let lock = NameLock::path(&path);
    std::os::unix::fs::symlink(directory.path().join("made"), &lock).unwrap();
    assert!(matches!(bind(&path), Err(ListenError::Locked { .. })));
    assert_eq!(names(directory.path()), [".s.lock"]);
    fs::remove_file(&lock).unwrap();
    fs::create_dir(&lock).unwrap();
    assert!(matches!(bind(&path), Err(ListenError::Locked { .. })));
    fs::remove_dir(&lock).unwrap();
    // A FIFO can be locked like a file and does not block the open.
    rustix::fs::mknodat(rustix::fs::CWD, &lock, FileType::Fifo, OWNER, 0).unwrap();
    drop(bind(&path).unwrap());
}

#[test]
fn the_error_names_the_lock_of_another_user() {
    if !rustix::process::geteuid().is_root() {
        println!("not tested: needs root to become another user");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o1777)).unwrap();
    let path = directory.path().join("s");
    fs::write(NameLock::path(&path), "").unwrap();
    fs::set_permissions(NameLock::path(&path), fs::Permissions::from_mode(0o600)).unwrap();
    let other = std::thread::spawn(move || {
        // Affects this thread only.
        rustix::thread::set_thread_uid(rustix::thread::Uid::from_raw(65534)).unwrap();
        bind(&path).unwrap_err()
    });
    let error = other.join().unwrap();
    assert!(error.to_string().contains(".s.lock"), "{error}");
}

#[test]
fn the_error_names_a_held_lock() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s");
    let _lock = NameLock::take(&path, LIMIT).unwrap();
    let error = bind(&path).unwrap_err();
    assert!(error.to_string().contains(".s.lock"), "{error}");
}
