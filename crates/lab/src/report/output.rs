//! The directory of the results: checked before a long run, written after it.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use crate::LabError;
use crate::report::page;
use crate::report::results::Results;

/// Name of the document in the directory.
pub const RESULTS_FILE: &str = "results.json";
/// Name of the page in the directory.
pub const REPORT_FILE: &str = "report.html";
/// Maximum size of the output of a run at full scale, reserved before the run as a check.
const RESERVE_BYTES: usize = 8 << 20;

/// A directory that results can be written to.
#[derive(Debug)]
pub struct OutputDirectory {
    path: PathBuf,
}

impl OutputDirectory {
    /// Checks that results can be written to the directory, and leaves everything unchanged: a
    /// missing directory is created only with the results.
    ///
    /// # Errors
    /// [`LabError::Output`] when it cannot be created, is not writable, or its file system is full.
    pub fn check(path: &Path) -> Result<Self, LabError> {
        let output = Self { path: path.to_owned() };
        let _made = output.make()?;
        let mut probe =
            Temporary::create(&path.join(RESULTS_FILE)).map_err(|cause| output.failed(cause))?;
        probe.write(&vec![0; RESERVE_BYTES]).map_err(|cause| output.failed(cause))?;
        Ok(output)
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes `results.json` and `report.html`: both are complete under their names, or neither is
    /// touched.
    ///
    /// # Errors
    /// [`LabError::Output`] when the file system refuses.
    pub fn write(&self, results: &Results) -> Result<(), LabError> {
        let failed = |cause| self.failed(cause);
        let page = page::render(results);
        let document = document(results).map_err(failed)?;
        let mut made = self.make()?;
        let mut files = Vec::new();
        for (name, content) in [(RESULTS_FILE, document.as_slice()), (REPORT_FILE, page.as_bytes())]
        {
            let mut file = Temporary::create(&self.path.join(name)).map_err(failed)?;
            file.write(content).map_err(failed)?;
            files.push(file);
        }
        for file in files {
            file.keep().map_err(failed)?;
        }
        made.0.clear();
        Ok(())
    }

    /// Creates the directory and its missing parents.
    fn make(&self) -> Result<MadeDirectories, LabError> {
        let missing: Vec<&Path> = self
            .path
            .ancestors()
            .take_while(|ancestor| !ancestor.as_os_str().is_empty() && !ancestor.exists())
            .collect();
        let mut made = MadeDirectories(Vec::new());
        for directory in missing.into_iter().rev() {
            fs::create_dir(directory).map_err(|cause| self.failed(cause))?;
            made.0.push(directory.to_owned());
        }
        Ok(made)
    }

    fn failed(&self, cause: io::Error) -> LabError {
        LabError::Output { directory: self.path.clone(), cause }
    }
}

/// The text of `results.json`.
pub(crate) fn document(results: &Results) -> io::Result<Vec<u8>> {
    let mut document = serde_json::to_vec_pretty(results)?;
    document.push(b'\n');
    Ok(document)
}

/// Created directories, outermost first; removed when dropped.
struct MadeDirectories(Vec<PathBuf>);

impl Drop for MadeDirectories {
    fn drop(&mut self) {
        for directory in self.0.iter().rev() {
            // A directory with other files stays.
            let _ = fs::remove_dir(directory);
        }
    }
}

/// A file under another name until it is complete; removed if it is dropped before that.
pub(crate) struct Temporary {
    file: File,
    path: PathBuf,
    target: PathBuf,
    kept: bool,
}

impl Temporary {
    pub(crate) fn create(target: &Path) -> io::Result<Self> {
        let name = target.file_name().unwrap_or_default().to_string_lossy();
        let path = target.with_file_name(format!(".{name}.{}", std::process::id()));
        let file = File::create(&path)?;
        Ok(Self { file, path, target: target.to_owned(), kept: false })
    }

    /// Writes and syncs all of it: the file system may detect only then that it is full.
    pub(crate) fn write(&mut self, content: &[u8]) -> io::Result<()> {
        self.file.write_all(content)?;
        self.file.sync_all()
    }

    pub(crate) fn keep(mut self) -> io::Result<()> {
        fs::rename(&self.path, &self.target)?;
        self.kept = true;
        Ok(())
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if !self.kept {
            let _ = fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::results::tests::example;

    fn names(directory: &Path) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(directory)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn complete_results_replace_older_ones() {
        let top = tempfile::tempdir().unwrap();
        let directory = top.path().join("a/b");
        for elapsed_s in [1.0, 2.0] {
            let mut results = example();
            results.elapsed_s = elapsed_s;
            OutputDirectory::check(&directory).unwrap().write(&results).unwrap();
            assert_eq!(names(&directory), [REPORT_FILE, RESULTS_FILE]);
            let text = fs::read_to_string(directory.join(RESULTS_FILE)).unwrap();
            assert_eq!(serde_json::from_str::<Results>(&text).unwrap(), results);
        }
    }

    #[test]
    fn a_check_leaves_no_directory() {
        let top = tempfile::tempdir().unwrap();
        OutputDirectory::check(&top.path().join("a/b/c")).unwrap();
        assert!(names(top.path()).is_empty());
    }

    #[test]
    fn an_existing_directory_is_unchanged() {
        let top = tempfile::tempdir().unwrap();
        fs::write(top.path().join(RESULTS_FILE), "older").unwrap();
        OutputDirectory::check(top.path()).unwrap();
        assert_eq!(fs::read_to_string(top.path().join(RESULTS_FILE)).unwrap(), "older");
        assert_eq!(names(top.path()), [RESULTS_FILE]);
    }

    #[test]
    fn a_file_in_the_way_is_named() {
        let top = tempfile::tempdir().unwrap();
        let file = top.path().join("file");
        fs::write(&file, "").unwrap();
        let message = OutputDirectory::check(&file).unwrap_err().to_string();
        assert!(message.contains(file.to_str().unwrap()) && message.contains("--out"), "{message}");
        assert!(OutputDirectory::check(&file.join("below")).is_err());
    }

    #[test]
    fn a_full_file_system_is_detected_before_the_run() {
        // /dev/full answers each write with ENOSPC, as a full disk does.
        let mut file = Temporary {
            file: File::options().write(true).open("/dev/full").unwrap(),
            path: PathBuf::from("/nonexistent/temporary"),
            target: PathBuf::from("/nonexistent/target"),
            kept: false,
        };
        assert_eq!(file.write(b"results").unwrap_err().kind(), io::ErrorKind::StorageFull);
    }
}
