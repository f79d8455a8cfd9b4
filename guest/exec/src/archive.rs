//! Packs files and directories into an archive (tar) and unpacks them, on either side.
//!
//! An archive comes from a side that is not trusted: all of it goes below one name in one directory,
//! symbolic links are never followed, and only files, directories and links are made, without
//! set-user-id bits. A file gets its name when it is complete.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context as _, bail};
use rustix::fs::{AtFlags, Gid, Mode, OFlags, ResolveFlags, Timespec, Timestamps, Uid};
use rustix::io::Errno;
use tar::{Builder, EntryType, Header};

use crate::account::Account;

/// Permissions that are carried over.
const MODE: u32 = 0o777;
/// What its owner must be able to do with a new directory, to unpack into it.
const OWNERS_DIRECTORY: u32 = 0o700;

/// What was packed or unpacked.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Summary {
    /// Files, directories and links.
    pub entries: u64,
    /// Bytes in the files.
    pub bytes: u64,
    /// Devices, sockets and others that were left out.
    pub skipped: u64,
}

/// Packs the file or directory at `source`, below its name.
///
/// # Errors
/// It cannot be read or `writer` fails; with the path.
pub fn pack(source: &Path, writer: impl Write) -> anyhow::Result<Summary> {
    let mut summary = Summary::default();
    let mut archive = Builder::new(writer);
    let name = name_of(source).map_or_else(|| PathBuf::from("root"), PathBuf::from);
    // A link that the person named is followed, others are packed as links.
    let top =
        fs::canonicalize(source).with_context(|| format!("cannot read {}", source.display()))?;
    let mut left = vec![(top, name)];
    while let Some((path, name)) = left.pop() {
        let describe = || format!("cannot read {}", path.display());
        let metadata = fs::symlink_metadata(&path).with_context(describe)?;
        let mut header = Header::new_gnu();
        header.set_mode(metadata.mode() & MODE);
        header.set_mtime(u64::try_from(metadata.mtime()).unwrap_or(0));
        header.set_size(0);
        if metadata.is_dir() {
            header.set_entry_type(EntryType::Directory);
            archive.append_data(&mut header, &name, io::empty()).with_context(describe)?;
            let mut inside = fs::read_dir(&path)
                .and_then(|entries| entries.map(|entry| Ok(entry?.file_name())).collect())
                .with_context(describe)
                .map(|mut names: Vec<OsString>| {
                    // The last is taken first.
                    names.sort_unstable_by(|left, right| right.cmp(left));
                    names
                })?;
            left.extend(inside.drain(..).map(|entry| (path.join(&entry), name.join(&entry))));
        } else if metadata.is_file() {
            let file = File::open(&path).with_context(describe)?;
            // It may become shorter or longer meanwhile; its header is already sent.
            let content = file.chain(io::repeat(0)).take(metadata.len());
            header.set_entry_type(EntryType::Regular);
            header.set_size(metadata.len());
            archive.append_data(&mut header, &name, content).with_context(describe)?;
            summary.bytes += metadata.len();
        } else if metadata.is_symlink() {
            let target = fs::read_link(&path).with_context(describe)?;
            header.set_entry_type(EntryType::Symlink);
            archive.append_link(&mut header, &name, target).with_context(describe)?;
        } else {
            summary.skipped += 1;
            continue;
        }
        summary.entries += 1;
    }
    archive
        .into_inner()
        .and_then(|mut writer| writer.flush())
        .context("cannot send the archive")?;
    Ok(summary)
}

/// The last part of a path's text, if that is a name.
pub fn name_of(path: &Path) -> Option<OsString> {
    path.file_name().map(OsStr::to_owned)
}

/// Where an archive is unpacked.
#[derive(Debug)]
pub struct Place {
    directory: OwnedFd,
    name: OsString,
    owner: Option<(Uid, Gid)>,
}

impl Place {
    /// Below `destination` with the name `name` if that is a directory, else `destination` itself,
    /// whose directory must exist.
    ///
    /// # Errors
    /// There is no such directory.
    pub fn find(destination: &Path, name: Option<&OsStr>) -> anyhow::Result<Self> {
        let (directory, name) = if destination.is_dir() {
            (destination, name)
        } else if destination.as_os_str().as_bytes().ends_with(b"/") {
            bail!("there is no directory {}", destination.display());
        } else {
            let parent = destination.parent().filter(|parent| !parent.as_os_str().is_empty());
            (parent.unwrap_or(Path::new(".")), destination.file_name())
        };
        let Some(name) = name.filter(|name| !name.is_empty() && !name.as_bytes().contains(&b'/'))
        else {
            bail!("what is copied has no name; give the new one after {}", destination.display());
        };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let open = rustix::fs::open(directory, flags, Mode::empty());
        let describe = || format!("there is no directory {}", directory.display());
        Ok(Self { directory: open.with_context(describe)?, name: name.to_owned(), owner: None })
    }

    /// Gives everything to this user.
    #[must_use]
    pub fn owned_by(mut self, account: &Account) -> Self {
        self.owner = Some((Uid::from_raw(account.uid), Gid::from_raw(account.gid)));
        self
    }

    /// Unpacks an archive; `progress` gets the number of bytes written so far.
    ///
    /// # Errors
    /// The archive is not acceptable, or a file cannot be written; complete files stay.
    pub fn unpack(
        &self,
        reader: impl Read,
        progress: &mut dyn FnMut(u64),
    ) -> anyhow::Result<Summary> {
        let mut summary = Summary::default();
        let mut top = None;
        let mut archive = tar::Archive::new(reader);
        for entry in archive.entries().context("the archive cannot be read")? {
            let mut entry = entry.context("the archive cannot be read")?;
            let name = entry.path().context("the archive cannot be read")?.into_owned();
            let path = self.path_of(&name, &mut top)?;
            let describe = || format!("cannot write {}", path.display());
            let (kind, mode) = (entry.header().entry_type(), entry.header().mode()? & MODE);
            match kind {
                EntryType::Directory => self.make_directory(&path, mode).with_context(describe)?,
                EntryType::Regular => {
                    let modified = entry.header().mtime()?;
                    let bytes = &mut summary.bytes;
                    self.write_file(&path, mode, modified, &mut entry, &mut |more| {
                        *bytes += more;
                        progress(*bytes);
                    })
                    .with_context(describe)?;
                }
                EntryType::Symlink => {
                    let target = entry.link_name()?.context("a link leads nowhere")?;
                    self.make_link(&path, &target).with_context(describe)?;
                }
                _ => {
                    summary.skipped += 1;
                    continue;
                }
            }
            summary.entries += 1;
        }
        Ok(summary)
    }

    /// The entry's path below the directory, with the place's name as its first part.
    fn path_of(&self, name: &Path, top: &mut Option<OsString>) -> anyhow::Result<PathBuf> {
        let refuse = || format!("the archive contains the name {}", name.display());
        let mut parts = name.components();
        let Some(Component::Normal(first)) = parts.next() else { bail!(refuse()) };
        if top.get_or_insert_with(|| first.to_owned()) != first {
            bail!(refuse());
        }
        let mut path = PathBuf::from(&self.name);
        for part in parts {
            let Component::Normal(part) = part else { bail!(refuse()) };
            path.push(part);
        }
        Ok(path)
    }

    /// Opens the directory of `path`, which is not empty; returns it with the last name.
    fn parent<'a>(&self, path: &'a Path) -> io::Result<(OwnedFd, &'a OsStr)> {
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        let name = path.file_name().ok_or(io::ErrorKind::InvalidFilename)?;
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
        let parent = parent.unwrap_or(Path::new("."));
        let parent = rustix::fs::openat2(&self.directory, parent, flags, Mode::empty(), resolve)?;
        Ok((parent, name))
    }

    fn make_directory(&self, path: &Path, mode: u32) -> io::Result<()> {
        let (parent, name) = self.parent(path)?;
        let mode = Mode::from_bits_truncate(mode | OWNERS_DIRECTORY);
        match rustix::fs::mkdirat(&parent, name, mode) {
            Ok(()) => self.give(&parent, name),
            Err(Errno::EXIST) => {
                let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                rustix::fs::openat(&parent, name, flags, Mode::empty())?;
                Ok(())
            }
            Err(error) => Err(error.into()),
        }
    }

    fn write_file(
        &self,
        path: &Path,
        mode: u32,
        modified: u64,
        content: &mut tar::Entry<'_, impl Read>,
        progress: &mut dyn FnMut(u64),
    ) -> anyhow::Result<()> {
        let (parent, name) = self.parent(path)?;
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        self.replace(&parent, name, |temporary| {
            let file = rustix::fs::openat(&parent, temporary, flags, Mode::RUSR | Mode::WUSR)?;
            let mut file = File::from(file);
            let mut buffer = vec![0; 64 << 10];
            let mut left = content.size();
            while left > 0 {
                let length = content.read(&mut buffer)?;
                // An archive that is cut off.
                if length == 0 {
                    bail!(io::Error::from(io::ErrorKind::UnexpectedEof));
                }
                file.write_all(&buffer[..length])?;
                left = left.saturating_sub(length as u64);
                progress(length as u64);
            }
            rustix::fs::fchmod(&file, Mode::from_bits_truncate(mode))?;
            let modified = i64::try_from(modified).unwrap_or(0);
            let time = Timespec { tv_sec: modified, tv_nsec: 0 };
            let times = Timestamps { last_access: time, last_modification: time };
            Ok(rustix::fs::futimens(&file, &times)?)
        })
    }

    fn make_link(&self, path: &Path, target: &Path) -> anyhow::Result<()> {
        let (parent, name) = self.parent(path)?;
        let link = |temporary: &str| Ok(rustix::fs::symlinkat(target, &parent, temporary)?);
        self.replace(&parent, name, link)
    }

    /// Makes something under a temporary name, which then replaces `name`.
    fn replace(
        &self,
        parent: &OwnedFd,
        name: &OsStr,
        make: impl FnOnce(&str) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let temporary = format!(".ebb-cp.{}", std::process::id());
        let remove = || rustix::fs::unlinkat(parent, &temporary, AtFlags::empty());
        // A process with the same number may have left it.
        let _ = remove();
        let made = make(&temporary).and_then(|()| {
            self.give(parent, OsStr::new(&temporary))?;
            Ok(rustix::fs::renameat(parent, &temporary, parent, name)?)
        });
        if made.is_err() {
            let _ = remove();
        }
        made
    }

    fn give(&self, parent: impl AsFd, name: &OsStr) -> io::Result<()> {
        let Some((user, group)) = self.owner else { return Ok(()) };
        let flags = AtFlags::SYMLINK_NOFOLLOW;
        Ok(rustix::fs::chownat(parent, name, Some(user), Some(group), flags)?)
    }
}

#[cfg(test)]
mod tests;
