use std::os::unix::fs::{PermissionsExt as _, symlink};

use super::*;

fn unpack(destination: &Path, bytes: &[u8]) -> anyhow::Result<Summary> {
    Place::find(destination, Some(OsStr::new("copy")))?.unpack(bytes, &mut |_| {})
}

/// An archive with these names, each a file unless it ends with a slash or has a target.
fn archive(entries: &[(&str, Option<&str>)]) -> Vec<u8> {
    let mut builder = Builder::new(Vec::new());
    for (name, target) in entries {
        let mut header = Header::new_gnu();
        header.set_mode(0o4755);
        // The builder itself refuses such names.
        header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
        let content: &[u8] = match target {
            Some(target) => {
                header.set_entry_type(EntryType::Symlink);
                header.as_old_mut().linkname[..target.len()].copy_from_slice(target.as_bytes());
                b""
            }
            None if name.ends_with('/') => {
                header.set_entry_type(EntryType::Directory);
                b""
            }
            None => {
                header.set_entry_type(EntryType::Regular);
                b"text"
            }
        };
        header.set_size(content.len() as u64);
        header.set_cksum();
        builder.append(&header, content).unwrap();
    }
    builder.into_inner().unwrap()
}

#[test]
fn a_tree_survives() {
    let directory = tempfile::tempdir().unwrap();
    let source = directory.path().join("tree");
    fs::create_dir_all(source.join("a/b")).unwrap();
    let long = "x".repeat(200);
    fs::write(source.join("a").join(&long), vec![7; 100_000]).unwrap();
    fs::set_permissions(source.join("a").join(&long), fs::Permissions::from_mode(0o751)).unwrap();
    fs::write(source.join("empty"), "").unwrap();
    symlink("/nowhere", source.join("link")).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(source.join("socket")).unwrap();
    let mut bytes = Vec::new();
    let packed = pack(&source, &mut bytes).unwrap();
    assert_eq!(packed, Summary { entries: 6, bytes: 100_000, skipped: 1 });
    for _ in 0..2 {
        // The second time over the first.
        let unpacked = unpack(directory.path(), &bytes).unwrap();
        assert_eq!(unpacked, Summary { skipped: 0, ..packed });
    }
    let copy = directory.path().join("copy");
    let file = copy.join("a").join(&long);
    assert_eq!(fs::read(&file).unwrap(), vec![7; 100_000]);
    let original = fs::metadata(source.join("a").join(&long)).unwrap();
    let metadata = fs::metadata(&file).unwrap();
    assert_eq!(metadata.mode() & 0o7777, 0o751);
    assert_eq!(metadata.mtime(), original.mtime());
    assert_eq!(fs::read_link(copy.join("link")).unwrap(), Path::new("/nowhere"));
    assert!(copy.join("a/b").is_dir());
    assert_eq!(fs::read_dir(&copy).unwrap().count(), 3, "nothing temporary is left");
}

#[test]
fn a_file_gets_the_new_name() {
    let directory = tempfile::tempdir().unwrap();
    let source = directory.path().join("file");
    fs::write(&source, "text").unwrap();
    let mut bytes = Vec::new();
    pack(&source, &mut bytes).unwrap();
    unpack(&directory.path().join("new"), &bytes).unwrap();
    assert_eq!(fs::read_to_string(directory.path().join("new")).unwrap(), "text");
    let error = unpack(&directory.path().join("not/there"), &bytes).unwrap_err();
    assert!(error.to_string().starts_with("there is no directory"), "{error}");
    let error = unpack(Path::new("/nothere/"), &bytes).unwrap_err();
    assert_eq!(error.to_string(), "there is no directory /nothere/");
    let error = pack(&directory.path().join("nothere"), Vec::new()).unwrap_err();
    assert!(error.to_string().contains("nothere"), "{error}");
    assert!(Place::find(directory.path(), None).is_err());
}

#[test]
fn nothing_is_written_elsewhere() {
    let directory = tempfile::tempdir().unwrap();
    let outside = directory.path().join("outside");
    let inside = directory.path().join("inside");
    fs::create_dir(&outside).unwrap();
    fs::create_dir(&inside).unwrap();
    let target = outside.to_str().unwrap();
    for entries in [
        &[("top/../../outside/file", None)][..],
        &[("/etc/file", None)],
        &[("../outside/file", None)],
        &[("top/", None), ("other/", None)],
        &[("top/", None), ("top/link", Some(target)), ("top/link/file", None)],
        &[("top", Some(target)), ("top/file", None)],
        &[("..", None)],
    ] {
        assert!(unpack(&inside, &archive(entries)).is_err(), "{entries:?}");
        assert_eq!(fs::read_dir(&outside).unwrap().count(), 0, "{entries:?}");
        let names: Vec<_> =
            fs::read_dir(&inside).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert!(names.iter().all(|name| name == "copy"), "{names:?}");
        let _ = fs::remove_dir_all(inside.join("copy"));
        let _ = fs::remove_file(inside.join("copy"));
    }
    // A link is replaced, and what it leads to is not written.
    symlink(outside.join("file"), inside.join("copy")).unwrap();
    unpack(&inside, &archive(&[("top", None)])).unwrap();
    assert_eq!(fs::read_to_string(inside.join("copy")).unwrap(), "text");
    assert_eq!(fs::metadata(inside.join("copy")).unwrap().mode() & 0o7777, 0o755);
    assert_eq!(fs::read_dir(&outside).unwrap().count(), 0);
}

#[test]
fn a_failure_keeps_the_old_file() {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("copy"), "old").unwrap();
    let bytes = archive(&[("top", None)]);
    assert!(unpack(directory.path(), &bytes[..514]).is_err());
    assert_eq!(fs::read_to_string(directory.path().join("copy")).unwrap(), "old");
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
}
