//! Session tokens: the time of their end with a code that only this process can make. They take no
//! memory, however many a guest asks for.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use ring::hmac;

/// Longest life of a token, in seconds.
const MOST_SECONDS: u32 = 21_600;
/// Bytes of the time of its end, in nanoseconds since the tokens' beginning.
const END_BYTES: usize = 8;

/// Makes and checks tokens.
pub(super) struct Tokens {
    key: hmac::Key,
    beginning: Instant,
}

/// A lifetime that no token has.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "Invalid time to live value provided for token: {0}. Please provide a value between 1 and \
     {MOST_SECONDS}."
)]
pub(super) struct InvalidLifetime(u32);

impl std::fmt::Debug for Tokens {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokens").finish_non_exhaustive()
    }
}

impl Tokens {
    /// Tokens under a key of their own.
    pub(super) fn new() -> Self {
        let mut key = [0; 32];
        // 32 bytes are never cut short, nor interrupted (getrandom(2)).
        let _ = rustix::rand::getrandom(&mut key, rustix::rand::GetRandomFlags::empty());
        Self { key: hmac::Key::new(hmac::HMAC_SHA256, &key), beginning: Instant::now() }
    }

    /// A token for so many seconds from `now` on.
    pub(super) fn make(&self, seconds: u32, now: Instant) -> Result<String, InvalidLifetime> {
        if !(1..=MOST_SECONDS).contains(&seconds) {
            return Err(InvalidLifetime(seconds));
        }
        let end = self.age(now) + Duration::from_secs(seconds.into());
        let end = u64::try_from(end.as_nanos()).unwrap_or(u64::MAX).to_le_bytes();
        let code = hmac::sign(&self.key, &end);
        let mut token = String::new();
        for byte in end.iter().chain(code.as_ref()) {
            let _ = write!(token, "{byte:02x}");
        }
        Ok(token)
    }

    /// Whether a token was made here and has not ended.
    pub(super) fn is_valid(&self, token: &str, now: Instant) -> bool {
        let digits = token.as_bytes();
        let length = 2 * (END_BYTES + self.key.algorithm().digest_algorithm().output_len());
        if digits.len() != length {
            return false;
        }
        let pair = |pair: &[u8]| {
            let high = char::from(*pair.first()?).to_digit(16)?;
            let low = char::from(*pair.get(1)?).to_digit(16)?;
            u8::try_from(high << 4 | low).ok()
        };
        let bytes: Option<Vec<u8>> = digits.chunks(2).map(pair).collect();
        let Some((end, code)) = bytes.as_deref().and_then(<[u8]>::split_first_chunk) else {
            return false;
        };
        hmac::verify(&self.key, end, code).is_ok()
            && u128::from(u64::from_le_bytes(*end)) > self.age(now).as_nanos()
    }

    fn age(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.beginning)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn tokens_end() {
        let (tokens, others) = (Tokens::new(), Tokens::new());
        let now = Instant::now();
        let token = tokens.make(2, now).unwrap();
        assert!(tokens.is_valid(&token, now + Duration::from_millis(1999)));
        assert!(!tokens.is_valid(&token, now + Duration::from_secs(2)));
        assert!(!others.is_valid(&token, now));
        for seconds in [0, MOST_SECONDS + 1, u32::MAX] {
            assert_eq!(tokens.make(seconds, now), Err(InvalidLifetime(seconds)));
        }
    }

    proptest! {
        #[test]
        fn a_changed_token_is_invalid(at in 0_usize..80, digit in "[0-9a-gé]") {
            let tokens = Tokens::new();
            let now = Instant::now();
            let token = tokens.make(100, now).unwrap();
            let mut changed = token.clone();
            changed.replace_range(at..=at, &digit);
            prop_assert_eq!(tokens.is_valid(&changed, now), changed == token);
        }

        #[test]
        fn no_other_text_is_a_token(text in ".{0,100}") {
            prop_assert!(!Tokens::new().is_valid(&text, Instant::now()));
        }
    }
}
