//! Text of the other side.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Longest part of the other side's reason that is kept.
const LONGEST_REASON_CHARACTERS: usize = 2000;

/// A reason sent by the other side: of bounded length and without control characters, so that it
/// can be printed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub struct Reason(String);

impl From<String> for Reason {
    fn from(text: String) -> Self {
        Self(printable(&text, LONGEST_REASON_CHARACTERS))
    }
}

impl From<&str> for Reason {
    fn from(text: &str) -> Self {
        text.to_owned().into()
    }
}

impl From<Reason> for String {
    fn from(reason: Reason) -> Self {
        reason.0
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_empty() { "no reason given" } else { &self.0 })
    }
}

/// Returns at most `longest` characters of `text`, with a space for every control character.
pub(super) fn printable(text: &str, longest: usize) -> String {
    text.chars().take(longest).map(|c| if c.is_control() { ' ' } else { c }).collect()
}
