//! XDR (RFC 4506): big-endian numbers, and texts padded to four bytes.

use super::super::Trouble;

/// Reads values. No length is trusted: nothing is allocated beyond what the bytes hold.
#[derive(Debug)]
pub struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    /// Reads from these bytes.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    fn take(&mut self, length: usize) -> Result<&'a [u8], Trouble> {
        let short = || Trouble::Nonsense("a message ends too early".to_owned());
        let (taken, rest) = self.0.split_at_checked(length).ok_or_else(short)?;
        self.0 = rest;
        Ok(taken)
    }

    /// An array of a fixed length, which is a multiple of four.
    ///
    /// # Errors
    /// The message ends before.
    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], Trouble> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    /// An unsigned number of four bytes.
    ///
    /// # Errors
    /// The message ends before.
    pub fn u32(&mut self) -> Result<u32, Trouble> {
        self.array().map(u32::from_be_bytes)
    }

    /// A signed number of four bytes.
    ///
    /// # Errors
    /// The message ends before.
    pub fn i32(&mut self) -> Result<i32, Trouble> {
        self.array().map(i32::from_be_bytes)
    }

    /// An unsigned number of eight bytes.
    ///
    /// # Errors
    /// The message ends before.
    pub fn u64(&mut self) -> Result<u64, Trouble> {
        self.array().map(u64::from_be_bytes)
    }

    /// A text. What is no UTF-8 in it is replaced.
    ///
    /// # Errors
    /// The message ends before.
    pub fn text(&mut self) -> Result<String, Trouble> {
        let length = self.u32()? as usize;
        let bytes = self.take(length)?;
        self.take(length.wrapping_neg() % 4)?;
        Ok(String::from_utf8_lossy(bytes).into_owned())
    }

    /// A list, whose elements `read` reads. Each has to take some bytes.
    ///
    /// # Errors
    /// The message ends before.
    pub fn list<T>(
        &mut self,
        mut read: impl FnMut(&mut Self) -> Result<T, Trouble>,
    ) -> Result<Vec<T>, Trouble> {
        let count = self.u32()?;
        let mut list = Vec::new();
        for _ in 0..count {
            list.push(read(self)?);
        }
        Ok(list)
    }
}

/// Writes a text.
pub fn put_text(message: &mut Vec<u8>, text: &str) {
    let length = u32::try_from(text.len()).unwrap_or(u32::MAX);
    message.extend(length.to_be_bytes());
    message.extend(text.as_bytes());
    message.resize(message.len().next_multiple_of(4), 0);
}
