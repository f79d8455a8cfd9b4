//! The one trust domain that the kernel merges pages for: a file that all monitors of the host
//! lock.
//!
//! The kernel merges the pages of all processes that let it, whosever they are. So each of them
//! holds a shared lock on a file that names their domain. A process that gets the file for itself
//! alone writes its own domain into it. The locks end with the processes, however they end.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use super::error::KsmError;

/// The folder of the file.
pub const RUN_FOLDER: &str = "/run/ebb";
/// Name of the file: the number of the process that has named the domain, and the domain.
const FILE_NAME: &str = "ksm-domain";

/// This process may let the kernel merge its pages, and processes of other trust domains may not.
/// It holds until it is dropped; memory that was offered to the kernel must be gone by then.
#[derive(Debug)]
pub struct KernelDomain {
    /// Locked.
    _file: File,
}

impl KernelDomain {
    /// Joins `domain`; the file is in `folder` ([`RUN_FOLDER`]). Makes both if they are not there.
    ///
    /// # Errors
    /// [`KsmError::OtherDomain`] while there are processes of another one; [`KsmError::Domain`]
    /// where the file cannot be used: it is its owner's alone, so that other users of the host
    /// cannot keep it locked.
    pub fn join(folder: &Path, domain: &str) -> Result<Self, KsmError> {
        let path = folder.join(FILE_NAME);
        let error = |action| {
            let path = path.clone();
            move |source| KsmError::Domain { action, path, source }
        };
        let mut builder = DirBuilder::new();
        builder.recursive(true).mode(0o755).create(folder).map_err(error("make the folder of"))?;
        let flags = (rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::CLOEXEC).bits() as i32;
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let mut file = options.custom_flags(flags).open(&path).map_err(error("open"))?;

        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {
                let text = format!("{} {domain}", std::process::id());
                file.set_len(0)
                    .and_then(|()| file.write_all(text.as_bytes()))
                    .and_then(|()| io::Seek::rewind(&mut file))
                    .map_err(error("write"))?;
            }
            Err(Errno::WOULDBLOCK) => {}
            Err(errno) => return Err(error("lock")(errno.into())),
        }
        // The exclusive lock is gone for a moment before this one is there, and another process may
        // have written its own domain meanwhile: what counts is what the file says from now on,
        // when it cannot be written any more.
        rustix::io::retry_on_intr(|| flock(&file, FlockOperation::LockShared))
            .map_err(|errno| error("lock")(errno.into()))?;
        let mut text = String::new();
        file.read_to_string(&mut text).map_err(error("read"))?;
        match text.split_once(' ') {
            Some((_, present)) if present == domain => Ok(Self { _file: file }),
            Some((pid, present)) => Err(KsmError::OtherDomain {
                present: present.to_owned(),
                pid: pid.parse().unwrap_or_default(),
                wanted: domain.to_owned(),
            }),
            None => Err(error("understand")(io::ErrorKind::InvalidData.into())),
        }
    }
}
