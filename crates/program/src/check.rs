//! Checks of a machine, as `doctor` prints them.

use std::fmt::Write as _;

use serde::Serialize;

/// How good a thing is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Grade {
    /// Nothing to do.
    Ok,
    /// Guests run, but something is missing or slow.
    Warning,
    /// Guests cannot run because of it.
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
    /// How good it is.
    pub grade: Grade,
    /// What was found.
    pub found: String,
    /// What to do about it, if anything.
    pub remedy: Option<String>,
}

impl Check {
    /// A check with its remedy, if there is one.
    pub fn new(
        name: &'static str,
        grade: Grade,
        found: impl Into<String>,
        remedy: Option<&str>,
    ) -> Self {
        Self { name, grade, found: found.into(), remedy: remedy.map(str::to_owned) }
    }
}

/// The checks as lines, the summary below them.
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
    fn a_remedy_stands_below_its_check_and_the_summary_last() {
        let checks = [
            Check::new("KVM", Grade::Ok, "/dev/kvm", None),
            Check::new("memory", Grade::Warning, "little", Some("buy more")),
        ];
        assert_eq!(
            table(&checks, "guests run"),
            "ok       KVM     /dev/kvm\nwarning  memory  little\n                 -> buy more\n\nguests run\n"
        );
    }
}
