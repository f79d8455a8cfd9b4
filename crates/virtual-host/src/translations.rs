//! QEMU's translated code: how much it keeps, and the plugin that keeps its table from growing.
//!
//! The emulator interrupts all of its processors when the table of translated blocks grows and when
//! the memory for translations is full. After VMRUN has injected an interrupt into a guest, such an
//! interruption may inject it once more, whether or not the guest has interrupts enabled
//! (`helper_vmrun` in QEMU's `target/i386/tcg/system/svm_helper.c` leaves the vector in
//! `exception_index`, which `cpu_handle_interrupt` in `accel/tcg/cpu-exec.c` then keeps; found in
//! 10.0.2). The guest then panics or waits forever for a lock that it holds. Less growth does not
//! remove this bug, but makes it rare.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

use memchr::memmem;

use crate::error::HostError;
use crate::initramfs::memory_file;

/// Memory for translated code in MiB, used as needed: the most that the emulator takes. Each start
/// of a guest adds 20 to 30 MiB.
pub const CODE_MIB: u32 = 2048;

/// The compiled `plugin/translations.c`.
const PLUGIN: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/translations.so"));
/// A function of the plugin API. An emulator that loads plugins exports its name.
const EXPORTED: &[u8] = b"\0qemu_plugin_register_flush_cb\0";

/// The plugin as a file for this emulator; `None` if it loads no plugins.
pub fn plugin(program: &Path) -> Result<Option<File>, HostError> {
    let failed = |error: io::Error| {
        HostError::io(format!("cannot prepare the plugin for {}", program.display()))(error)
    };
    let emulator = fs::read(program).map_err(failed)?;
    if memmem::find(&emulator, EXPORTED).is_none() {
        return Ok(None);
    }
    let mut file = memory_file("ebb-translations")?;
    file.write_all(PLUGIN).map_err(failed)?;
    Ok(Some(file))
}
