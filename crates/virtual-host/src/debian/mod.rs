//! Debian on a disk: root file systems made of Debian's packages, and a kernel with its drivers
//! built in, made of Debian's sources. Both are made once and kept in the cache.

mod kernel;
mod root;

pub use kernel::{GuestKernel, guest_kernel};
pub use root::{Root, root};

use std::env;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use tempfile::TempDir;

use crate::cache::Cache;
use crate::error::HostError;

/// What a Debian guest boots from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuestFiles {
    /// The kernel as ELF, with its drivers built in.
    pub kernel: PathBuf,
    /// The image of its root file system, [`Root::GUEST`].
    pub root: PathBuf,
}

/// Kernel and root of a Debian guest, if the cache has both.
pub fn guest_files(cache: &Cache) -> Option<GuestFiles> {
    Some(GuestFiles {
        kernel: kernel::made(cache)?.vmlinux,
        root: root::made(&Root::GUEST, cache)?,
    })
}

/// The image of the root file system [`Root::WORK`], if the cache has it.
pub fn work_root(cache: &Cache) -> Option<PathBuf> {
    root::made(&Root::WORK, cache)
}

/// Lines of a failed command's output in its error.
const OUTPUT_LINES: usize = 20;

/// A command with the program `name` in `PATH`, or in `sbin`, where users' `PATH` may not lead;
/// `package` has it.
fn tool(name: &str, package: &'static str) -> Result<Command, HostError> {
    let path = env::var_os("PATH").unwrap_or_default();
    let directories = env::split_paths(&path).chain(["/usr/sbin".into(), "/sbin".into()]);
    let found = directories.map(|directory| directory.join(name)).find(|path| path.is_file());
    let program =
        found.ok_or_else(|| HostError::DebianToolMissing { program: name.to_owned(), package })?;
    Ok(Command::new(program))
}

/// Runs a command to its end; `what` describes it in an error, with the end of its output.
fn run(command: &mut Command, what: &str) -> Result<Vec<u8>, HostError> {
    let output = command.stdin(Stdio::null()).output().map_err(HostError::io(what))?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<_> = text.lines().collect();
    let last = lines[lines.len().saturating_sub(OUTPUT_LINES)..].join("\n  ");
    Err(HostError::DebianBuild { what: what.to_owned(), status: output.status, output: last })
}

/// A directory for building, on a disk: `TMPDIR`, else `/var/tmp`. Other users may read it, since
/// apt fetches as one of its own.
fn scratch() -> Result<TempDir, HostError> {
    use std::fs::{Permissions, set_permissions};
    use std::os::unix::fs::PermissionsExt as _;
    let base = env::var_os("TMPDIR").map_or_else(|| PathBuf::from("/var/tmp"), PathBuf::from);
    let describe = || format!("cannot make a directory in {}", base.display());
    let directory = tempfile::Builder::new().prefix("ebb-debian-").tempdir_in(&base);
    let directory = directory.map_err(HostError::io(describe()))?;
    set_permissions(directory.path(), Permissions::from_mode(0o755))
        .map_err(HostError::io(describe()))?;
    Ok(directory)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_tool_is_named_with_its_package() {
        let error = tool("no-such-tool", "some-package").unwrap_err().to_string();
        assert!(error.contains("no-such-tool") && error.contains("some-package"), "{error}");
    }

    #[test]
    fn a_failed_command_shows_the_end_of_its_output() {
        let script = "seq 100; echo bad >&2; exit 3";
        let error = run(Command::new("sh").args(["-c", script]), "a try").unwrap_err().to_string();
        assert!(error.contains("a try") && error.contains("100\n") && error.ends_with("bad"));
        assert!(!error.contains("\n  79\n"), "{error}");
    }
}
