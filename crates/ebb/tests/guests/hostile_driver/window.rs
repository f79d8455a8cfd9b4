//! The device's registers, mapped from `/dev/mem`.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::ptr::NonNull;

use rustix::mm::{MapFlags, ProtFlags, mmap};

/// Size of a register window in bytes: the end of a page, and the page with the configuration space.
const WINDOW_BYTES: usize = CONFIG + PAGE_BYTES;
const PAGE_BYTES: usize = 4096;
/// Magic value "virt" (virtio 1.3 section 4.2.2).
const MAGIC: u32 = 0x7472_6976;
/// Device type of the entropy device (section 5.4.1).
pub const ENTROPY: u32 = 4;
/// Device type of the balloon (section 5.5.1).
pub const BALLOON: u32 = 5;
/// Offset of the device's configuration space.
pub const CONFIG: usize = 0x100;

/// Registers of section 4.2.2; each address register is followed by that of its upper half.
#[derive(Clone, Copy, Debug)]
#[repr(usize)]
pub enum Register {
    Magic = 0x0,
    DeviceId = 0x8,
    DeviceFeatures = 0x10,
    DeviceFeaturesSelect = 0x14,
    DriverFeatures = 0x20,
    DriverFeaturesSelect = 0x24,
    QueueSelect = 0x30,
    QueueSize = 0x38,
    QueueReady = 0x44,
    QueueNotify = 0x50,
    Status = 0x70,
    DescriptorsLow = 0x80,
    AvailableLow = 0x90,
    UsedLow = 0xa0,
}

/// A mapped register window; it stays mapped until the process ends.
pub struct Window(NonNull<u8>);

impl Window {
    /// Finds the device of this type among those announced by ACPI.
    pub fn open(device: u32) -> Result<Self, String> {
        let map =
            fs::read_to_string("/proc/iomem").map_err(|error| format!("/proc/iomem: {error}"))?;
        let starts = map
            .lines()
            .filter(|line| line.contains("LNRO0005"))
            .filter_map(|line| u64::from_str_radix(line.trim_start().split('-').next()?, 16).ok());
        for start in starts {
            let window = Self::map(start)?;
            if window.get(Register::Magic) == MAGIC && window.get(Register::DeviceId) == device {
                return Ok(window);
            }
        }
        Err(format!("no device of type {device} in /proc/iomem:\n{map}"))
    }

    fn map(start: u64) -> Result<Self, String> {
        let memory = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(rustix::fs::OFlags::SYNC.bits().cast_signed())
            .open("/dev/mem")
            .map_err(|error| format!("/dev/mem: {error}"))?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let into_page = start % PAGE_BYTES as u64;
        let (bytes, page) = (into_page as usize + WINDOW_BYTES, start - into_page);
        // SAFETY: the kernel chooses an unused address; the mapping contains a device's registers,
        // not memory managed by Rust.
        let mapped = unsafe {
            mmap(std::ptr::null_mut(), bytes, protection, MapFlags::SHARED, &memory, page)
        };
        let mapped = mapped.map_err(|error| format!("/dev/mem at {start:#x}: {error}"))?;
        // SAFETY: the mapping goes on beyond this offset.
        let address = unsafe { mapped.cast::<u8>().add(into_page as usize) };
        NonNull::new(address).map(Self).ok_or_else(|| "mapped at 0".to_owned())
    }

    /// Reads a register.
    pub fn get(&self, register: Register) -> u32 {
        self.read32(register as usize)
    }

    /// Writes a register.
    pub fn set(&self, register: Register, value: u32) {
        self.write32(register as usize, value);
    }

    fn at<T>(&self, offset: usize) -> *mut T {
        assert!(offset + size_of::<T>() <= WINDOW_BYTES, "{offset:#x}");
        // SAFETY: the assertion keeps the result inside the window.
        unsafe { self.0.as_ptr().add(offset) }.cast()
    }

    /// Reads 32 bits at an offset that is a multiple of 4.
    pub fn read32(&self, offset: usize) -> u32 {
        // SAFETY: the address is inside the window, which stays mapped, and aligned for the type; a
        // device register is read with one access.
        unsafe { self.at::<u32>(offset & !3).read_volatile() }
    }

    /// Writes 32 bits at an offset that is a multiple of 4.
    pub fn write32(&self, offset: usize, value: u32) {
        // SAFETY: as in `read32`.
        unsafe { self.at::<u32>(offset & !3).write_volatile(value) }
    }

    /// Writes 16 bits at an even offset.
    pub fn write16(&self, offset: usize, value: u16) {
        // SAFETY: as in `read32`.
        unsafe { self.at::<u16>(offset & !1).write_volatile(value) }
    }

    /// Writes a byte.
    pub fn write8(&self, offset: usize, value: u8) {
        // SAFETY: as in `read32`.
        unsafe { self.at::<u8>(offset).write_volatile(value) }
    }

    /// Reads and writes 64 bits at any offset.
    pub fn access_across(&self, offset: usize) {
        let address = self.at::<u64>(offset);
        // SAFETY: the address is inside the window, which stays mapped; alignment is not needed.
        let before = unsafe { address.read_unaligned() };
        // SAFETY: as above.
        unsafe { address.write_unaligned(!before) }
    }
}
