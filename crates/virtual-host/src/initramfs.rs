//! Writes initramfs archives (cpio, format "newc"; Linux
//! Documentation/driver-api/early-userspace/buffer-format.rst).

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Component, Path, PathBuf};

use cpio::newc::{Builder, ModeFileType};

use crate::error::HostError;

/// An archive under construction. Parent directories are added as needed.
pub struct Archive<W: Write> {
    writer: W,
    known: BTreeSet<PathBuf>,
}

impl<W: Write> Archive<W> {
    /// Starts an archive on `writer`.
    pub fn new(writer: W) -> Self {
        Self { writer, known: BTreeSet::new() }
    }

    /// Adds a directory and its parents, unless they have already been added.
    pub fn directory(&mut self, path: impl AsRef<Path>) -> Result<(), HostError> {
        let mut parent = PathBuf::new();
        for component in relative(path.as_ref())?.components() {
            parent.push(component);
            if self.known.insert(parent.clone()) {
                self.entry(&parent, ModeFileType::Directory, 0o755, &[], None)?;
            }
        }
        Ok(())
    }

    /// Adds a regular file.
    pub fn file(
        &mut self,
        path: impl AsRef<Path>,
        mode: u32,
        content: &[u8],
    ) -> Result<(), HostError> {
        self.leaf(path.as_ref(), ModeFileType::Regular, mode, content, None)
    }

    /// Adds a regular file of this machine; with `mode` `None` its permission bits are kept.
    pub fn copy(
        &mut self,
        path: impl AsRef<Path>,
        mode: Option<u32>,
        source: &Path,
    ) -> Result<(), HostError> {
        let describe = || format!("cannot read {} for the initramfs", source.display());
        let metadata = fs::metadata(source).map_err(HostError::io(describe()))?;
        let mode = mode.unwrap_or_else(|| metadata.permissions().mode() & 0o7777);
        let content = fs::read(source).map_err(HostError::io(describe()))?;
        self.file(path, mode, &content)
    }

    /// Adds a symbolic link at `path` that points to `target`.
    pub fn link(&mut self, path: impl AsRef<Path>, target: &str) -> Result<(), HostError> {
        self.leaf(path.as_ref(), ModeFileType::Symlink, 0o777, target.as_bytes(), None)
    }

    /// Adds a character device node.
    pub fn character_device(
        &mut self,
        path: impl AsRef<Path>,
        mode: u32,
        major: u32,
        minor: u32,
    ) -> Result<(), HostError> {
        self.leaf(path.as_ref(), ModeFileType::Char, mode, &[], Some((major, minor)))
    }

    /// Writes the trailer and returns the writer.
    pub fn finish(self) -> Result<W, HostError> {
        cpio::newc::trailer(self.writer).map_err(HostError::io("cannot write the initramfs"))
    }

    fn leaf(
        &mut self,
        path: &Path,
        kind: ModeFileType,
        mode: u32,
        content: &[u8],
        device: Option<(u32, u32)>,
    ) -> Result<(), HostError> {
        let path = relative(path)?;
        if let Some(parent) = path.parent() {
            self.directory(parent)?;
        }
        self.entry(&path, kind, mode, content, device)
    }

    fn entry(
        &mut self,
        path: &Path,
        kind: ModeFileType,
        mode: u32,
        content: &[u8],
        device: Option<(u32, u32)>,
    ) -> Result<(), HostError> {
        let describe = || format!("cannot write {} to the initramfs", path.display());
        let invalid = |text: &str| {
            HostError::io(describe())(io::Error::new(io::ErrorKind::InvalidInput, text))
        };
        let name = path.to_str().ok_or_else(|| invalid("the path is not UTF-8"))?;
        let size = u32::try_from(content.len())
            .map_err(|_| invalid("the file is larger than the format's 4 GiB"))?;
        let (major, minor) = device.unwrap_or((0, 0));
        let builder = Builder::new(name)
            .mode(mode)
            .set_mode_file_type(kind)
            .rdev_major(major)
            .rdev_minor(minor);
        let mut entry = builder.write(&mut self.writer, size);
        entry.write_all(content).map_err(HostError::io(describe()))?;
        entry.finish().map_err(HostError::io(describe()))?;
        Ok(())
    }
}

/// The path below the root, without `..`.
fn relative(path: &Path) -> Result<PathBuf, HostError> {
    let mut clean = PathBuf::new();
    for component in path.components() {
        match component {
            Component::Normal(part) => clean.push(part),
            Component::RootDir | Component::CurDir => {}
            Component::ParentDir | Component::Prefix(_) => {
                return Err(HostError::Configuration(format!(
                    "path {} in an initramfs must not contain `..`",
                    path.display()
                )));
            }
        }
    }
    Ok(clean)
}

/// Adds the files that every initramfs needs before its init mounts file systems: mount points and
/// the console, without which the kernel starts init with no open files.
pub fn add_skeleton<W: Write>(archive: &mut Archive<W>) -> Result<(), HostError> {
    for directory in ["dev", "proc", "sys", "tmp", "run"] {
        archive.directory(directory)?;
    }
    archive.character_device("dev/console", 0o600, 5, 1)
}

/// An unnamed in-memory file for an archive; it is freed when the last descriptor is closed.
pub fn memory_file(name: &str) -> Result<File, HostError> {
    rustix::fs::memfd_create(name, rustix::fs::MemfdFlags::CLOEXEC)
        .map(File::from)
        .map_err(|errno| HostError::io("cannot create a file in memory")(errno.into()))
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    fn entries(mut bytes: &[u8]) -> Vec<(String, u32, Vec<u8>)> {
        let mut found = Vec::new();
        loop {
            let mut reader = cpio::newc::Reader::new(bytes).unwrap();
            if reader.entry().is_trailer() {
                return found;
            }
            let (name, mode) = (reader.entry().name().to_owned(), reader.entry().mode());
            let mut content = Vec::new();
            reader.read_to_end(&mut content).unwrap();
            found.push((name, mode, content));
            bytes = reader.finish().unwrap();
        }
    }

    #[test]
    fn parents_are_added_first_and_once() {
        let mut archive = Archive::new(Vec::new());
        archive.file("/a/b/c", 0o644, b"12345").unwrap();
        archive.link("/a/d", "b/c").unwrap();
        archive.character_device("a/n", 0o600, 5, 1).unwrap();
        archive.directory("a/b").unwrap();
        let found = entries(&archive.finish().unwrap());
        let expected = [
            ("a", 0o040_755, ""),
            ("a/b", 0o040_755, ""),
            ("a/b/c", 0o100_644, "12345"),
            ("a/d", 0o120_777, "b/c"),
            ("a/n", 0o020_600, ""),
        ];
        let expected: Vec<_> = expected
            .into_iter()
            .map(|(name, mode, content)| (name.to_owned(), mode, content.as_bytes().to_vec()))
            .collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn paths_outside_of_the_root_are_refused() {
        let error = Archive::new(Vec::new()).file("/a/../../etc", 0, b"").unwrap_err().to_string();
        assert!(error.contains(".."), "{error}");
    }

    #[test]
    fn the_error_names_a_missing_source() {
        let error = Archive::new(Vec::new())
            .copy("/a", None, Path::new("/no/such"))
            .unwrap_err()
            .to_string();
        assert!(error.contains("/no/such"), "{error}");
    }
}
