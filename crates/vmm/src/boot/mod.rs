//! Loads a Linux kernel, its initrd and its command line into guest memory and selects the entry
//! point of the boot vCPU.
//!
//! Two entry protocols are used: the 64-bit entry of the Linux boot protocol (Linux
//! Documentation/arch/x86/boot.rst) for bzImages and for ELF kernels without a PVH note, and PVH
//! (Xen docs/misc/pvh.pandoc) for ELF kernels with one.

mod elf;
pub mod lean;
mod linux;
mod positioned;
mod pvh;

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;
use std::os::fd::{AsRawFd as _, RawFd};
use std::path::{Path, PathBuf};

use ebb_guest_ram::GuestMemory;
use linux_loader::loader::elf::PvhBootCapability;
use linux_loader::loader::{BzImage, Elf, KernelLoader, KernelLoaderResult, bootparam};
use thiserror::Error;
use vm_memory::{Bytes, GuestAddress, ReadVolatile};

use crate::acpi;
use crate::file::{Access, open_image};
use crate::layout;
use crate::size::ByteSize;
use positioned::Positioned;

/// Why a guest could not be loaded.
#[derive(Debug, Error)]
pub enum BootError {
    /// The file cannot be opened or read.
    #[error(
        "cannot read the {what} {}: {source}; check the path and its permissions",
        path.display()
    )]
    Read {
        /// `kernel` or `initrd`.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The file is neither a bzImage nor an x86_64 ELF kernel.
    #[error(
        "{} is not a Linux kernel for x86_64: {problem}; \
         give a bzImage (/boot/vmlinuz-*) or an ELF vmlinux",
        path.display()
    )]
    NotAKernel {
        /// The file.
        path: PathBuf,
        /// What the file contains instead.
        problem: String,
    },
    /// The image does not fit into guest memory.
    #[error(
        "the {what} {} needs guest memory up to {needed}, the guest has {available} there; \
         give it more --memory",
        path.display()
    )]
    DoesNotFit {
        /// `kernel` or `initrd`.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// Memory needed.
        needed: ByteSize,
        /// Memory available.
        available: ByteSize,
    },
    /// The command line is too long for the kernel or for its buffer.
    #[error(
        "the kernel command line has {length} bytes, this kernel accepts {limit}; shorten --cmdline"
    )]
    CmdlineTooLong {
        /// Length in bytes.
        length: usize,
        /// Longest accepted, in bytes.
        limit: usize,
    },
    /// A boot structure could not be written.
    #[error("cannot write {what} into guest memory: {source}; this is a bug in the monitor")]
    Write {
        /// The structure.
        what: &'static str,
        /// The memory's error.
        source: vm_memory::GuestMemoryError,
    },
}

/// How the boot vCPU starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Entry {
    /// 64-bit mode with the zero page's address in RSI.
    Linux64(GuestAddress),
    /// 32-bit protected mode without paging, the start information's address in EBX.
    Pvh(GuestAddress),
}

/// The files a guest boots from, opened once: a reboot loads them again when no file can be opened
/// any more.
#[derive(Debug)]
pub struct BootImage {
    kernel: NamedFile,
    initrd: Option<NamedFile>,
    cmdline: String,
}

#[derive(Debug)]
struct NamedFile {
    path: PathBuf,
    file: File,
}

impl NamedFile {
    fn open(what: &'static str, path: &Path) -> Result<Self, BootError> {
        let read = |source| BootError::Read { what, path: path.to_owned(), source };
        let file = open_image(path, Access::Read).map_err(read)?;
        Ok(Self { path: path.to_owned(), file })
    }
}

impl BootImage {
    /// Opens kernel and initrd.
    pub fn open(kernel: &Path, initrd: Option<&Path>, cmdline: &str) -> Result<Self, BootError> {
        Ok(Self {
            kernel: NamedFile::open("kernel", kernel)?,
            initrd: initrd.map(|path| NamedFile::open("initrd", path)).transpose()?,
            cmdline: cmdline.to_owned(),
        })
    }

    /// The same files, opened no second time.
    ///
    /// # Errors
    /// Those of fcntl(2).
    pub(crate) fn try_clone(&self) -> std::io::Result<Self> {
        let again = |file: &NamedFile| -> std::io::Result<NamedFile> {
            Ok(NamedFile { path: file.path.clone(), file: file.file.try_clone()? })
        };
        Ok(Self {
            kernel: again(&self.kernel)?,
            initrd: self.initrd.as_ref().map(again).transpose()?,
            cmdline: self.cmdline.clone(),
        })
    }

    /// The descriptors of its files.
    pub(crate) fn descriptors(&self) -> impl Iterator<Item = RawFd> {
        std::iter::once(&self.kernel).chain(&self.initrd).map(|file| file.file.as_raw_fd())
    }

    /// Loads everything into `memory` (of `ram_bytes` RAM) and writes the boot structures. `rsdp`
    /// is the address of the ACPI root pointer.
    pub fn load(
        &self,
        memory: &GuestMemory,
        ram_bytes: u64,
        rsdp: GuestAddress,
    ) -> Result<Entry, BootError> {
        let path = self.kernel.path.clone();
        let loaded =
            load_kernel(&mut Positioned::new(&self.kernel.file), &path, memory, ram_bytes)?;
        let limit = loaded.cmdline_limit().min(layout::CMDLINE_MAX_BYTES - 1);
        if self.cmdline.len() > limit {
            return Err(BootError::CmdlineTooLong { length: self.cmdline.len(), limit });
        }
        write(memory, "the reset code", layout::RESET_VECTOR, &RESET_CODE)?;
        let mut cmdline = self.cmdline.clone().into_bytes();
        cmdline.push(0);
        write(memory, "the command line", layout::CMDLINE_START, &cmdline)?;
        let initrd = match &self.initrd {
            None => 0..0,
            Some(initrd) => load_initrd(initrd, memory, ram_bytes, &loaded)?,
        };
        match loaded.kind {
            Kind::Pvh(entry) => {
                pvh::write_start_info(memory, ram_bytes, &initrd, rsdp)?;
                Ok(Entry::Pvh(entry))
            }
            Kind::Linux64 { entry, header } => {
                linux::write_zero_page(
                    memory,
                    ram_bytes,
                    header,
                    self.cmdline.len(),
                    &initrd,
                    rsdp,
                )?;
                Ok(Entry::Linux64(entry))
            }
        }
    }
}

/// Real-mode code at the reset vector: writes the ACPI reset register, then halts. Linux on
/// hardware-reduced ACPI assumes that UEFI started it, does not find the UEFI services and falls
/// back to the BIOS, which is this code (Linux arch/x86/kernel/reboot.c, `reboot_init` and
/// `native_machine_emergency_restart`).
const RESET_CODE: [u8; 9] = {
    let [low, high] = (layout::ACPI_PORT + acpi::RESET).to_le_bytes();
    // mov dx, port; mov al, value; out dx, al; hlt; jmp to the hlt
    [0xba, low, high, 0xb0, acpi::RESET_VALUE, 0xee, 0xf4, 0xeb, 0xfd]
};

struct LoadedKernel {
    /// End of the memory that the kernel uses while it starts, in bytes from address 0.
    end: u64,
    kind: Kind,
}

enum Kind {
    Pvh(GuestAddress),
    Linux64 { entry: GuestAddress, header: bootparam::setup_header },
}

impl LoadedKernel {
    /// Longest command line without its NUL, in bytes. ELF kernels do not specify it; Linux allows
    /// 2048 with the NUL on x86.
    fn cmdline_limit(&self) -> usize {
        match self.kind {
            Kind::Linux64 { header, .. } if header.cmdline_size > 0 => header.cmdline_size as usize,
            _ => 2047,
        }
    }

    /// Highest address at which the kernel accepts its initrd.
    fn initrd_limit(&self) -> u64 {
        match self.kind {
            Kind::Linux64 { header, .. } if header.initrd_addr_max > 0 => {
                u64::from(header.initrd_addr_max) + 1
            }
            _ => layout::HOLE_START,
        }
    }
}

fn load_kernel(
    file: &mut (impl Read + Seek + ReadVolatile),
    path: &Path,
    memory: &GuestMemory,
    ram_bytes: u64,
) -> Result<LoadedKernel, BootError> {
    let read = |source| BootError::Read { what: "kernel", path: path.to_owned(), source };
    let not_a_kernel = |problem: String| BootError::NotAKernel { path: path.to_owned(), problem };
    let does_not_fit = |needed: u64| BootError::DoesNotFit {
        what: "kernel",
        path: path.to_owned(),
        needed: ByteSize::from_bytes(needed),
        available: ByteSize::from_bytes(low_ram_end(ram_bytes)),
    };
    let file_bytes = file.seek(SeekFrom::End(0)).map_err(read)?;
    file.rewind().map_err(read)?;
    let mut head = Vec::new();
    file.by_ref().take(0x206).read_to_end(&mut head).map_err(read)?;
    file.rewind().map_err(read)?;

    if head.starts_with(b"\x7fELF") {
        if elf::is_program(file).map_err(read)? {
            return Err(not_a_kernel(
                "it is a program that runs on an operating system".to_owned(),
            ));
        }
        let result = Elf::load(memory, None, file, Some(GuestAddress(layout::HIGH_RAM_START)))
            .map_err(|error| {
                elf_error(&error, &not_a_kernel, || {
                    does_not_fit(layout::HIGH_RAM_START + file_bytes)
                })
            })?;
        if result.kernel_end > low_ram_end(ram_bytes) {
            return Err(does_not_fit(result.kernel_end));
        }
        return Ok(elf_kernel(&result));
    }
    if head.get(0x202..0x206) != Some(b"HdrS") {
        let problem =
            if head.is_empty() { "the file is empty" } else { "neither ELF nor bzImage magic" };
        return Err(not_a_kernel(problem.to_owned()));
    }
    let announced_bytes = linux::image_bytes(&head);
    if file_bytes < announced_bytes {
        return Err(not_a_kernel(format!(
            "it has {file_bytes} of the {announced_bytes} bytes that its header announces; \
             copy it again"
        )));
    }
    if layout::HIGH_RAM_START + file_bytes > low_ram_end(ram_bytes) {
        return Err(does_not_fit(layout::HIGH_RAM_START + file_bytes));
    }
    let result = BzImage::load(
        memory,
        Some(GuestAddress(layout::HIGH_RAM_START)),
        file,
        Some(GuestAddress(layout::HIGH_RAM_START)),
    )
    .map_err(|error| not_a_kernel(format!("{error:?}")))?;
    let header = result.setup_header.unwrap_or_default();
    let (version, xloadflags) = (header.version, header.xloadflags);
    if version < 0x020c || xloadflags & 1 == 0 {
        return Err(not_a_kernel(format!(
            "boot protocol {:x}.{:02x} without a 64-bit entry",
            version >> 8,
            version & 0xff
        )));
    }
    // The decompressor moves itself up to `pref_address` and needs `init_size` bytes from there.
    let end =
        header.pref_address.max(layout::HIGH_RAM_START).saturating_add(u64::from(header.init_size));
    if end > low_ram_end(ram_bytes) {
        return Err(does_not_fit(end));
    }
    // The 64-bit entry is 0x200 bytes after the 32-bit one (boot.rst, "64-bit boot protocol").
    let entry = GuestAddress(result.kernel_load.0 + 0x200);
    Ok(LoadedKernel { end, kind: Kind::Linux64 { entry, header } })
}

fn elf_kernel(result: &KernelLoaderResult) -> LoadedKernel {
    let kind = match result.pvh_boot_cap {
        PvhBootCapability::PvhEntryPresent(entry) => Kind::Pvh(entry),
        _ => Kind::Linux64 { entry: result.kernel_load, header: linux::header_for_elf() },
    };
    LoadedKernel { end: result.kernel_end, kind }
}

fn elf_error(
    error: &linux_loader::loader::Error,
    not_a_kernel: &dyn Fn(String) -> BootError,
    does_not_fit: impl FnOnce() -> BootError,
) -> BootError {
    use linux_loader::loader::{Error, elf};
    match error {
        // The loader reports the same error for a short file and for too little memory. The file
        // has been read before.
        Error::Elf(elf::Error::ReadKernelImage) | Error::MemoryOverflow => does_not_fit(),
        Error::Elf(error) => not_a_kernel(error.to_string()),
        other => not_a_kernel(format!("{other:?}")),
    }
}

/// End of the RAM below the hole.
fn low_ram_end(ram_bytes: u64) -> u64 {
    ram_bytes.min(layout::HOLE_START)
}

/// Loads the initrd at the highest page-aligned address that the kernel accepts.
fn load_initrd(
    initrd: &NamedFile,
    memory: &GuestMemory,
    ram_bytes: u64,
    kernel: &LoadedKernel,
) -> Result<Range<u64>, BootError> {
    const PAGE_BYTES: u64 = 4096;
    let path = &initrd.path;
    let read = |source| BootError::Read { what: "initrd", path: path.clone(), source };
    let mut file = Positioned::new(&initrd.file);
    let size = file.seek(SeekFrom::End(0)).map_err(read)?;
    file.rewind().map_err(read)?;
    let limit = low_ram_end(ram_bytes).min(kernel.initrd_limit());
    let start = limit.checked_sub(size).map_or(0, |start| start & !(PAGE_BYTES - 1));
    if start < kernel.end {
        return Err(BootError::DoesNotFit {
            what: "initrd",
            path: path.clone(),
            needed: ByteSize::from_bytes((kernel.end + size).next_multiple_of(1 << 20)),
            available: ByteSize::from_bytes(limit),
        });
    }
    memory
        .read_exact_volatile_from(GuestAddress(start), &mut file, size as usize)
        .map_err(|error| read(std::io::Error::other(error)))?;
    Ok(start..start + size)
}

fn write(
    memory: &GuestMemory,
    what: &'static str,
    address: u64,
    bytes: &[u8],
) -> Result<(), BootError> {
    memory
        .write_slice(bytes, GuestAddress(address))
        .map_err(|source| BootError::Write { what, source })
}

/// Loads `bytes` as a kernel into a small memory and discards the result: entry point for fuzzing.
#[doc(hidden)]
pub fn fuzz_kernel(bytes: &[u8]) {
    const RAM_BYTES: u64 = 64 << 20;
    let Ok(memory) = GuestMemory::from_ranges(&[(GuestAddress(0), RAM_BYTES as usize)]) else {
        return;
    };
    let mut file = std::io::Cursor::new(bytes);
    let _ = load_kernel(&mut file, Path::new("fuzz"), &memory, RAM_BYTES);
}

#[cfg(test)]
mod tests;
