//! Memory sizes in the form that users write: `4G`, `512M`, `4096`.

use std::fmt;
use std::num::IntErrorKind;
use std::str::FromStr;

use serde::de::{Deserialize, Deserializer, Visitor};
use serde::{Serialize, Serializer};

/// Suffixes in ascending order; each is 1024 times the one before.
const SUFFIXES: [(char, u32); 4] = [('K', 10), ('M', 20), ('G', 30), ('T', 40)];

/// A number of bytes, written by users with a binary suffix: `K`, `M`, `G` or `T` (1024 to the
/// power of 1 to 4), in either case, optionally followed by `iB`. No suffix means bytes.
///
/// [`fmt::Display`] writes the shortest form that reads back as the same number (`1536M`, never
/// `1.5G`). In JSON it is an integer of bytes; a string with a suffix is read as well.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ByteSize(u64);

/// Why a text is not a [`ByteSize`]. Each message quotes the text.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SizeError {
    /// The text is empty.
    #[error(
        "the size is empty: write a number with an optional suffix K, M, G or T, for example 4G"
    )]
    Empty,
    /// The text does not begin with a digit, or has other characters among the digits.
    #[error(
        "'{text}' is not a size: write a whole number with an optional suffix K, M, G or T, \
         for example 4G"
    )]
    NotANumber {
        /// The text.
        text: String,
    },
    /// The number has a fraction, as in `1.5G`.
    #[error(
        "'{text}' has a fraction: write a whole number with a smaller suffix, \
         for example 1536M for 1.5G"
    )]
    Fraction {
        /// The text.
        text: String,
    },
    /// The suffix is unknown.
    #[error("'{text}' ends in the unknown suffix '{suffix}': use K, M, G or T (powers of 1024)")]
    UnknownSuffix {
        /// The text.
        text: String,
        /// The part after the number.
        suffix: String,
    },
    /// The suffix is ambiguous: `4GB` means 4 x 10^9 to some and 4 x 2^30 to others.
    #[error(
        "'{text}' is ambiguous, since '{suffix}' is a power of 1000 to some and of 1024 to others: \
         write '{suggestion}' \
         (powers of 1024)"
    )]
    Ambiguous {
        /// The text.
        text: String,
        /// The part after the number.
        suffix: String,
        /// The same number with an accepted suffix.
        suggestion: String,
    },
    /// The number of bytes is 2^64 or more.
    #[error("'{text}' is too large: sizes are below 16 EiB (2^64 bytes)")]
    TooLarge {
        /// The text.
        text: String,
    },
}

impl ByteSize {
    /// A size of `bytes` bytes.
    pub const fn from_bytes(bytes: u64) -> Self {
        Self(bytes)
    }

    /// A size of `mib` MiB, or the largest size if that does not fit in 64 bits.
    pub const fn from_mib(mib: u64) -> Self {
        Self(mib.saturating_mul(1 << 20))
    }

    /// The number of bytes.
    pub const fn bytes(self) -> u64 {
        self.0
    }

    /// The size rounded to one decimal place with its unit, for tables: `326.4 MiB`.
    pub fn rounded(self) -> Rounded {
        Rounded(self.0)
    }
}

impl From<ByteSize> for u64 {
    fn from(size: ByteSize) -> Self {
        size.0
    }
}

impl FromStr for ByteSize {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Self, SizeError> {
        if text.is_empty() {
            return Err(SizeError::Empty);
        }
        let owned = || text.to_owned();
        let digits = text.bytes().take_while(u8::is_ascii_digit).count();
        let (number, suffix) = text.split_at(digits);
        if number.is_empty() {
            return Err(SizeError::NotANumber { text: owned() });
        }
        let shift = match parse_suffix(suffix) {
            Suffix::Shift(shift) => shift,
            Suffix::Decimal(letter) => {
                return Err(SizeError::Ambiguous {
                    text: owned(),
                    suffix: suffix.to_owned(),
                    suggestion: format!("{number}{letter}"),
                });
            }
            Suffix::Fraction => return Err(SizeError::Fraction { text: owned() }),
            Suffix::Unknown
                if suffix.contains(|c: char| c.is_ascii_digit() || c.is_whitespace()) =>
            {
                return Err(SizeError::NotANumber { text: owned() });
            }
            Suffix::Unknown => {
                return Err(SizeError::UnknownSuffix { text: owned(), suffix: suffix.to_owned() });
            }
        };
        let number: u64 =
            number.parse().map_err(|error: std::num::ParseIntError| match error.kind() {
                IntErrorKind::PosOverflow => SizeError::TooLarge { text: owned() },
                _ => SizeError::NotANumber { text: owned() },
            })?;
        number
            .checked_mul(1 << shift)
            .map(Self)
            .ok_or_else(|| SizeError::TooLarge { text: owned() })
    }
}

/// What follows the leading digits.
enum Suffix {
    /// Multiply by 2 to this power.
    Shift(u32),
    /// `KB` and the like, with the letter to use instead.
    Decimal(char),
    /// A decimal point or comma.
    Fraction,
    /// Anything else.
    Unknown,
}

fn parse_suffix(suffix: &str) -> Suffix {
    let mut characters = suffix.chars();
    let Some(letter) = characters.next() else {
        return Suffix::Shift(0);
    };
    if letter == '.' || letter == ',' {
        return Suffix::Fraction;
    }
    let letter = letter.to_ascii_uppercase();
    let Some((_, shift)) = SUFFIXES.iter().find(|(known, _)| *known == letter) else {
        return Suffix::Unknown;
    };
    let unit = characters.as_str();
    if unit.is_empty() || unit.eq_ignore_ascii_case("ib") {
        Suffix::Shift(*shift)
    } else if unit.eq_ignore_ascii_case("b") {
        Suffix::Decimal(letter)
    } else {
        Suffix::Unknown
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let suffix = SUFFIXES
            .iter()
            .rev()
            .find(|(_, shift)| self.0 != 0 && self.0.is_multiple_of(1 << shift));
        match suffix {
            Some((letter, shift)) => f.pad(&format!("{}{letter}", self.0 >> shift)),
            None => f.pad(&self.0.to_string()),
        }
    }
}

/// A size for tables, see [`ByteSize::rounded`].
#[derive(Clone, Copy, Debug)]
pub struct Rounded(u64);

impl fmt::Display for Rounded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let suffix = SUFFIXES.iter().rev().find(|(_, shift)| self.0 >> shift != 0);
        match suffix {
            // An f64 has 53 bits: far more than the digits shown.
            Some((letter, shift)) => {
                f.pad(&format!("{:.1} {letter}iB", self.0 as f64 / (1_u64 << shift) as f64))
            }
            None => f.pad(&format!("{} B", self.0)),
        }
    }
}

impl Serialize for ByteSize {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(self.0)
    }
}

impl<'de> Deserialize<'de> for ByteSize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ByteSizeVisitor)
    }
}

struct ByteSizeVisitor;

impl Visitor<'_> for ByteSizeVisitor {
    type Value = ByteSize;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a number of bytes, or a string such as \"4G\"")
    }

    fn visit_u64<E: serde::de::Error>(self, bytes: u64) -> Result<ByteSize, E> {
        Ok(ByteSize(bytes))
    }

    fn visit_i64<E: serde::de::Error>(self, bytes: i64) -> Result<ByteSize, E> {
        u64::try_from(bytes)
            .map(ByteSize)
            .map_err(|_| E::custom(format!("{bytes} is a negative size")))
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<ByteSize, E> {
        text.parse().map_err(E::custom)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn bytes(text: &str) -> u64 {
        text.parse::<ByteSize>().unwrap().bytes()
    }

    fn message(text: &str) -> String {
        text.parse::<ByteSize>().unwrap_err().to_string()
    }

    #[test]
    fn reads_suffixes_as_powers_of_1024() {
        assert_eq!(bytes("0"), 0);
        assert_eq!(bytes("4096"), 4096);
        assert_eq!(bytes("4K"), 4 << 10);
        assert_eq!(bytes("512m"), 512 << 20);
        assert_eq!(bytes("4G"), 4 << 30);
        assert_eq!(bytes("4GiB"), 4 << 30);
        assert_eq!(bytes("2T"), 2 << 40);
        assert_eq!(bytes("16777215T"), 16_777_215 << 40);
    }

    #[test]
    fn errors_name_the_text() {
        for text in [
            "G",
            "-1",
            "four",
            "1.5G",
            "1,5G",
            "4X",
            "4GG",
            "4GB",
            "4 G",
            "4G ",
            "0x10",
            "16777216T",
        ] {
            assert!(message(text).contains(&format!("'{text}'")), "{}", message(text));
        }
        for text in ["18446744073709551616", "99999999999999999999999", "16777216T"] {
            assert!(message(text).contains("too large"), "{}", message(text));
        }
        assert!(message("").contains("empty"));
        assert!(message("1.5G").contains("1536M"));
        assert!(message("4X").contains("suffix 'X'"));
        assert!(message("8gb").contains("write '8G'"));
    }

    #[test]
    fn displays_the_largest_exact_suffix() {
        assert_eq!(ByteSize::from_bytes(0).to_string(), "0");
        assert_eq!(ByteSize::from_bytes(1000).to_string(), "1000");
        assert_eq!(ByteSize::from_mib(1536).to_string(), "1536M");
        assert_eq!(ByteSize::from_mib(4096).to_string(), "4G");
        assert_eq!(format!("{:>6}", ByteSize::from_mib(4096)), "    4G");
    }

    #[test]
    fn rounds_for_tables() {
        assert_eq!(ByteSize::from_bytes(1023).rounded().to_string(), "1023 B");
        assert_eq!(ByteSize::from_bytes(1536).rounded().to_string(), "1.5 KiB");
        assert_eq!(ByteSize::from_mib(5120).rounded().to_string(), "5.0 GiB");
        assert_eq!(ByteSize::from_bytes(u64::MAX).rounded().to_string(), "16777216.0 TiB");
    }

    #[test]
    fn json_is_an_integer_and_reads_strings_too() {
        assert_eq!(serde_json::to_string(&ByteSize::from_mib(1)).unwrap(), "1048576");
        assert_eq!(serde_json::from_str::<ByteSize>("1048576").unwrap(), ByteSize::from_mib(1));
        assert_eq!(serde_json::from_str::<ByteSize>("\"1M\"").unwrap(), ByteSize::from_mib(1));
        let error = serde_json::from_str::<ByteSize>("-5").unwrap_err().to_string();
        assert!(error.contains("-5"), "{error}");
        let error = serde_json::from_str::<ByteSize>("\"5X\"").unwrap_err().to_string();
        assert!(error.contains("'5X'"), "{error}");
        assert!(serde_json::from_str::<ByteSize>("1.5").is_err());
    }

    proptest! {
        #[test]
        fn display_reads_back(value: u64, shift in 0_u32..64) {
            let size = ByteSize::from_bytes(value >> shift << (shift / 2));
            prop_assert_eq!(size.to_string().parse::<ByteSize>(), Ok(size));
        }

        #[test]
        fn any_text_parses_or_is_named(text in "\\PC{0,20}") {
            match text.parse::<ByteSize>() {
                Ok(size) => prop_assert_eq!(size.to_string().parse::<ByteSize>(), Ok(size)),
                Err(SizeError::Empty) => prop_assert!(text.is_empty()),
                Err(error) => prop_assert!(error.to_string().contains(&text)),
            }
        }
    }
}
