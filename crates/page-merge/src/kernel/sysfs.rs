//! The files of KSM, opened once.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::change::{self, Action};
use super::error::KsmError;
use super::knobs::{Counter, Knob, RUN_UNMERGE, Values};

/// Time limit until no page is shared any more, after the kernel has unmerged all pages that it
/// knows of.
const PATIENCE: Duration = Duration::from_secs(10);
/// Interval of checking that.
const POLL: Duration = Duration::from_millis(10);

/// A file of KSM.
#[derive(Debug)]
enum Access {
    /// The file can be written.
    Writable(File),
    /// The file can only be read, with the reason.
    Readable(File, io::ErrorKind),
}

impl Access {
    fn file(&self) -> &File {
        match self {
            Self::Writable(file) | Self::Readable(file, _) => file,
        }
    }

    fn try_clone(&self) -> io::Result<Self> {
        Ok(match self {
            Self::Writable(file) => Self::Writable(file.try_clone()?),
            Self::Readable(file, kind) => Self::Readable(file.try_clone()?, *kind),
        })
    }
}

/// KSM's counters for the whole host; `None` for those that this kernel lacks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters([Option<i64>; Counter::ALL.len()]);

impl Counters {
    /// A counter.
    pub fn get(&self, counter: Counter) -> Option<i64> {
        self.0[counter as usize]
    }

    /// A counter that is never negative; 0 if this kernel lacks it.
    pub fn count(&self, counter: Counter) -> u64 {
        self.get(counter).and_then(|value| u64::try_from(value).ok()).unwrap_or(0)
    }
}

/// KSM's settings and counters.
#[derive(Debug)]
pub struct Ksm {
    directory: PathBuf,
    /// By [`Knob::ALL`].
    knobs: Vec<Option<Access>>,
    /// By [`Counter::ALL`].
    counters: Vec<Option<File>>,
    patience: Duration,
}

impl Ksm {
    /// Opens the files in `directory` ([`SYSFS`](super::SYSFS), or a copy). Files that this user
    /// may not write are opened for reading.
    pub fn open(directory: &Path) -> Result<Self, KsmError> {
        let knobs = Knob::ALL.into_iter().map(|knob| open_knob(&directory.join(knob.name())));
        let counters = Counter::ALL.into_iter().map(|counter| {
            let path = directory.join(counter.name());
            present(File::open(&path)).map_err(|source| KsmError::Read { path, source })
        });
        let ksm = Self {
            directory: directory.to_owned(),
            knobs: knobs.collect::<Result<_, _>>()?,
            counters: counters.collect::<Result<_, _>>()?,
            patience: PATIENCE,
        };
        if ksm.access(Knob::Run).is_none() || ksm.counters[Counter::PagesShared as usize].is_none()
        {
            return Err(KsmError::Missing { path: ksm.path(Knob::Run) });
        }
        Ok(ksm)
    }

    /// The same files, opened once more.
    pub fn try_clone(&self) -> io::Result<Self> {
        let knobs = self.knobs.iter().map(|knob| knob.as_ref().map(Access::try_clone).transpose());
        let counters = self.counters.iter();
        let counters = counters.map(|file| file.as_ref().map(File::try_clone).transpose());
        Ok(Self {
            directory: self.directory.clone(),
            knobs: knobs.collect::<Result<_, _>>()?,
            counters: counters.collect::<Result<_, _>>()?,
            patience: self.patience,
        })
    }

    /// Its files.
    pub fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let knobs = self.knobs.iter().flatten().map(Access::file);
        knobs.chain(self.counters.iter().flatten()).map(AsFd::as_fd)
    }

    /// Sets the time limit for the kernel to share no page any more.
    #[must_use]
    pub fn with_patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    fn path(&self, knob: Knob) -> PathBuf {
        self.directory.join(knob.name())
    }

    fn access(&self, knob: Knob) -> Option<&Access> {
        self.knobs[knob as usize].as_ref()
    }

    /// Whether this process may change settings.
    pub fn check_writable(&self) -> Result<(), KsmError> {
        match self.access(Knob::Run) {
            Some(Access::Readable(_, kind)) => {
                Err(KsmError::Permission { path: self.path(Knob::Run), source: (*kind).into() })
            }
            _ => Ok(()),
        }
    }

    /// The present values of the settings that this kernel has.
    pub fn settings(&self) -> Result<Values, KsmError> {
        let mut values = Values::new();
        for knob in Knob::ALL {
            let Some(access) = self.access(knob) else { continue };
            let path = self.path(knob);
            let text = read(access.file())
                .map_err(|source| KsmError::Read { path: path.clone(), source })?;
            let value = knob
                .parse(&text)
                .ok_or_else(|| KsmError::Strange { path, text: text.trim().to_owned() })?;
            values.set(knob, value);
        }
        Ok(values)
    }

    /// The counters.
    pub fn counters(&self) -> Result<Counters, KsmError> {
        let mut counters = Counters::default();
        for counter in Counter::ALL {
            let Some(file) = &self.counters[counter as usize] else { continue };
            let path = self.directory.join(counter.name());
            let text =
                read(file).map_err(|source| KsmError::Read { path: path.clone(), source })?;
            let value = text
                .trim()
                .parse()
                .map_err(|_| KsmError::Strange { path, text: text.trim().to_owned() })?;
            counters.0[counter as usize] = Some(value);
        }
        Ok(counters)
    }

    fn pages_shared(&self) -> Result<u64, KsmError> {
        Ok(self.counters()?.count(Counter::PagesShared))
    }

    /// Changes settings, in an order that the kernel accepts. If one of them can only be changed
    /// while no page is shared, all pages of the whole host are unmerged first.
    pub fn apply(&self, wanted: &Values) -> Result<(), KsmError> {
        change::plan(&self.settings()?, wanted)?.into_iter().try_for_each(|action| self.act(action))
    }

    fn act(&self, action: Action) -> Result<(), KsmError> {
        match action {
            Action::Write(knob, value) => self.write(knob, value),
            Action::Unmerge => self.unmerge(),
        }
    }

    /// Unmerges all pages of the host, and waits until none is shared.
    fn unmerge(&self) -> Result<(), KsmError> {
        self.write(Knob::Run, RUN_UNMERGE)?;
        let deadline = Instant::now() + self.patience;
        loop {
            let pages_shared = self.pages_shared()?;
            if pages_shared == 0 {
                return Ok(());
            }
            if Instant::now() >= deadline {
                return Err(KsmError::StillShared { pages_shared });
            }
            std::thread::sleep(POLL);
        }
    }

    fn write(&self, knob: Knob, value: u64) -> Result<(), KsmError> {
        let file = match self.access(knob) {
            None => return Err(KsmError::NoKnob { knob }),
            Some(Access::Writable(file)) => file,
            Some(Access::Readable(_, kind)) => {
                return Err(KsmError::Permission { path: self.path(knob), source: (*kind).into() });
            }
        };
        // One call with the whole text: each call is a command to the kernel.
        let text = format!("{}\n", knob.text(value));
        let deadline = Instant::now() + self.patience;
        loop {
            match file.write_at(text.as_bytes(), 0) {
                Ok(_) => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // No page is shared, but the kernel could not remove the last shared page, which is
                // still in use elsewhere (remove_all_stable_nodes in mm/ksm.c).
                Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
                    let pages_shared = self.pages_shared()?;
                    if pages_shared > 0 || Instant::now() >= deadline {
                        return Err(KsmError::Busy { knob, pages_shared });
                    }
                    std::thread::sleep(POLL);
                }
                Err(source) => return Err(KsmError::Refused { knob, value, source }),
            }
        }
    }
}

/// Opens the file at `path`, if it exists.
fn open_knob(path: &Path) -> Result<Option<Access>, KsmError> {
    let read_error = |source| KsmError::Read { path: path.to_owned(), source };
    match OpenOptions::new().read(true).write(true).open(path) {
        Ok(file) => Ok(Some(Access::Writable(file))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => {
            // Denied, or on a read-only file system.
            let file = present(File::open(path)).map_err(read_error)?;
            Ok(file.map(|file| Access::Readable(file, error.kind())))
        }
    }
}

fn present(opened: io::Result<File>) -> io::Result<Option<File>> {
    match opened {
        Ok(file) => Ok(Some(file)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// The content of a small file, read from its start: the kernel generates it anew each time.
fn read(file: &File) -> io::Result<String> {
    let mut buffer = [0; 256];
    let length = loop {
        match file.read_at(&mut buffer, 0) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => break result?,
        }
    };
    Ok(String::from_utf8_lossy(&buffer[..length]).into_owned())
}
