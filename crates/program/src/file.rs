//! Atomic file writes: a file gets its name once it is complete.

use std::io::{BufWriter, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use anyhow::Context;

/// Writes a file through a temporary one in the same directory, so that a failure leaves no partial
/// file; returns its length in bytes. The file is readable by all users.
///
/// # Errors
/// Errors of `content`, and errors of the file system with the path.
pub fn write_whole(
    path: &Path,
    content: impl FnOnce(&mut dyn Write) -> anyhow::Result<()>,
) -> anyhow::Result<u64> {
    let describe = || format!("cannot write {}", path.display());
    let directory =
        path.parent().filter(|path| !path.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut file = tempfile::Builder::new()
        .permissions(std::fs::Permissions::from_mode(0o644))
        .tempfile_in(directory)
        .with_context(describe)?;
    let mut writer = BufWriter::new(file.as_file_mut());
    content(&mut writer)?;
    writer.flush().with_context(describe)?;
    drop(writer);
    let length = file.as_file().metadata().with_context(describe)?.len();
    file.persist(path).map_err(|error| error.error).with_context(describe)?;
    Ok(length)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_keeps_the_old_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        assert_eq!(write_whole(&path, |file| Ok(file.write_all(b"old")?)).unwrap(), 3);
        let failed = write_whole(&path, |file| {
            file.write_all(b"half")?;
            anyhow::bail!("the rest is missing")
        });
        assert_eq!(failed.unwrap_err().to_string(), "the rest is missing");
        assert_eq!(std::fs::read(&path).unwrap(), b"old");
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
    }
}
