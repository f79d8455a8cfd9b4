//! Kernel modules: the files that a module needs, in load order.

use std::collections::HashMap;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use crate::error::HostError;

/// Maximum size of a decompressed module.
const MODULE_LIMIT_BYTES: u64 = 64 << 20;

/// `modules.dep` and `modules.builtin` of one kernel release.
#[derive(Debug, Clone)]
pub struct ModuleIndex {
    directory: PathBuf,
    files: HashMap<String, Vec<String>>,
    builtin: Vec<String>,
}

impl ModuleIndex {
    /// Reads the index in `directory`, such as `/lib/modules/6.1.0-56-cloud-amd64`.
    pub fn read(directory: &Path) -> Result<Self, HostError> {
        let read = |name: &str| {
            let path = directory.join(name);
            fs::read_to_string(&path)
                .map_err(HostError::io(format!("cannot read {}", path.display())))
        };
        let dependencies = read("modules.dep")?;
        let builtin = read("modules.builtin")?;
        Ok(Self::parse(directory, &dependencies, &builtin))
    }

    /// Builds the index from the texts of `modules.dep` and `modules.builtin`.
    ///
    /// A line of `modules.dep` is `file: dependency dependency …` with all dependencies, in reverse
    /// load order (kmod's modules.dep(5)).
    pub fn parse(directory: &Path, dependencies: &str, builtin: &str) -> Self {
        let files = dependencies
            .lines()
            .filter_map(|line| line.split_once(':'))
            .map(|(file, needs)| {
                let order = needs
                    .split_whitespace()
                    .rev()
                    .chain([file.trim()])
                    .map(str::to_owned)
                    .collect();
                (module_name(file), order)
            })
            .collect();
        Self {
            directory: directory.to_owned(),
            files,
            builtin: builtin.lines().map(module_name).collect(),
        }
    }

    /// The files (relative to the directory) to load for `modules`, in load order and without
    /// duplicates. Built-in modules need none.
    pub fn load_order(&self, modules: &[&str]) -> Result<Vec<String>, HostError> {
        let mut order: Vec<String> = Vec::new();
        for module in modules {
            let name = module_name(module);
            match self.files.get(&name) {
                Some(files) => {
                    for file in files {
                        if !order.contains(file) {
                            order.push(file.clone());
                        }
                    }
                }
                None if self.builtin.contains(&name) => {}
                None => {
                    return Err(HostError::ModuleUnknown {
                        module: (*module).to_owned(),
                        path: self.directory.join("modules.dep"),
                    });
                }
            }
        }
        Ok(order)
    }

    /// Content of a module's file, decompressed if it is an `.xz`, `.zst` or `.gz` file.
    pub fn content(&self, file: &str) -> Result<Vec<u8>, HostError> {
        let path = self.directory.join(file);
        let raw =
            fs::read(&path).map_err(HostError::io(format!("cannot read {}", path.display())))?;
        let describe = HostError::io(format!("cannot decompress {}", path.display()));
        let mut content = Vec::new();
        let read = match path.extension().and_then(|extension| extension.to_str()) {
            Some("xz") => lzma_rust2::XzReader::new(raw.as_slice(), true)
                .take(MODULE_LIMIT_BYTES)
                .read_to_end(&mut content),
            Some("zst") => ruzstd::decoding::StreamingDecoder::new(raw.as_slice())
                .map_err(std::io::Error::other)
                .and_then(|decoder| decoder.take(MODULE_LIMIT_BYTES).read_to_end(&mut content)),
            Some("gz") => flate2::read::GzDecoder::new(raw.as_slice())
                .take(MODULE_LIMIT_BYTES)
                .read_to_end(&mut content),
            _ => return Ok(raw),
        };
        read.map_err(describe)?;
        Ok(content)
    }
}

/// Path of a module's file in an image: without the compression suffix.
pub fn uncompressed_path(file: &str) -> &str {
    file.find(".ko").map_or(file, |at| &file[..at + 3])
}

/// The kernel's name of a module: base name, no suffix, underscores.
fn module_name(path: &str) -> String {
    let base = path.trim().rsplit('/').next().unwrap_or_default();
    base.find(".ko").map_or(base, |at| &base[..at]).replace('-', "_")
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEPENDENCIES: &str = "kernel/a/kvm-amd.ko: kernel/a/kvm.ko kernel/b/irqbypass.ko\n\
        kernel/a/kvm.ko: kernel/b/irqbypass.ko\nkernel/b/irqbypass.ko:\nkernel/c/x.ko.xz:\n";

    fn index() -> ModuleIndex {
        ModuleIndex::parse(Path::new("/m"), DEPENDENCIES, "kernel/d/serial_core.ko\n")
    }

    #[test]
    fn dependencies_are_loaded_first_and_once() {
        let order = index().load_order(&["kvm_amd", "kvm", "x"]).unwrap();
        assert_eq!(
            order,
            ["kernel/b/irqbypass.ko", "kernel/a/kvm.ko", "kernel/a/kvm-amd.ko", "kernel/c/x.ko.xz"]
        );
    }

    #[test]
    fn built_in_modules_need_no_file_and_unknown_ones_are_errors() {
        assert!(index().load_order(&["serial-core"]).unwrap().is_empty());
        let error = index().load_order(&["nonsense"]).unwrap_err().to_string();
        assert!(error.contains("nonsense") && error.contains("/m/modules.dep"), "{error}");
    }

    #[test]
    fn names_and_paths_lose_their_suffixes() {
        assert_eq!(module_name("kernel/a/kvm-amd.ko.xz"), "kvm_amd");
        assert_eq!(uncompressed_path("kernel/a/x.ko.zst"), "kernel/a/x.ko");
    }
}
