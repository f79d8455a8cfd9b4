//! Finds the libraries of dynamic executables for an image.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::config::HostFile;
use crate::error::HostError;

/// Firmware that QEMU's q35 and microvm machines load for a direct kernel boot.
const QEMU_FIRMWARE: [&str; 6] = [
    "bios-256k.bin",
    "linuxboot_dma.bin",
    "pvh.bin",
    "kvmvapic.bin",
    "bios-microvm.bin",
    "efi-virtio.rom",
];
/// Firmware directories of Debian's packages seabios and qemu-system-data.
const QEMU_FIRMWARE_DIRECTORIES: [&str; 2] = ["/usr/share/seabios", "/usr/share/qemu"];

/// The files that an executable needs in an image, at their own paths: itself and the shared
/// libraries listed by `ldd`.
pub fn program_with_libraries(path: &Path) -> Result<Vec<HostFile>, HostError> {
    let fail = |reason: String| HostError::Libraries { path: path.to_owned(), reason };
    if !path.is_absolute() || !path.exists() {
        return Err(fail("no such file (an absolute path is needed)".to_owned()));
    }
    let output = Command::new("ldd")
        .arg(path)
        .env("LC_ALL", "C")
        .stdin(Stdio::null())
        .output()
        .map_err(|error| fail(format!("ldd (package libc-bin): {error}")))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let message = String::from_utf8_lossy(&output.stderr);
    let libraries =
        if message.contains("not a dynamic executable") || text.contains("statically linked") {
            BTreeSet::new()
        } else if output.status.success() {
            parse_ldd(&text).map_err(fail)?
        } else {
            return Err(fail(message.trim().to_owned()));
        };
    let whole = |path: &Path| HostFile {
        source: path.to_owned(),
        target: path.to_owned(),
        mode: Some(0o755),
    };
    Ok(std::iter::once(whole(path)).chain(libraries.iter().map(|library| whole(library))).collect())
}

/// QEMU's system emulator with its libraries and the firmware for a direct kernel boot.
pub fn qemu_with_firmware(path: &Path) -> Result<Vec<HostFile>, HostError> {
    let mut files = program_with_libraries(path)?;
    for name in QEMU_FIRMWARE {
        let found = QEMU_FIRMWARE_DIRECTORIES
            .iter()
            .map(|dir| Path::new(dir).join(name))
            .find(|p| p.exists());
        if let Some(source) = found {
            files.push(HostFile {
                source,
                target: Path::new("/usr/share/qemu").join(name),
                mode: Some(0o644),
            });
        }
    }
    Ok(files)
}

/// Paths in the output of `ldd`; a missing library is an error.
fn parse_ldd(text: &str) -> Result<BTreeSet<PathBuf>, String> {
    let mut paths = BTreeSet::new();
    for line in text.lines().map(str::trim) {
        let target = line.split_once("=>").map_or(line, |(_, target)| target).trim();
        if target.starts_with("not found") {
            return Err(line.to_owned());
        }
        // The vDSO has no path.
        if let Some(path) = target.split_whitespace().next().filter(|path| path.starts_with('/')) {
            paths.insert(PathBuf::from(path));
        }
    }
    Ok(paths)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_forms_of_lines_are_parsed() {
        let text = "\tlinux-vdso.so.1 (0x00007ffd)\n\
             \tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f)\n\
                    \t/lib64/ld-linux-x86-64.so.2 (0x00007f)\n";
        let paths: Vec<_> = parse_ldd(text).unwrap().into_iter().collect();
        assert_eq!(
            paths,
            [
                Path::new("/lib/x86_64-linux-gnu/libc.so.6"),
                Path::new("/lib64/ld-linux-x86-64.so.2")
            ]
        );
    }

    #[test]
    fn the_error_names_a_missing_library() {
        assert!(parse_ldd("\tlibnuma.so.1 => not found\n").unwrap_err().contains("libnuma.so.1"));
    }

    #[test]
    fn a_real_program_includes_its_loader() {
        let files = program_with_libraries(Path::new("/bin/sh")).unwrap();
        assert_eq!(files[0].target, Path::new("/bin/sh"));
        assert!(
            files.iter().any(|file| file.target.to_string_lossy().contains("ld-linux")),
            "{files:?}"
        );
    }

    #[test]
    fn the_error_names_a_missing_program() {
        let error = program_with_libraries(Path::new("/no/such")).unwrap_err().to_string();
        assert!(error.contains("/no/such"), "{error}");
    }
}
