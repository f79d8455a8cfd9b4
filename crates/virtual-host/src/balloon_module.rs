//! Ebb's balloon driver for guests and its trackers: two kernel modules for one kernel release,
//! built by `make module`.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use crate::error::HostError;

/// Environment variable for a module file other than that of the running program's build.
pub const BALLOON_MODULE_VARIABLE: &str = "EBB_BALLOON_MODULE";
/// Subdirectory of the build directory that contains a directory per kernel release.
const BUILD_DIRECTORY: &str = "ebb_balloon";
/// File name of the driver.
const FILE_NAME: &str = "ebb_balloon.ko";
/// File name of the trackers, which are built beside the driver.
const TRACKERS_FILE_NAME: &str = "ebb_trackers.ko";

/// Path of the driver in a guest.
pub fn path_in_guest(release: &str) -> String {
    format!("/lib/modules/{release}/extra/{FILE_NAME}")
}

/// Path of the trackers in a guest.
pub fn trackers_path_in_guest(release: &str) -> String {
    format!("/lib/modules/{release}/extra/{TRACKERS_FILE_NAME}")
}

/// The trackers beside a driver, if they are there.
pub fn trackers_beside(driver: &Path) -> Option<PathBuf> {
    Some(driver.with_file_name(TRACKERS_FILE_NAME)).filter(|path| path.is_file())
}

/// The driver for the kernel `release`: `chosen`, else `EBB_BALLOON_MODULE`, else
/// `ebb_balloon/RELEASE/ebb_balloon.ko` in one of the running program's parent directories, such as
/// cargo's `target`. `None` if no module is given or built.
pub fn find(chosen: Option<&Path>, release: &str) -> Option<PathBuf> {
    let named = chosen
        .map(Path::to_owned)
        .or_else(|| env::var_os(BALLOON_MODULE_VARIABLE).map(PathBuf::from));
    named.or_else(|| beside(&env::current_exe().ok()?, release))
}

fn beside(program: &Path, release: &str) -> Option<PathBuf> {
    program
        .ancestors()
        .skip(1)
        .map(|directory| directory.join(BUILD_DIRECTORY).join(release).join(FILE_NAME))
        .find(|path| path.is_file())
}

/// Reads a module and checks that it is for the kernel `release`.
pub fn read(path: &Path, release: &str) -> Result<Vec<u8>, HostError> {
    let content =
        fs::read(path).map_err(HostError::io(format!("cannot read {}", path.display())))?;
    let unusable = |reason| HostError::BalloonModuleUnusable {
        path: path.to_owned(),
        reason,
        release: release.to_owned(),
    };
    match release_of(&content) {
        None => Err(unusable("it is not a kernel module".to_owned())),
        Some(found) if found == release.as_bytes() => Ok(content),
        Some(found) => {
            Err(unusable(format!("it is for kernel {}", String::from_utf8_lossy(found))))
        }
    }
}

/// The kernel release in a module's section `.modinfo` (`vermagic=RELEASE WORDS`, Linux
/// include/linux/vermagic.h).
fn release_of(module: &[u8]) -> Option<&[u8]> {
    const MARK: &[u8] = b"\0vermagic=";
    let start = module.windows(MARK.len()).position(|window| window == MARK)? + MARK.len();
    let rest = &module[start..];
    Some(&rest[..rest.iter().position(|byte| *byte == b' ' || *byte == 0)?])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_build_of_a_program_is_found() {
        let directory = tempfile::tempdir().unwrap();
        let built = directory.path().join("ebb_balloon/6.1.0-56-cloud-amd64");
        fs::create_dir_all(&built).unwrap();
        let program = directory.path().join("x86_64-unknown-linux-gnu/debug/deps/guests-1");
        assert_eq!(beside(&program, "6.1.0-56-cloud-amd64"), None);
        let module = built.join(FILE_NAME);
        fs::write(&module, b"").unwrap();
        assert_eq!(beside(&program, "6.1.0-56-cloud-amd64"), Some(module.clone()));
        assert_eq!(trackers_beside(&module), None);
        fs::write(built.join(TRACKERS_FILE_NAME), b"").unwrap();
        assert_eq!(trackers_beside(&module), Some(built.join(TRACKERS_FILE_NAME)));
        assert_eq!(beside(&program, "6.1.0-9-cloud-amd64"), None);
    }

    #[test]
    fn a_chosen_module_takes_precedence() {
        let named = Path::new("/no/such.ko");
        assert_eq!(find(Some(named), "6.1"), Some(named.to_owned()));
    }

    #[test]
    fn a_module_of_another_kernel_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("x.ko");
        let read = || read(&path, "6.1.0-56-cloud-amd64").map_err(|error| error.to_string());
        assert!(read().unwrap_err().contains("x.ko"), "the file is missing");
        fs::write(&path, b"\x7fELF\0depends=\0vermagic=6.1.0-56-cloud-amd64 SMP preempt \0")
            .unwrap();
        assert!(read().is_ok());
        for (content, words) in [
            (b"\0vermagic=6.1.0-5-cloud-amd64 SMP".as_slice(), "for kernel 6.1.0-5-cloud-amd64"),
            (b"text", "not a kernel module"),
            (b"\0vermagic=6.1.0-56-cloud-amd64", "not a kernel module"),
        ] {
            fs::write(&path, content).unwrap();
            let error = read().unwrap_err();
            assert!(error.contains(words) && error.contains("make module"), "{error}");
        }
    }
}
