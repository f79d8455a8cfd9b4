//! Names of trust domains, and rules about their users.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Maximum length of a domain name.
const LONGEST_BYTES: usize = 64;

/// The name of a trust domain: 1 to 64 letters, digits, dots, underscores and dashes.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct DomainName(String);

/// An invalid domain name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{text:?} is not a name of a trust domain: {problem}; use 1 to 64 letters, digits, dots, \
     underscores, dashes"
)]
pub struct NameError {
    text: String,
    problem: &'static str,
}

impl DomainName {
    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for DomainName {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let fits = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
        let problem = if text.is_empty() {
            "it is empty"
        } else if text.len() > LONGEST_BYTES {
            "it is longer than 64 bytes"
        } else if !text.bytes().all(fits) {
            "it has other characters"
        } else {
            return Ok(Self(text.to_owned()));
        };
        // Text of a stranger must not flood a log.
        Err(NameError { text: text.chars().take(LONGEST_BYTES).collect(), problem })
    }
}

impl TryFrom<String> for DomainName {
    type Error = NameError;

    fn try_from(text: String) -> Result<Self, NameError> {
        text.parse()
    }
}

impl From<DomainName> for String {
    fn from(name: DomainName) -> Self {
        name.0
    }
}

impl fmt::Display for DomainName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A domain that a broker serves, as written on a command line: `NAME` or `NAME=UID`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DomainRule {
    /// The domain.
    pub name: DomainName,
    /// User whose processes may join it, besides root's; the broker's own user if absent.
    pub user: Option<u32>,
}

/// An invalid domain rule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RuleError {
    /// Invalid name.
    #[error(transparent)]
    Name(#[from] NameError),
    /// Invalid user.
    #[error("{text:?} is not a user ID; write NAME=UID with a decimal number, see `id -u`")]
    User {
        /// The text.
        text: String,
    },
}

impl FromStr for DomainRule {
    type Err = RuleError;

    fn from_str(text: &str) -> Result<Self, RuleError> {
        let Some((name, user)) = text.split_once('=') else {
            return Ok(Self { name: text.parse()?, user: None });
        };
        // `parse` would take a plus sign.
        let digits = Some(user).filter(|user| user.bytes().all(|byte| byte.is_ascii_digit()));
        let number = digits.and_then(|user| user.parse().ok());
        let number = number.ok_or_else(|| RuleError::User { text: user.to_owned() })?;
        Ok(Self { name: name.parse()?, user: Some(number) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_few_characters_and_a_length() {
        for good in ["a", "web.example-7_x", &"x".repeat(64)] {
            assert_eq!(good.parse::<DomainName>().unwrap().as_str(), good);
        }
        for bad in ["", &"x".repeat(65), "a b", "a/b", "a\0", "ä", "a\n", "a="] {
            assert!(bad.parse::<DomainName>().is_err(), "{bad:?}");
        }
        let long = "\u{1f600}".repeat(100_000).parse::<DomainName>().unwrap_err();
        assert!(long.to_string().len() < 2000);
        assert!(serde_json::from_str::<DomainName>(r#""a/b""#).is_err());
    }

    #[test]
    fn a_rule_may_name_a_user() {
        let rule = |text: &str| text.parse::<DomainRule>();
        assert_eq!(rule("web").unwrap(), DomainRule { name: "web".parse().unwrap(), user: None });
        assert_eq!(
            rule("web=7").unwrap(),
            DomainRule { name: "web".parse().unwrap(), user: Some(7) }
        );
        for bad in ["=7", "web=", "web=+7", "web=-1", "web=4294967296", "web=7=8", "web=root"] {
            assert!(rule(bad).is_err(), "{bad}");
        }
    }
}
