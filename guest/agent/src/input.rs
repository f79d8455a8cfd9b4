//! Splits the console's input into command lines of bounded length.

/// A line of input.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Line {
    /// A complete line without its terminator.
    Whole(Vec<u8>),
    /// A line that exceeded the limit and was dropped.
    TooLong,
}

/// Collects bytes until a line is complete.
#[derive(Debug)]
pub struct Lines {
    limit_bytes: usize,
    pending: Vec<u8>,
    overflow: bool,
}

impl Lines {
    /// A splitter for lines of at most `limit_bytes`.
    pub fn new(limit_bytes: usize) -> Self {
        Self { limit_bytes, pending: Vec::new(), overflow: false }
    }

    /// Adds input; calls `found` for every complete line that is not empty.
    pub fn push(&mut self, bytes: &[u8], mut found: impl FnMut(Line)) {
        for &byte in bytes {
            match byte {
                b'\n' | b'\r' => {
                    let line = std::mem::take(&mut self.pending);
                    if std::mem::take(&mut self.overflow) {
                        found(Line::TooLong);
                    } else if !line.is_empty() {
                        found(Line::Whole(line));
                    }
                }
                _ if self.pending.len() >= self.limit_bytes => {
                    self.pending = Vec::new();
                    self.overflow = true;
                }
                _ if self.overflow => {}
                _ => self.pending.push(byte),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn split(limit_bytes: usize, parts: &[&[u8]]) -> Vec<Line> {
        let mut lines = Lines::new(limit_bytes);
        let mut found = Vec::new();
        for part in parts {
            lines.push(part, |line| found.push(line));
        }
        found
    }

    #[test]
    fn all_line_terminators_and_partial_input_are_accepted() {
        let whole = |text: &str| Line::Whole(text.as_bytes().to_vec());
        assert_eq!(split(9, &[b"ab", b"c\r\nd\n\n", b"e"]), [whole("abc"), whole("d")]);
    }

    #[test]
    fn only_the_long_line_is_dropped() {
        assert_eq!(
            split(3, &[b"abc\nabcd\nx\n"]),
            [Line::Whole(b"abc".to_vec()), Line::TooLong, Line::Whole(b"x".to_vec())]
        );
    }

    proptest! {
        #[test]
        fn the_split_of_the_input_is_irrelevant(
            bytes: Vec<u8>,
            cut in any::<prop::sample::Index>(),
        ) {
            let at = cut.index(bytes.len() + 1);
            prop_assert_eq!(split(8, &[&bytes]), split(8, &[&bytes[..at], &bytes[at..]]));
        }

        #[test]
        fn memory_is_bounded(bytes in proptest::collection::vec(32_u8.., 0..200)) {
            let mut lines = Lines::new(16);
            lines.push(&bytes, |_| {});
            prop_assert!(lines.pending.len() <= 16);
        }
    }
}
