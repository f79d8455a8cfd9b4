//! The device's configuration space (virtio 1.3 section 5.5.4).

use core::mem::{align_of, offset_of, size_of};
use core::ops::Range;

use super::le::Le32;

/// `struct virtio_balloon_config`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct Config {
    /// Pages that the device wants in the balloon; read-only for the driver.
    pub num_pages: Le32,
    /// Pages in the balloon as reported by the driver; written by the driver.
    pub actual: Le32,
    /// Command of free page hinting ([`super::HintCommand`]); read-only for the driver.
    pub free_page_hint_command_id: Le32,
    /// Pattern that the guest writes into free pages; written by the driver.
    pub poison_value: Le32,
}

const _: () = {
    assert!(size_of::<Config>() == 16 && align_of::<Config>() == 1);
    assert!(offset_of!(Config, num_pages) == 0);
    assert!(offset_of!(Config, actual) == 4);
    assert!(offset_of!(Config, free_page_hint_command_id) == 8);
    assert!(offset_of!(Config, poison_value) == 12);
};

impl Config {
    /// Size in bytes.
    pub const SIZE_BYTES: usize = size_of::<Self>();
    /// Byte range of `actual`.
    pub const ACTUAL: Range<usize> = 4..8;
    /// Byte range of `poison_value`.
    pub const POISON_VALUE: Range<usize> = 12..16;

    /// Encodes the structure as the driver reads it.
    pub const fn to_bytes(self) -> [u8; Self::SIZE_BYTES] {
        let (a, b, c, d) = (
            self.num_pages.0,
            self.actual.0,
            self.free_page_hint_command_id.0,
            self.poison_value.0,
        );
        [
            a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3], //
            c[0], c[1], c[2], c[3], d[0], d[1], d[2], d[3],
        ]
    }

    /// Decodes the structure from the bytes that the driver reads.
    pub const fn from_bytes(bytes: [u8; Self::SIZE_BYTES]) -> Self {
        let [a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3] = bytes;
        Self {
            num_pages: Le32([a0, a1, a2, a3]),
            actual: Le32([b0, b1, b2, b3]),
            free_page_hint_command_id: Le32([c0, c1, c2, c3]),
            poison_value: Le32([d0, d1, d2, d3]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_little_endian_in_specification_order() {
        let config = Config {
            num_pages: Le32::new(0x0403_0201),
            actual: Le32::new(0x0807_0605),
            free_page_hint_command_id: Le32::new(0x0c0b_0a09),
            poison_value: Le32::new(0x100f_0e0d),
        };
        let bytes = config.to_bytes();
        assert_eq!(bytes, core::array::from_fn(|index| index as u8 + 1));
        assert_eq!(Config::from_bytes(bytes), config);
        assert_eq!(bytes[Config::ACTUAL], 0x0807_0605_u32.to_le_bytes());
        assert_eq!(bytes[Config::POISON_VALUE], 0x100f_0e0d_u32.to_le_bytes());
    }
}
