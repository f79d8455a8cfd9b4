use std::os::unix::net::UnixListener;
use std::thread::JoinHandle;

use super::*;

/// A companion that is a thread of the test.
fn companion() -> (Companion, JoinHandle<io::Result<()>>) {
    let (ours, theirs) = pair().unwrap();
    let thread = std::thread::spawn(move || serve::serve_on(&theirs).map(drop));
    (Companion::over(ours), thread)
}

#[test]
fn sockets_are_removed_on_request_and_at_the_end() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let listen =
        |name: &str| SocketFile::listen(&path(name), Mode::RUSR, 1).map(|(file, _)| file).unwrap();
    let (companion, thread) = companion();
    let (early, late) =
        (companion.keep(listen("early")).unwrap(), companion.keep(listen("late")).unwrap());
    let taken = companion.keep(listen("taken")).unwrap();
    companion.begin(Switch::On).unwrap();
    assert!(path("early").exists() && path("late").exists());
    drop(early);
    assert!(!path("early").exists() && path("late").exists());
    // Another process has taken the name meanwhile.
    std::fs::remove_file(path("taken")).unwrap();
    let _other = UnixListener::bind(path("taken")).unwrap();
    // The monitor is killed: nothing of it is dropped.
    companion.0.socket.lock().unwrap().take();
    thread.join().unwrap().unwrap();
    assert!(!path("late").exists() && path("taken").exists());
    // Now there is no companion any more.
    drop((late, taken));
}

#[test]
fn a_new_cgroup_is_removed_at_the_end() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("vm1");
    std::fs::create_dir(&path).unwrap();
    let parent = std::fs::File::open(directory.path()).unwrap().into();
    let (companion, thread) = companion();
    companion.keep_cgroup(NewCgroup { parent, name: "vm1".into() }).unwrap();
    companion.begin(Switch::On).unwrap();
    assert!(path.exists());
    drop(companion);
    thread.join().unwrap().unwrap();
    assert!(!path.exists());
}

#[test]
fn nothing_is_kept_after_the_start() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let (companion, thread) = companion();
    companion.begin(Switch::Off).unwrap();
    let (file, _socket) = SocketFile::listen(&path, Mode::RUSR, 1).unwrap();
    let name = companion.keep(file).unwrap();
    companion.allow(&AllowedDirectory::open(directory.path()).unwrap()).unwrap();
    assert!(companion.begin(Switch::Off).is_err());
    let error = companion.create(&directory.path().join("a")).unwrap_err();
    assert!(error.to_string().contains(NO_DIRECTORY), "{error}");
    drop(name);
    companion.0.socket.lock().unwrap().take();
    thread.join().unwrap().unwrap();
    assert!(path.exists());
}

#[test]
fn a_preparation_that_was_refused_fails_the_start() {
    let directory = tempfile::tempdir().unwrap();
    let (companion, _thread) = companion();
    let names: Vec<_> = (0..9)
        .map(|number| {
            let path = directory.path().join(number.to_string());
            companion.keep(SocketFile::listen(&path, Mode::RUSR, 1).unwrap().0).unwrap()
        })
        .collect();
    let error = companion.begin(Switch::Off).unwrap_err();
    assert!(error.to_string().contains("too many names"), "{error}");
    drop(names);
}

#[test]
fn files_are_created_below_allowed_directories_only() {
    use std::io::Write as _;
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    for name in ["yes", "yes/inner", "no"] {
        std::fs::create_dir(path(name)).unwrap();
    }
    std::os::unix::fs::symlink(path("no"), path("yes/link")).unwrap();
    std::os::unix::fs::symlink("inner", path("yes/short")).unwrap();
    let (companion, thread) = companion();
    companion.allow(&AllowedDirectory::open(&path("yes")).unwrap()).unwrap();
    companion.begin(Switch::On).unwrap();
    let count = || std::fs::read_dir(path("no")).unwrap().count();
    for (name, words) in [
        ("no/a", "is not below"),
        ("yes/../no/a", "is not below"),
        ("yes/link/a", "is not below"),
        ("yes/missing/a", "No such file"),
        ("yes", "is not below"),
        ("yes/..", "is not below"),
    ] {
        let error = companion.create(&path(name)).unwrap_err();
        assert!(matches!(error, CompanionError::Refused(_)), "{name}: {error}");
        assert!(error.to_string().contains(words), "{name}: {error}");
    }
    assert_eq!(count(), 0);
    for name in ["yes/a", "yes/inner/a", "yes/short/b"] {
        for published in [false, true, true] {
            let (file, new) = companion.create(&path(name)).unwrap();
            std::fs::File::from(file).write_all(b"EBB-VM\r\n").unwrap();
            if published {
                new.publish().unwrap();
            }
        }
        assert_eq!(std::fs::read(path(name)).unwrap(), b"EBB-VM\r\n");
    }
    // A second request neither replaces the first one's file nor gets its name.
    let (file, first) = companion.create(&path("yes/a")).unwrap();
    let error = companion.create(&path("yes/b")).unwrap_err();
    assert!(error.to_string().contains("another snapshot"), "{error}");
    std::fs::File::from(file).write_all(b"EBB-VM\r\nfirst").unwrap();
    first.publish().unwrap();
    assert_eq!(std::fs::read(path("yes/a")).unwrap(), b"EBB-VM\r\nfirst");
    assert!(!path("yes/b").exists());
    // Killed in the middle, the monitor leaves nothing.
    let (_file, new) = companion.create(&path("yes/c")).unwrap();
    companion.0.socket.lock().unwrap().take();
    thread.join().unwrap().unwrap();
    drop(new);
    assert_eq!(std::fs::read_dir(path("yes")).unwrap().count(), 4);
}

#[test]
fn images_are_opened_below_their_directories_only() {
    use std::os::unix::fs::MetadataExt as _;

    use rustix::fs::FileType;
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    for name in ["files", "images", "images/folder", "no"] {
        std::fs::create_dir(path(name)).unwrap();
    }
    for name in ["files/a", "images/a", "no/a"] {
        std::fs::write(path(name), [0; 512]).unwrap();
    }
    std::os::unix::fs::symlink(path("no"), path("images/link")).unwrap();
    std::os::unix::fs::symlink("a", path("images/short")).unwrap();
    rustix::fs::mknodat(rustix::fs::CWD, path("images/fifo"), FileType::Fifo, Mode::RWXU, 0)
        .unwrap();
    let (companion, _thread) = companion();
    companion.allow(&AllowedDirectory::open(&path("files")).unwrap()).unwrap();
    companion.allow_images(&AllowedDirectory::open(&path("images")).unwrap()).unwrap();
    companion.begin(Switch::On).unwrap();
    for (name, words) in [
        ("files/a", "is not below"),
        ("no/a", "is not below"),
        ("images/link/a", "is not below"),
        ("images/../no/a", "is not below"),
        ("images", "is not below"),
        ("images/missing", "No such file or directory (os error 2)"),
        ("images/folder", "Is a directory (os error 21)"),
        ("images/fifo", "neither a file nor a block device"),
    ] {
        for readonly in [Switch::On, Switch::Off] {
            let error = companion.open_image(&path(name), readonly).unwrap_err();
            assert!(error.to_string().contains(words), "{name}: {error}");
        }
    }
    for name in ["images/a", "images/short"] {
        let inode = std::fs::metadata(path(name)).unwrap().ino();
        for (readonly, count) in [(Switch::On, 1), (Switch::Off, 2)] {
            let files = companion.open_image(&path(name), readonly).unwrap();
            assert_eq!(files.len(), count);
            for file in files {
                assert_eq!(std::fs::File::from(file).metadata().unwrap().ino(), inode);
            }
        }
    }
    assert!(companion.create(&path("images/new")).is_err());
}

#[test]
fn a_directory_that_moves_away_is_an_error_and_no_harm() {
    use std::fs::{create_dir, read_dir, remove_dir, rename};
    let directory = tempfile::tempdir().unwrap();
    let (top, elsewhere) = (directory.path().join("top"), directory.path().join("elsewhere"));
    create_dir(&top).unwrap();
    let (companion, _thread) = companion();
    companion.allow(&AllowedDirectory::open(&top).unwrap()).unwrap();
    companion.begin(Switch::On).unwrap();
    let refused = |words: &str| {
        let error = companion.create(&top.join("a")).unwrap_err();
        assert!(matches!(error, CompanionError::Refused(_)), "{error}");
        assert!(error.to_string().contains("moved or removed"), "{error}");
        assert!(error.to_string().contains(words), "{error}");
    };
    rename(&top, &elsewhere).unwrap();
    refused("No such file");
    // Another one in its place is not meant.
    create_dir(&top).unwrap();
    refused("another directory");
    assert_eq!(read_dir(&top).unwrap().count() + read_dir(&elsewhere).unwrap().count(), 0);
    remove_dir(&top).unwrap();
    rename(&elsewhere, &top).unwrap();
    companion.create(&top.join("a")).unwrap().1.publish().unwrap();
    assert!(top.join("a").exists());
    std::fs::remove_file(top.join("a")).unwrap();
    remove_dir(&top).unwrap();
    refused("No such file");
}

#[test]
fn a_monitor_that_speaks_nonsense_loses_its_companion() {
    for nonsense in [&b"{"[..], b"null", b"{\"open\":\"/etc/shadow\"}", &[0; 9000]] {
        let (ours, theirs) = pair().unwrap();
        let thread = std::thread::spawn(move || serve::serve_on(&theirs).map(drop));
        // A message that is longer than the socket's buffer is refused here already.
        let _ = rustix::net::send(&ours, nonsense, rustix::net::SendFlags::NOSIGNAL);
        drop(ours);
        assert!(thread.join().unwrap().is_err(), "{nonsense:?}");
    }
}

#[test]
fn the_end_does_not_wait_for_a_companion_that_is_stopped() {
    let (ours, theirs) = pair().unwrap();
    let name = KeptName { companion: Companion::over(ours), index: 0 };
    let (done, wait) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        drop(name);
        done.send(())
    });
    // Less than the patience at the start.
    wait.recv_timeout(PATIENCE / 2).unwrap();
    drop(theirs);
}
