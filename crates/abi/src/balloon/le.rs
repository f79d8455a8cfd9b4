//! Little-endian numbers of configuration space and messages.

macro_rules! little_endian {
    ($name:ident, $number:ty, $bytes:literal, $bits:literal) => {
        #[doc = concat!("A ", $bits, "-bit little-endian number with byte alignment.")]
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
        #[repr(transparent)]
        pub struct $name(pub(crate) [u8; $bytes]);

        impl $name {
            /// Converts from host byte order.
            pub const fn new(value: $number) -> Self {
                Self(value.to_le_bytes())
            }

            /// Converts to host byte order.
            pub const fn get(self) -> $number {
                <$number>::from_le_bytes(self.0)
            }
        }
    };
}

little_endian!(Le16, u16, 2, "16");
little_endian!(Le32, u32, 4, "32");
little_endian!(Le64, u64, 8, "64");
