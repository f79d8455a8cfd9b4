//! Bits stored in words.

/// A fixed number of bits. Bits behind the last one are always 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Bits(Vec<u64>);

/// The words of a range of bits: the first and the last word with masks of their bits, which must
/// be combined if they are the same word.
#[derive(Clone, Copy)]
struct Span {
    first: usize,
    first_mask: u64,
    last: usize,
    last_mask: u64,
}

impl Span {
    /// The span of the bits from `first` to before `end`; `None` if it is empty.
    fn new(first: u64, end: u64) -> Option<Self> {
        (first < end).then(|| Self {
            first: (first / 64) as usize,
            first_mask: u64::MAX << (first % 64),
            last: ((end - 1) / 64) as usize,
            last_mask: u64::MAX >> (63 - (end - 1) % 64),
        })
    }
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
        self.change(first, end, u64::MAX, |word, mask| *word |= mask);
    }

    /// Makes the bits from `first` to before `end` 0.
    pub(super) fn clear(&mut self, first: u64, end: u64) {
        self.change(first, end, 0, |word, mask| *word &= !mask);
    }

    /// Sets words that lie entirely in the range to `whole`, and changes the masked bits of the
    /// others.
    fn change(&mut self, first: u64, end: u64, whole: u64, partly: impl Fn(&mut u64, u64)) {
        let Some(span) = Span::new(first, end) else { return };
        if span.first == span.last {
            partly(&mut self.0[span.first], span.first_mask & span.last_mask);
            return;
        }
        partly(&mut self.0[span.first], span.first_mask);
        self.0[span.first + 1..span.last].fill(whole);
        partly(&mut self.0[span.last], span.last_mask);
    }

    /// Sets the bits of a word that are 1 in `word`. All bits of the word must exist.
    pub(super) fn set_word(&mut self, index: u64, word: u64) {
        self.0[index as usize] |= word;
    }

    /// Copies the bits from `first`, the first of a word, to before `end`. Returns whether any of
    /// them is 1.
    pub(super) fn copy_words(&self, first: u64, end: u64, words: &mut [u64]) -> bool {
        let Some(span) = Span::new(first, end) else { return false };
        words.copy_from_slice(&self.0[span.first..=span.last]);
        words[span.last - span.first] &= span.last_mask;
        words.iter().any(|word| *word != 0)
    }

    /// Number of bits from `first` to before `end` that are 1.
    pub(super) fn count(&self, first: u64, end: u64) -> u64 {
        let Some(span) = Span::new(first, end) else { return 0 };
        let ones = |word: u64| u64::from(word.count_ones());
        let all: u64 = self.0[span.first..=span.last].iter().map(|word| ones(*word)).sum();
        all - ones(self.0[span.first] & !span.first_mask)
            - ones(self.0[span.last] & !span.last_mask)
    }

    pub(super) fn is_clear(&self) -> bool {
        self.0.iter().all(|word| *word == 0)
    }

    /// Start and end of the first run of 1 bits from `first` to before `end`.
    pub(super) fn next_run(&self, first: u64, end: u64) -> Option<(u64, u64)> {
        let start = self.find(first, end, 0)?;
        Some((start, self.find(start, end, u64::MAX).unwrap_or(end)))
    }

    /// The first bit from `first` to before `end` that differs from those of `other`, a word of
    /// equal bits.
    fn find(&self, first: u64, end: u64, other: u64) -> Option<u64> {
        let span = Span::new(first, end)?;
        let bit = |index: usize, found: u64| index as u64 * 64 + u64::from(found.trailing_zeros());
        let found = (self.0[span.first] ^ other) & span.first_mask;
        let found = if found != 0 {
            bit(span.first, found)
        } else {
            let rest = &self.0[span.first + 1..=span.last];
            let index = span.first + 1 + rest.iter().position(|word| *word != other)?;
            bit(index, self.0[index] ^ other)
        };
        (found < end).then_some(found)
    }

    /// Sets the bits that are 1 in `other`, which must have as many bits.
    pub(super) fn add(&mut self, other: &Self) {
        for (own, others) in self.0.iter_mut().zip(&other.0) {
            *own |= others;
        }
    }
}
