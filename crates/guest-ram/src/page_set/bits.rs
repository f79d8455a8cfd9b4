//! Bits in words.

/// A fixed number of bits. Bits behind the last one are always 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Bits(Vec<u64>);

/// The words that the bits from `first` to before `end` lie in, each with the mask of those in it.
fn masks(first: u64, end: u64) -> impl Iterator<Item = (usize, u64)> {
    let words = if first < end { first / 64..(end - 1) / 64 + 1 } else { 0..0 };
    words.map(move |word| {
        let low = first.saturating_sub(word * 64);
        let high = (end - word * 64).min(64);
        (word as usize, u64::MAX >> (64 - (high - low)) << low)
    })
}

impl Bits {
    /// All 0.
    pub(super) fn new(count: u64) -> Self {
        Self(vec![0; count.div_ceil(64) as usize])
    }

    pub(super) fn get(&self, bit: u64) -> bool {
        self.0[(bit / 64) as usize] >> (bit % 64) & 1 != 0
    }

    /// Makes the bits from `first` to before `end` 1.
    pub(super) fn set(&mut self, first: u64, end: u64) {
        masks(first, end).for_each(|(word, mask)| self.0[word] |= mask);
    }

    /// Makes the bits from `first` to before `end` 0.
    pub(super) fn clear(&mut self, first: u64, end: u64) {
        masks(first, end).for_each(|(word, mask)| self.0[word] &= !mask);
    }

    /// Makes those bits of a word 1 that are 1 in `word`. All of the word's bits must exist.
    pub(super) fn set_word(&mut self, index: u64, word: u64) {
        self.0[index as usize] |= word;
    }

    /// Copies the bits from `first`, the first of a word, to before `end`. Returns whether any of them is 1.
    pub(super) fn copy_words(&self, first: u64, end: u64, words: &mut [u64]) -> bool {
        let mut any = 0;
        for ((word, mask), copy) in masks(first, end).zip(words) {
            *copy = self.0[word] & mask;
            any |= *copy;
        }
        any != 0
    }

    /// How many of the bits from `first` to before `end` are 1.
    pub(super) fn count(&self, first: u64, end: u64) -> u64 {
        masks(first, end).map(|(word, mask)| u64::from((self.0[word] & mask).count_ones())).sum()
    }

    pub(super) fn is_clear(&self) -> bool {
        self.0.iter().all(|word| *word == 0)
    }

    /// Start and end of the first run of bits that are 1 among those from `first` to before `end`.
    pub(super) fn next_run(&self, first: u64, end: u64) -> Option<(u64, u64)> {
        let start = self.find(first, end, 0)?;
        Some((start, self.find(start, end, u64::MAX).unwrap_or(end)))
    }

    /// The first bit from `first` to before `end` that is 1 after all were changed where `inverted` is 1.
    fn find(&self, first: u64, end: u64, inverted: u64) -> Option<u64> {
        masks(first, end).find_map(|(word, mask)| {
            let found = (self.0[word] ^ inverted) & mask;
            (found != 0).then(|| word as u64 * 64 + u64::from(found.trailing_zeros()))
        })
    }

    /// Replaces each word by what `operation` makes of it and of the other's, which must have as many bits.
    pub(super) fn combine(&mut self, other: &Self, operation: impl Fn(u64, u64) -> u64) {
        for (own, others) in self.0.iter_mut().zip(&other.0) {
            *own = operation(*own, *others);
        }
    }
}
