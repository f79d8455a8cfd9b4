//! A client's half of a snapshot: it creates the file with its own rights, hands it to the monitor,
//! and gives it its name when all of it is on the disk.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode, OFlags};
use rustix::io::Errno;
use thiserror::Error;

use super::SnapshotError;
use super::file::{MAGIC, open_to_read, read_some};
use crate::api::{Client, ClientError, SnapshotReport, SnapshotTarget};

/// No snapshot was taken.
#[derive(Debug, Error)]
pub enum TakeError {
    /// The file could not be created or named.
    #[error(transparent)]
    File(#[from] SnapshotError),
    /// The monitor has not written it.
    #[error(transparent)]
    Monitor(#[from] ClientError),
}

/// Has the monitor behind `client` write a snapshot, which then gets the name `path`. The file is
/// created with the rights of this process.
///
/// # Errors
/// [`TakeError`]; no new file of that name exists then.
pub fn take(client: &Client, path: &Path) -> Result<SnapshotReport, TakeError> {
    let new = NewSnapshot::create(path)?;
    let target = SnapshotTarget { path: path.to_owned() };
    let report = client.put_json_with("/vm/snapshot", &target, &[new.file().as_fd()])?;
    new.publish()?;
    Ok(report)
}

/// The file of a snapshot that is being written. Dropped before it is published, it is removed.
#[derive(Debug)]
pub struct NewSnapshot {
    path: PathBuf,
    file: File,
    /// Its name until it is published. Usually it has none: nothing is left of it then, even if
    /// this process is killed.
    temporary: Option<PathBuf>,
}

impl NewSnapshot {
    /// Creates a file in the directory of `path`. In the end it replaces a snapshot of that name,
    /// but no other file.
    ///
    /// # Errors
    /// [`SnapshotError`] if the file cannot be created.
    pub fn create(path: &Path) -> Result<Self, SnapshotError> {
        let (directory, name) = parts(path)?;
        check_replaceable(path)?;
        let created = match create_unnamed(directory) {
            // The file system has no files without a name, or the kernel does not know the flag.
            Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::NOENT | Errno::INVAL) => {
                create_temporary(directory, name).map(|(file, name)| (file, Some(name)))
            }
            unnamed => unnamed.map(|file| (file, None)),
        };
        match created {
            Ok((file, temporary)) => Ok(Self { path: path.to_owned(), file, temporary }),
            Err(errno) => {
                Err(SnapshotError::Create { path: path.to_owned(), source: errno.into() })
            }
        }
    }

    /// The file, for the monitor.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Gives the file its name. It was synced by the monitor.
    ///
    /// # Errors
    /// [`SnapshotError`]; the file is removed then.
    pub fn publish(mut self) -> Result<(), SnapshotError> {
        let path = self.path.clone();
        let (directory, name) = parts(&path)?;
        check_replaceable(&path)?;
        let failed =
            |errno: Errno| SnapshotError::Name { path: path.clone(), source: errno.into() };
        if self.temporary.is_none() {
            match self.link(&path) {
                Ok(()) => {
                    sync(directory);
                    return Ok(());
                }
                // A snapshot to be replaced, which only a rename can do.
                Err(Errno::EXIST) => {}
                Err(errno) => return Err(failed(errno)),
            }
            let temporary = directory.join(temporary_name(name).map_err(failed)?);
            self.link(&temporary).map_err(failed)?;
            self.temporary = Some(temporary);
        }
        if let Some(temporary) = &self.temporary {
            rustix::fs::rename(temporary, &path).map_err(failed)?;
        }
        self.temporary = None;
        sync(directory);
        Ok(())
    }

    /// Gives a file without a name one (open(2), `O_TMPFILE`).
    fn link(&self, path: &Path) -> Result<(), Errno> {
        let open = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        rustix::fs::linkat(CWD, open, CWD, path, AtFlags::SYMLINK_FOLLOW)
    }
}

impl Drop for NewSnapshot {
    fn drop(&mut self) {
        if let Some(temporary) = &self.temporary
            && let Err(error) = std::fs::remove_file(temporary)
        {
            tracing::warn!(
                "cannot remove the unfinished snapshot {}: {error}",
                temporary.display()
            );
        }
    }
}

/// Guest memory is confidential.
const MODE: Mode = Mode::RUSR.union(Mode::WUSR);

fn create_unnamed(directory: &Path) -> Result<File, Errno> {
    let flags = OFlags::WRONLY | OFlags::CLOEXEC | OFlags::TMPFILE;
    rustix::fs::open(directory, flags, MODE).map(File::from)
}

fn create_temporary(directory: &Path, name: &OsStr) -> Result<(File, PathBuf), Errno> {
    let temporary = directory.join(temporary_name(name)?);
    let flags = OFlags::WRONLY | OFlags::CLOEXEC | OFlags::CREATE | OFlags::EXCL;
    let file = rustix::fs::open(&temporary, flags, MODE)?;
    Ok((file.into(), temporary))
}

/// Directory and name of an absolute path.
fn parts(path: &Path) -> Result<(&Path, &OsStr), SnapshotError> {
    match (path.parent(), path.file_name()) {
        (Some(directory), Some(name)) if path.is_absolute() => Ok((directory, name)),
        _ => Err(SnapshotError::Path { path: path.to_owned() }),
    }
}

/// Refuses to replace a file that is not a snapshot.
fn check_replaceable(path: &Path) -> Result<(), SnapshotError> {
    let file = match open_to_read(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(source) => return Err(SnapshotError::Create { path: path.to_owned(), source }),
    };
    let mut magic = [0; MAGIC.len()];
    let is_snapshot = file.metadata().is_ok_and(|metadata| metadata.is_file())
        && read_some(&file, &mut magic).ok() == Some(MAGIC.len())
        && magic == *MAGIC;
    if is_snapshot { Ok(()) } else { Err(SnapshotError::Exists { path: path.to_owned() }) }
}

/// A name for a short time. Random and not a process id: processes of two containers may have the
/// same id.
fn temporary_name(name: &OsStr) -> Result<OsString, Errno> {
    let mut chance = [0; 8];
    rustix::rand::getrandom(&mut chance, rustix::rand::GetRandomFlags::empty())?;
    let mut temporary = OsString::from(".");
    temporary.push(name);
    temporary.push(format!(".{:016x}.partial", u64::from_ne_bytes(chance)));
    Ok(temporary)
}

/// The file has its name. A file system that cannot sync a directory has made it as durable as it
/// can.
fn sync(directory: &Path) {
    let _ = File::open(directory).and_then(|directory| directory.sync_all());
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn names(directory: &Path) -> Vec<OsString> {
        let entries = std::fs::read_dir(directory).unwrap();
        entries.map(|entry| entry.unwrap().file_name()).collect()
    }

    fn temporary(path: &Path) -> NewSnapshot {
        let (directory, name) = parts(path).unwrap();
        let (file, temporary) = create_temporary(directory, name).unwrap();
        NewSnapshot { path: path.to_owned(), file, temporary: Some(temporary) }
    }

    /// Both kinds of files are published, replace a snapshot but no other file, and leave nothing.
    #[test]
    fn files_with_and_without_a_name_are_published_or_removed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a");
        let unnamed = |path: &Path| NewSnapshot::create(path).unwrap();
        for (create, visible) in [(&unnamed as &dyn Fn(&Path) -> NewSnapshot, 0), (&temporary, 1)] {
            let abandoned = create(&path);
            assert_eq!(names(directory.path()).len(), visible);
            drop(abandoned);
            assert!(names(directory.path()).is_empty());

            for round in [b"1", b"2"] {
                let new = create(&path);
                new.file().write_all(MAGIC).unwrap();
                new.file().write_all(round).unwrap();
                new.publish().unwrap();
                assert_eq!(names(directory.path()), ["a"]);
                assert_eq!(std::fs::read(&path).unwrap(), [&MAGIC[..], round].concat());
                let mode = std::fs::metadata(&path).unwrap().permissions().mode();
                assert_eq!(mode & 0o777, 0o600);
            }

            // Another file got the name while the snapshot was written.
            let late = create(&path);
            std::fs::write(&path, "diary").unwrap();
            let error = late.publish().unwrap_err();
            assert!(matches!(error, SnapshotError::Exists { .. }), "{error}");
            assert_eq!(std::fs::read(&path).unwrap(), b"diary");
            assert_eq!(names(directory.path()), ["a"]);
            std::fs::remove_file(&path).unwrap();
        }
    }
}
