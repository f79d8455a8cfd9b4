//! Checks of a machine, as `doctor` prints them.

use std::fmt::Write as _;

use serde::Serialize;

/// Result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Grade {
    /// No action needed.
    Ok,
    /// Guests run, but with a missing feature or slowly.
    Warning,
    /// Guests cannot run.
    Problem,
}

impl Grade {
    fn word(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warning => "warning",
            Self::Problem => "problem",
        }
    }
}

/// One property of the machine, with its grade.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Check {
    /// The property's name.
    pub name: &'static str,
    /// Its grade.
    pub grade: Grade,
    /// The value found.
    pub found: String,
    /// Suggested action, if any.
    pub remedy: Option<String>,
}

impl Check {
    /// A check with an optional remedy.
    pub fn new(
        name: &'static str,
        grade: Grade,
        found: impl Into<String>,
        remedy: Option<&str>,
    ) -> Self {
        Self { name, grade, found: found.into(), remedy: remedy.map(str::to_owned) }
    }
}

/// Formats the checks as lines with the summary below them.
pub fn table(checks: &[Check], summary: &str) -> String {
    let width = checks.iter().map(|check| check.name.len()).max().unwrap_or(0);
    let mut text = String::new();
    for Check { name, grade, found, remedy } in checks {
        // Writing into a String cannot fail.
        let _ = writeln!(text, "{:<7}  {name:<width$}  {found}", grade.word());
        if let Some(remedy) = remedy {
            let _ = writeln!(text, "{:<7}  {:<width$}  -> {remedy}", "", "");
        }
    }
    let _ = writeln!(text, "\n{summary}");
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remedies_follow_their_check_and_the_summary_is_last() {
        let checks = [
            Check::new("KVM", Grade::Ok, "/dev/kvm", None),
            Check::new("memory", Grade::Warning, "little", Some("buy more")),
        ];
        assert_eq!(
            table(&checks, "guests run"),
            "ok       KVM     /dev/kvm\nwarning  memory  little\n                 -> buy more\n\n\
             guests run\n"
        );
    }
}
