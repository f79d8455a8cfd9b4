//! Who uses KSM, and what its settings were before: a file that all monitors of the host share.
//!
//! The first user notes what a setting was before it changes it, and the last one puts it back. A
//! user that was killed cannot do that: whoever comes or goes next notices that it is gone. The
//! file also names the trust domain of all users, since the kernel merges the pages of all of them
//! with each other.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{FallocateFlags, FlockOperation, flock};

use super::change::{plan, touched};
use super::error::KsmError;
use super::knobs::Values;
use super::record::{Record, User};
use super::sysfs::Ksm;

/// The folder of the file of users.
pub const RUN_FOLDER: &str = "/run/ebb";
/// Name of the file.
const FILE_NAME: &str = "ksm-users.json";
/// A larger file is not one of users.
const MAX_FILE_BYTES: u64 = 1 << 20;
/// Room that is taken for the list when it is opened, enough for some thousand users: one that
/// could be written only in part, because the file system is full, would be lost for all of them.
const ROOM_BYTES: u64 = 1 << 16;

/// The file of users, opened.
#[derive(Debug)]
pub struct KsmUsers {
    path: PathBuf,
    file: File,
    proc: PathBuf,
}

impl KsmUsers {
    /// Opens the file in `folder` ([`RUN_FOLDER`]); makes both if they are not there.
    pub fn open(folder: &Path) -> Result<Self, KsmError> {
        let path = folder.join(FILE_NAME);
        let error = |action| {
            let path = path.clone();
            move |source| KsmError::Users { action, path, source }
        };
        DirBuilder::new()
            .recursive(true)
            .mode(0o755)
            .create(folder)
            .map_err(error("make the folder of"))?;
        // Others must not be able to keep it locked, or to say what the settings were.
        let flags = (rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::CLOEXEC).bits() as i32;
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(flags)
            .open(&path)
            .map_err(error("open"))?;
        match rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, ROOM_BYTES) {
            // A file system that cannot do it.
            Ok(()) | Err(rustix::io::Errno::OPNOTSUPP) => {}
            Err(errno) => return Err(error("make room in")(errno.into())),
        }
        Ok(Self { path, file, proc: PathBuf::from("/proc") })
    }

    /// Makes this process a user of `domain`, and changes the settings in `wanted`. A setting that
    /// can only change while nothing is shared is refused while there are other users.
    pub fn join(
        self,
        ksm: Arc<Ksm>,
        domain: &str,
        wanted: &Values,
    ) -> Result<Membership, KsmError> {
        ksm.check_writable()?;
        let own = User::this(&self.proc).ok_or_else(|| {
            self.error("find this process's own entry for", io::ErrorKind::NotFound.into())
        })?;
        let locked = self.lock()?;
        let mut record = locked.read()?;
        record.forget_dead(&self.proc);
        match record.users.first() {
            Some(user) if record.domain != domain => {
                return Err(KsmError::OtherDomain {
                    present: record.domain,
                    pid: user.pid,
                    wanted: domain.to_owned(),
                });
            }
            Some(_) => {}
            None => {
                // All that were there before have been killed: this one begins with what they
                // found.
                ksm.apply(&record.originals)?;
                record = Record { domain: domain.to_owned(), ..Record::default() };
            }
        }
        if record.users.contains(&own) {
            let source =
                io::Error::new(io::ErrorKind::AlreadyExists, "this process is in it already");
            return Err(self.error("enter", source));
        }
        record.users.push(own);
        let changed = locked.change(&mut record, own, &ksm, wanted);
        drop(locked);
        let membership = Membership { users: self, ksm, own };
        // Dropped after a failure, it leaves again, and puts back what it has changed.
        changed.map(|()| membership)
    }

    fn error(&self, action: &'static str, source: io::Error) -> KsmError {
        KsmError::Users { action, path: self.path.clone(), source }
    }

    fn lock(&self) -> Result<Locked<'_>, KsmError> {
        loop {
            match flock(&self.file, FlockOperation::LockExclusive) {
                Ok(()) => return Ok(Locked(self)),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(self.error("lock", error.into())),
            }
        }
    }
}

/// The file while nobody else may use it.
struct Locked<'a>(&'a KsmUsers);

impl Locked<'_> {
    fn read(&self) -> Result<Record, KsmError> {
        let read = || -> io::Result<Vec<u8>> {
            let mut text = Vec::new();
            let mut buffer = [0; 4096];
            while text.len() as u64 <= MAX_FILE_BYTES {
                match self.0.file.read_at(&mut buffer, text.len() as u64) {
                    Ok(0) => break,
                    Ok(length) => text.extend_from_slice(&buffer[..length]),
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => return Err(error),
                }
            }
            Ok(text)
        };
        let text = read().map_err(|source| self.0.error("read", source))?;
        Record::parse(&text)
            .map_err(|problem| KsmError::Record { path: self.0.path.clone(), problem })
    }

    /// Replaces the record, in the room that there is for it; what is behind it is not read.
    fn write(&self, record: &Record) -> Result<(), KsmError> {
        let text = record
            .to_text()
            .map_err(|problem| KsmError::Record { path: self.0.path.clone(), problem })?;
        if text.len() as u64 > ROOM_BYTES {
            return Err(self.0.error("write all users to", io::ErrorKind::FileTooLarge.into()));
        }
        self.0.file.write_all_at(&text, 0).map_err(|source| self.0.error("write", source))
    }

    /// Changes settings for `own`, who is in `record`. What was before is noted first.
    fn change(
        &self,
        record: &mut Record,
        own: User,
        ksm: &Ksm,
        wanted: &Values,
    ) -> Result<(), KsmError> {
        let present = ksm.settings()?;
        let steps = plan(&present, wanted)?;
        let knobs = touched(&steps);
        let others = record.users.iter().filter(|user| **user != own).count();
        let guarded = knobs.iter().find(|knob| knob.needs_nothing_shared());
        if let (Some(&knob), 1..) = (guarded, others) {
            let present = present.get(knob).unwrap_or(0);
            return Err(KsmError::NotAlone { knob, present, others });
        }
        record.keep_originals(&knobs, &present);
        self.write(record)?;
        ksm.apply(wanted)
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        // The lock goes with the last descriptor in any case.
        let _ = flock(&self.0.file, FlockOperation::Unlock);
    }
}

/// A process that uses KSM; dropped, it leaves, and the last one puts the settings back.
#[derive(Debug)]
pub struct Membership {
    users: KsmUsers,
    ksm: Arc<Ksm>,
    own: User,
}

impl Membership {
    /// KSM.
    pub fn ksm(&self) -> &Ksm {
        &self.ksm
    }

    /// Changes settings. For one that can only change while nothing is shared, everything is
    /// unmerged first, on the whole host; it is refused while there are other users.
    pub fn change(&self, wanted: &Values) -> Result<(), KsmError> {
        let locked = self.users.lock()?;
        let mut record = locked.read()?;
        record.forget_dead(&self.users.proc);
        locked.change(&mut record, self.own, &self.ksm, wanted)
    }

    /// How many other processes use KSM.
    pub fn others(&self) -> Result<usize, KsmError> {
        let locked = self.users.lock()?;
        let mut record = locked.read()?;
        record.forget_dead(&self.users.proc);
        Ok(record.users.iter().filter(|user| **user != self.own).count())
    }

    /// Leaves. The last one puts back what was changed.
    fn leave(&self) -> Result<(), KsmError> {
        let locked = self.users.lock()?;
        let mut record = locked.read()?;
        record.users.retain(|user| *user != self.own);
        record.forget_dead(&self.users.proc);
        if !record.users.is_empty() {
            return locked.write(&record);
        }
        // Only then the record goes: whoever is killed in between leaves what the next one needs.
        self.ksm.apply(&record.originals)?;
        locked.write(&Record::default())
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        if let Err(error) = self.leave() {
            tracing::warn!("the settings of KSM may not be what they were before: {error}");
        }
    }
}
