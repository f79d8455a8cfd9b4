//! A guest kernel without modules, for guests that boot from a disk without an initial RAM file
//! system: Debian's sources with the configuration `guest/kernel/config`.

use std::fs;
use std::path::{Path, PathBuf};

use super::{run, scratch, tool};
use crate::cache::{Cache, Key};
use crate::error::HostError;

/// The options that differ from `make allnoconfig`.
const CONFIG: &str = include_str!("../../../../guest/kernel/config");
/// Where Debian's packages `linux-source-VERSION` put their archive.
const SOURCES: &str = "/usr/src";
/// Change this when the commands below change.
const VERSION: u32 = 1;

/// A kernel with its drivers built in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuestKernel {
    /// The compressed image.
    pub bzimage: PathBuf,
    /// The same kernel as ELF, without debug information.
    pub vmlinux: PathBuf,
}

/// The kernel of the newest installed sources, compiled if the cache does not have it: minutes.
pub fn guest_kernel(cache: &Cache) -> Result<GuestKernel, HostError> {
    let source = newest_source(Path::new(SOURCES))?;
    let directory = cache.directory(key(&source)?, |directory| compile(&source, directory))?;
    Ok(GuestKernel::in_directory(&directory))
}

/// The same if the cache has it.
pub(super) fn made(cache: &Cache) -> Option<GuestKernel> {
    let source = newest_source(Path::new(SOURCES)).ok()?;
    Some(GuestKernel::in_directory(&cache.existing(key(&source).ok()?)?))
}

fn key(source: &Path) -> Result<Key, HostError> {
    let key = Key::new("guest kernel", VERSION).with_file(source);
    let key = key.map_err(HostError::io(format!("cannot read {}", source.display())))?;
    Ok(key.with_bytes(CONFIG.as_bytes()))
}

impl GuestKernel {
    fn in_directory(directory: &Path) -> Self {
        Self { bzimage: directory.join("bzImage"), vmlinux: directory.join("vmlinux") }
    }
}

fn newest_source(directory: &Path) -> Result<PathBuf, HostError> {
    let names = fs::read_dir(directory).into_iter().flatten().flatten();
    let names = names.filter_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        let version = name.strip_prefix("linux-source-")?.strip_suffix(".tar.xz")?;
        let numbers: Result<Vec<u32>, _> = version.split('.').map(str::parse).collect();
        Some((numbers.ok()?, entry.path()))
    });
    names.max().map(|(_, path)| path).ok_or_else(|| HostError::DebianToolMissing {
        program: format!("{}/linux-source-*.tar.xz", directory.display()),
        package: "linux-source",
    })
}

fn compile(source: &Path, target: &Path) -> Result<(), HostError> {
    for (program, package) in
        [("make", "make"), ("gcc", "gcc"), ("flex", "flex"), ("bison", "bison"), ("bc", "bc")]
    {
        tool(program, package)?;
    }
    tracing::info!(source = %source.display(), "compiling a guest kernel, which takes minutes");
    let scratch = scratch()?;
    let tree = scratch.path();
    let mut tar = tool("tar", "tar")?;
    let tar = tar.args(["--strip-components=1", "-C"]).arg(tree).arg("-xJf").arg(source);
    run(tar, "unpacking the kernel's sources")?;
    let config = tree.join("ebb.config");
    fs::write(&config, CONFIG).map_err(HostError::io("cannot write the kernel's configuration"))?;
    let jobs = std::thread::available_parallelism().map_or(1, usize::from);
    let mut make = tool("make", "make")?;
    make.arg("-C").arg(tree).arg("allnoconfig").env("KCONFIG_ALLCONFIG", &config);
    run(&mut make, "configuring the guest kernel")?;
    check(&fs::read_to_string(tree.join(".config")).unwrap_or_default())?;
    let mut make = tool("make", "make")?;
    make.arg("-C").arg(tree).arg(format!("-j{jobs}")).args(["bzImage", "vmlinux"]);
    // Equal sources make equal kernels.
    make.env("KBUILD_BUILD_TIMESTAMP", "2026-01-01").env("KBUILD_BUILD_USER", "ebb");
    make.env("KBUILD_BUILD_HOST", "ebb");
    run(&mut make, "compiling the guest kernel (it needs libelf-dev, too)")?;
    let copied = fs::copy(tree.join("arch/x86/boot/bzImage"), target.join("bzImage"));
    copied.map_err(HostError::io("cannot keep the guest kernel"))?;
    let mut strip = tool("strip", "binutils")?;
    let strip = strip.arg("--strip-all").arg("-o").arg(target.join("vmlinux"));
    run(strip.arg(tree.join("vmlinux")), "stripping the guest kernel")?;
    Ok(())
}

/// Checks that the kernel's configuration has every option that was asked for: one that depends on
/// another is left out without a word.
fn check(config: &str) -> Result<(), HostError> {
    let options = CONFIG.lines().filter(|line| line.starts_with("CONFIG_"));
    let missing: Vec<_> =
        options.filter(|option| config.lines().all(|line| line != *option)).collect();
    if missing.is_empty() {
        return Ok(());
    }
    Err(HostError::Configuration(format!(
        "the sources of the guest kernel do not take {}",
        missing.join(", ")
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_source_is_chosen() {
        let directory = tempfile::tempdir().unwrap();
        let error = newest_source(directory.path()).unwrap_err().to_string();
        assert!(error.contains("linux-source"), "{error}");
        for name in ["linux-source-6.1", "linux-source-6.12", "linux-source-x"] {
            fs::write(directory.path().join(format!("{name}.tar.xz")), "").unwrap();
        }
        let newest = newest_source(directory.path()).unwrap();
        assert!(newest.ends_with("linux-source-6.12.tar.xz"), "{newest:?}");
    }

    #[test]
    fn an_option_that_was_left_out_is_named() {
        assert!(check(CONFIG).is_ok());
        let without = CONFIG.replace("CONFIG_VIRTIO_BLK=y\n", "");
        let error = check(&without).unwrap_err().to_string();
        assert!(error.ends_with("CONFIG_VIRTIO_BLK=y"), "{error}");
    }
}
