//! The initramfs of test guests: the agent as init, the virtio modules, and optional programs.
//!
//! It is not compressed, because the guest unpacks it at once and it is in the host's page cache
//! anyway.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::io::Write;
use std::path::{Path, PathBuf};

use crate::balloon_module;
use crate::config::{HostFile, Inclusion};
use crate::elf;
use crate::error::HostError;
use crate::initramfs::{Archive, add_skeleton};
use crate::kernel::Kernel;
use crate::libraries::program_with_libraries;
use crate::modules::{ModuleIndex, uncompressed_path};

/// Modules in every image, in load order: the transports before the devices.
pub const STANDARD_MODULES: [&str; 5] =
    ["virtio_pci", "virtio_mmio", "virtio_balloon", "virtio_blk", "virtio_rng"];
/// Debian's memhog (package numactl).
pub const MEMHOG: &str = "/usr/bin/memhog";

/// Content of a test guest's initramfs.
#[derive(Debug, Clone)]
pub struct GuestImage {
    /// The guest agent: a static executable that becomes `/init`.
    pub agent: PathBuf,
    /// Kernel whose modules are included.
    pub kernel: Kernel,
    /// Modules to load after the standard ones: each a name, optionally followed by a space and its
    /// parameters.
    pub modules: Vec<String>,
    /// Ebb's balloon driver for this kernel; the agent loads it instead of the stock one if the
    /// guest's command line requests it. Its trackers are included if they are beside it.
    pub balloon_module: Option<PathBuf>,
    /// Whether to include the real memhog.
    pub memhog: Inclusion,
    /// Executables to include with their libraries, at their own paths.
    pub programs: Vec<PathBuf>,
    /// Additional files.
    pub files: Vec<HostFile>,
}

impl GuestImage {
    /// An image with only the standard modules of `kernel` and, if found
    /// ([`balloon_module::find`]), Ebb's balloon driver.
    pub fn new(agent: PathBuf, kernel: Kernel) -> Self {
        let balloon_module = balloon_module::find(None, &kernel.release);
        Self {
            agent,
            kernel,
            modules: Vec::new(),
            balloon_module,
            memhog: Inclusion::Excluded,
            programs: Vec::new(),
            files: Vec::new(),
        }
    }
}

/// Writes the initramfs to `writer`.
pub fn build<W: Write>(image: &GuestImage, writer: W) -> Result<W, HostError> {
    elf::require_static(&image.agent)?;
    let index = ModuleIndex::read(&image.kernel.modules)?;
    let mut archive = Archive::new(writer);
    add_skeleton(&mut archive)?;
    archive.copy("init", Some(0o755), &image.agent)?;

    let mut list = String::new();
    let mut loaded = BTreeSet::new();
    let requested = STANDARD_MODULES.into_iter().chain(image.modules.iter().map(String::as_str));
    for request in requested {
        let (name, parameters) = request.split_once(' ').unwrap_or((request, ""));
        let files = index.load_order(&[name])?;
        let last = files.len().saturating_sub(1);
        for (at, file) in files.iter().enumerate() {
            if loaded.insert(file.clone()) {
                let base = uncompressed_path(file).rsplit('/').next().unwrap_or(file);
                let path = format!("/modules/{base}");
                archive.file(&path, 0o644, &index.content(file)?)?;
                // Parameters belong to the requested module, not to its dependencies.
                let parameters = if at == last { parameters } else { "" };
                let _ = writeln!(list, "{}", format!("{path} {parameters}").trim_end());
            }
        }
    }
    archive.file("modules.list", 0o644, list.as_bytes())?;

    if let Some(path) = &image.balloon_module {
        let release = &image.kernel.release;
        archive.file(
            balloon_module::path_in_guest(release),
            0o644,
            &balloon_module::read(path, release)?,
        )?;
        if let Some(path) = balloon_module::trackers_beside(path) {
            archive.file(
                balloon_module::trackers_path_in_guest(release),
                0o644,
                &balloon_module::read(&path, release)?,
            )?;
        }
    }

    let mut files = image.files.clone();
    if image.memhog == Inclusion::Included {
        files.extend(program_with_libraries(Path::new(MEMHOG))?);
    }
    for program in &image.programs {
        files.extend(program_with_libraries(program)?);
    }
    // Programs share libraries.
    let mut added = BTreeSet::new();
    for file in files.iter().filter(|file| added.insert(&file.target)) {
        archive.copy(&file.target, file.mode, &file.source)?;
    }
    archive.finish()
}
