//! The owner's settings, and the configuration space as seen by the driver.

use std::ops::Range;
use std::time::Duration;

use ebb_abi::PAGE_SIZE_BYTES;
use ebb_abi::balloon::{Config, Features, HintCommand, Le32};

/// Settings of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BalloonConfig {
    /// Features to offer; bits that neither virtio-balloon nor the extension (docs/extension.md)
    /// defines are ignored.
    ///
    /// Page poison should always be among them: without it, Linux guests that fill free pages with
    /// a pattern give up page reporting (drivers/virtio/virtio_balloon.c, `virtballoon_validate`).
    pub features: Features,
    /// Initial target size of the balloon in bytes; rounded down to pages.
    pub target_bytes: u64,
    /// Interval between statistics requests; `None`: only on demand.
    pub statistics_interval: Option<Duration>,
}

impl Default for BalloonConfig {
    /// All features of the specification and none of the extension, an empty balloon, statistics on
    /// demand.
    fn default() -> Self {
        Self { features: Features::ALL_BALLOON, target_bytes: 0, statistics_interval: None }
    }
}

/// Effect of a write to the configuration space.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ConfigWrite {
    /// The driver wrote the number of pages in the balloon.
    pub(crate) actual: bool,
    /// Bytes of read-only fields would have changed.
    pub(crate) read_only: bool,
}

/// The configuration space and its generation (virtio 1.3 section 2.5.3).
#[derive(Debug, Default)]
pub(crate) struct ConfigSpace {
    config: Config,
    generation: u32,
}

impl ConfigSpace {
    /// Reads from `offset`; bytes beyond the end read as 0.
    pub(crate) fn read(&self, offset: u64, data: &mut [u8]) {
        let bytes = self.config.to_bytes();
        let start = usize::try_from(offset).unwrap_or(usize::MAX).min(bytes.len());
        let source = &bytes[start..];
        let count = source.len().min(data.len());
        data[..count].copy_from_slice(&source[..count]);
        data[count..].fill(0);
    }

    /// Writes from `offset`. Only `actual` and `poison_value` take effect: some drivers write the
    /// whole structure back, and must not overwrite the device's fields.
    pub(crate) fn write(&mut self, offset: u64, data: &[u8]) -> ConfigWrite {
        let mut bytes = self.config.to_bytes();
        let before = bytes;
        let mut result = ConfigWrite::default();
        let Ok(offset) = usize::try_from(offset) else { return result };
        for (position, byte) in (offset..bytes.len()).zip(data) {
            let field = |range: Range<usize>| range.contains(&position);
            if field(Config::ACTUAL) || field(Config::POISON_VALUE) {
                bytes[position] = *byte;
                result.actual |= field(Config::ACTUAL);
            } else if before[position] != *byte {
                result.read_only = true;
            }
        }
        self.config = Config::from_bytes(bytes);
        result
    }

    /// Generation of the space; changes whenever the device changes the space by itself.
    pub(crate) fn generation(&self) -> u32 {
        self.generation
    }

    pub(crate) fn target_pages(&self) -> u32 {
        self.config.num_pages.get()
    }

    pub(crate) fn target_bytes(&self) -> u64 {
        u64::from(self.target_pages()) * PAGE_SIZE_BYTES
    }

    /// Sets the target size; returns whether that changed anything.
    pub(crate) fn set_target_pages(&mut self, pages: u32) -> bool {
        let new = Config { num_pages: Le32::new(pages), ..self.config };
        self.change(new)
    }

    pub(crate) fn actual_pages(&self) -> u32 {
        self.config.actual.get()
    }

    pub(crate) fn poison_value(&self) -> u32 {
        self.config.poison_value.get()
    }

    /// Number of the hinting command.
    pub(crate) fn hint_command(&self) -> u32 {
        self.config.free_page_hint_command_id.get()
    }

    /// Sets the hinting command; returns whether that changed anything.
    pub(crate) fn set_hint_command(&mut self, command: HintCommand) -> bool {
        let new = Config { free_page_hint_command_id: Le32::new(command.id()), ..self.config };
        self.change(new)
    }

    fn change(&mut self, new: Config) -> bool {
        let changed = new != self.config;
        self.config = new;
        self.generation = self.generation.wrapping_add(u32::from(changed));
        changed
    }

    /// Clears what the driver wrote; the device's fields stay, except for the hinting command.
    pub(crate) fn reset(&mut self) {
        self.change(Config { num_pages: self.config.num_pages, ..Config::default() });
    }

    pub(crate) fn save(&self) -> [u8; Config::SIZE_BYTES] {
        self.config.to_bytes()
    }

    pub(crate) fn restore(&mut self, bytes: [u8; Config::SIZE_BYTES]) {
        self.change(Config::from_bytes(bytes));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn only_two_fields_are_writable() {
        let mut space = ConfigSpace::default();
        space.set_target_pages(0x1234);
        space.set_hint_command(HintCommand::Start(7));
        // QEMU's generic vhost-user device writes all of it at once.
        let write = space.write(0, &[0xff; 16]);
        assert_eq!(write, ConfigWrite { actual: true, read_only: true });
        assert_eq!(space.target_pages(), 0x1234);
        assert_eq!(space.actual_pages(), u32::MAX);
        assert_eq!(space.poison_value(), u32::MAX);
        let mut id = [0; 4];
        space.read(8, &mut id);
        assert_eq!(u32::from_le_bytes(id), 7);
    }

    #[test]
    fn writing_back_the_same_values_is_not_an_error() {
        let mut space = ConfigSpace::default();
        space.set_target_pages(99);
        let mut copy = [0; 16];
        space.read(0, &mut copy);
        copy[Config::ACTUAL].copy_from_slice(&5_u32.to_le_bytes());
        assert_eq!(space.write(0, &copy), ConfigWrite { actual: true, read_only: false });
        assert_eq!((space.target_pages(), space.actual_pages()), (99, 5));
    }

    #[test]
    fn reads_beyond_the_end_are_zero() {
        let mut space = ConfigSpace::default();
        space.write(12, &[9; 4]);
        let mut data = [1; 8];
        space.read(14, &mut data);
        assert_eq!(data, [9, 9, 0, 0, 0, 0, 0, 0]);
        space.read(u64::MAX, &mut data);
        assert_eq!(data, [0; 8]);
    }

    #[test]
    fn only_changes_by_the_device_change_the_generation() {
        let mut space = ConfigSpace::default();
        assert!(space.set_target_pages(1));
        assert!(!space.set_target_pages(1));
        space.write(4, &[1, 0, 0, 0]);
        assert_eq!(space.generation(), 1);
        space.reset();
        assert_eq!((space.actual_pages(), space.target_pages()), (0, 1));
    }

    proptest! {
        #[test]
        fn writes_at_any_offset_change_nothing_else(
            offset in prop_oneof![0..20_u64, any::<u64>()],
            data in prop::collection::vec(any::<u8>(), 0..24),
        ) {
            let mut space = ConfigSpace::default();
            space.restore(std::array::from_fn(|index| index as u8 * 3));
            let before = space.save();
            space.write(offset, &data);
            for (position, (old, new)) in before.into_iter().zip(space.save()).enumerate() {
                let written = (position as u64)
                    .checked_sub(offset)
                    .and_then(|index| data.get(usize::try_from(index).ok()?).copied());
                let writable = matches!(position, 4..8 | 12..16);
                prop_assert_eq!(new, written.filter(|_| writable).unwrap_or(old));
            }
        }
    }
}
