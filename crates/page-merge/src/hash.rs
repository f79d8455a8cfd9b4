//! Hash of a page under a domain's secret: XXH3 with a custom secret, so that collisions cannot be
//! prepared without knowing it.

use ebb_abi::PAGE_SIZE_BYTES;
use twox_hash::XxHash3_64;

/// Hash of a page's content under a [`Secret`]: equal contents have equal hashes, and equal hashes
/// only justify a comparison. Only the low 48 bits are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageHash(u64);

impl PageHash {
    /// Number of bits used.
    pub const BITS: u32 = 48;

    /// Represents pages of zeros where they are merged like any others.
    pub const ZEROS: Self = Self::new(0);

    /// The low bits of `hash`.
    pub const fn new(hash: u64) -> Self {
        Self(hash & ((1 << Self::BITS) - 1))
    }

    /// The bits.
    pub const fn get(self) -> u64 {
        self.0
    }
}

/// The key of a domain's hashes; a guest that does not know it cannot make pages whose hashes
/// collide. All members of a domain that share a store have the same.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Secret(pub [u8; 32]);

impl std::fmt::Debug for Secret {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Secret(..)")
    }
}

/// Content of a page that was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// Zeros only.
    Zero,
    /// Anything else.
    Hash(PageHash),
}

/// Length of XXH3's secret in bytes (the same as that of its default secret; the minimum is 136).
const EXPANDED_BYTES: usize = 192;

/// A page of zeros for comparison.
static ZEROS: [u8; PAGE_SIZE_BYTES as usize] = [0; PAGE_SIZE_BYTES as usize];

/// Hashes pages. All processes that share stable pages must use the same function and the same
/// [`Secret`].
#[derive(Clone)]
pub struct PageHasher {
    seed: u64,
    secret: [u8; EXPANDED_BYTES],
}

impl PageHasher {
    /// A hasher under `secret`.
    pub fn new(secret: &Secret) -> Self {
        let mut expanded = [0; EXPANDED_BYTES];
        for (number, chunk) in (0_u64..).zip(expanded.chunks_exact_mut(8)) {
            // Short inputs under a seed: each chunk depends on all bytes of the domain's secret and
            // on its position.
            chunk.copy_from_slice(&XxHash3_64::oneshot_with_seed(number, &secret.0).to_le_bytes());
        }
        Self { seed: XxHash3_64::oneshot_with_seed(u64::MAX, &secret.0), secret: expanded }
    }

    /// Classifies a page of 4096 bytes.
    pub fn content(&self, page: &[u8]) -> Content {
        if page == &ZEROS[..page.len().min(ZEROS.len())] {
            return Content::Zero;
        }
        // The only possible error is a secret that is too short, which it is not; the seed alone is
        // the fallback.
        let hash = XxHash3_64::oneshot_with_seed_and_secret(self.seed, &self.secret, page)
            .unwrap_or_else(|_| XxHash3_64::oneshot_with_seed(self.seed, page));
        Content::Hash(PageHash::new(hash))
    }

    /// The hash of a page of 4096 bytes; [`PageHash::ZEROS`] for zeros.
    pub fn hash(&self, page: &[u8]) -> PageHash {
        match self.content(page) {
            Content::Zero => PageHash::ZEROS,
            Content::Hash(hash) => hash,
        }
    }
}

impl std::fmt::Debug for PageHasher {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("PageHasher(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(byte: u8) -> Vec<u8> {
        vec![byte; 4096]
    }

    #[test]
    fn zeros_are_recognized_without_a_hash() {
        let hasher = PageHasher::new(&Secret([7; 32]));
        assert_eq!(hasher.content(&page(0)), Content::Zero);
        let mut last = page(0);
        last[4095] = 1;
        assert!(matches!(hasher.content(&last), Content::Hash(_)));
    }

    #[test]
    fn every_byte_of_the_page_and_of_the_secret_counts() {
        let hasher = PageHasher::new(&Secret([7; 32]));
        let mut seen = vec![hasher.hash(&page(1))];
        for place in [0, 17, 2047, 4095] {
            let mut other = page(1);
            other[place] = 2;
            seen.push(hasher.hash(&other));
        }
        for place in [0, 8, 15, 31] {
            let mut secret = [7; 32];
            secret[place] = 8;
            seen.push(PageHasher::new(&Secret(secret)).hash(&page(1)));
        }
        let all = seen.len();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), all);
        assert_eq!(hasher.hash(&page(1)), PageHasher::new(&Secret([7; 32])).hash(&page(1)));
    }
}
