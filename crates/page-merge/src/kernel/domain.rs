//! The one trust domain for which the kernel merges pages: a file that all monitors of the host
//! lock.
//!
//! The kernel merges the pages of all processes that allow it, whatever their owner. So each of
//! them holds a shared lock on a file that names their domain. A process that gets an exclusive
//! lock writes its own domain into the file. The locks end with the processes, however they end.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Read as _, Seek as _, Write as _};
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt as _, OpenOptionsExt};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::io::Errno;

use super::error::KsmError;

/// Directory of the file.
pub const RUN_FOLDER: &str = "/run/ebb";
/// Name of the file, which contains the ID of the process that wrote it, and the domain.
const FILE_NAME: &str = "ksm-domain";
/// Maximum length of the file's content.
const LONGEST_BYTES: u64 = 512;
/// Time limit for locking: others hold the exclusive lock for microseconds.
const LOCK_LIMIT: Duration = Duration::from_secs(5);
const LOCK_PAUSE: Duration = Duration::from_millis(5);

/// Permission for this process to let the kernel merge its pages, which excludes processes of other
/// trust domains. It lasts until it is dropped; memory that was advised mergeable must be unmapped
/// by then.
#[derive(Debug)]
pub struct KernelDomain {
    /// Locked.
    file: File,
}

impl KernelDomain {
    /// Joins `domain`; the file is in `folder` ([`RUN_FOLDER`]). Creates both if they do not exist.
    ///
    /// # Errors
    /// [`KsmError::OtherDomain`] while processes of another domain exist; [`KsmError::Domain`]
    /// where the file cannot be used: only its owner may access it, so that other users of the host
    /// cannot keep it locked.
    pub fn join(folder: &Path, domain: &str) -> Result<Self, KsmError> {
        let path = folder.join(FILE_NAME);
        let error = |action| {
            let path = path.clone();
            move |source| KsmError::Domain { action, path, source }
        };
        let mut builder = DirBuilder::new();
        builder
            .recursive(true)
            .mode(0o755)
            .create(folder)
            .map_err(error("create the directory of"))?;
        let begin = Instant::now();
        loop {
            let file = open(&path).map_err(error("open"))?;
            check(&file).map_err(error("trust"))?;
            match Self::lock(file, &path, domain).map_err(error("use"))? {
                Locked::InVain if begin.elapsed() < LOCK_LIMIT => thread::sleep(LOCK_PAUSE),
                Locked::InVain => return Err(error("lock")(io::ErrorKind::TimedOut.into())),
                Locked::With(file, Some((_, present))) if present == domain => {
                    return Ok(Self { file });
                }
                Locked::With(_, Some((pid, present))) => {
                    return Err(KsmError::OtherDomain { present, pid, wanted: domain.to_owned() });
                }
                Locked::With(_, None) => {
                    return Err(error("understand")(io::ErrorKind::InvalidData.into()));
                }
            }
        }
    }

    /// The same permission once more. A forked process (fork(2)) has the lock already, as long as
    /// one of them has the file open.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self { file: self.file.try_clone()? })
    }

    /// Its file, which a forked process keeps open.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Writes the domain into the file if no other process uses it, and takes a shared lock.
    fn lock(mut file: File, path: &Path, domain: &str) -> io::Result<Locked> {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {
                let text = format!("{} {domain}", std::process::id());
                file.set_len(0)?;
                file.write_all(text.as_bytes())?;
                file.rewind()?;
            }
            Err(Errno::WOULDBLOCK) => {}
            Err(errno) => return Err(errno.into()),
        }
        // Between the exclusive lock and this one the file is unlocked for a moment, and another
        // process may have written its own domain: only the content read under this lock counts,
        // since it can no longer be changed.
        match flock(&file, FlockOperation::NonBlockingLockShared) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK | Errno::INTR) => return Ok(Locked::InVain),
            Err(errno) => return Err(errno.into()),
        }
        // A file that has lost its name to another one protects nothing.
        let own = rustix::fs::fstat(&file)?;
        match rustix::fs::lstat(path) {
            Ok(named) if (named.st_dev, named.st_ino) == (own.st_dev, own.st_ino) => {}
            Ok(_) | Err(Errno::NOENT) => return Ok(Locked::InVain),
            Err(errno) => return Err(errno.into()),
        }
        let mut text = String::new();
        (&file).take(LONGEST_BYTES).read_to_string(&mut text)?;
        let present = text
            .split_once(' ')
            .map(|(pid, present)| (pid.parse().unwrap_or_default(), present.to_owned()));
        Ok(Locked::With(file, present))
    }
}

/// Result of an attempt to lock the file.
enum Locked {
    /// Another process is about to write its domain, or the file was replaced.
    InVain,
    /// The locked file, with the process and the domain that it names.
    With(File, Option<(u32, String)>),
}

fn open(path: &Path) -> io::Result<File> {
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC).bits() as i32;
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(0o600);
    options.custom_flags(flags).open(path)
}

/// Refuses a file that another user could lock or write to.
fn check(file: &File) -> io::Result<()> {
    let metadata = file.metadata()?;
    let is_ours = metadata.uid() == rustix::process::geteuid().as_raw();
    let is_private = metadata.mode() & 0o777 == 0o600;
    if metadata.is_file() && is_ours && is_private {
        return Ok(());
    }
    Err(io::Error::other("it is not a file that only this user may read and write; remove it"))
}
