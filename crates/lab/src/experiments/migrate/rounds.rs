//! The migrations of a series, one after another with the same guest.

use std::thread;
use std::time::Duration;

use super::strategies::{Report, Strategy};
use super::subject::Subject;
use super::{FAST, SLOW, Sizes};
use crate::LabError;
use crate::error::GuestProblem;
use crate::harness::link::{Link, Rate};
use crate::harness::testbed::Testbed;
use crate::report::results::Series;

/// Condition of a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Case {
    /// Idle, over the fast link.
    Fast,
    /// Idle, over the slow link.
    Slow,
    /// While it rewrites its working set, over the fast link.
    Busy,
}

impl Case {
    pub(super) fn rate(self) -> Rate {
        match self {
            Self::Fast | Self::Busy => FAST,
            Self::Slow => SLOW,
        }
    }

    /// Description of the guest's load.
    pub(super) fn load(self) -> &'static str {
        match self {
            Self::Fast | Self::Slow => "idle",
            Self::Busy => "rewrites its working set",
        }
    }
}

/// A migration.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Moved {
    pub(super) case: Case,
    pub(super) report: Report,
    /// Time from the command to the guest's first answer at the other end.
    pub(super) answered_ms: f64,
    /// Memory that the guest used right before.
    pub(super) used_bytes: u64,
}

/// Delay from the start of a load to the migration, after which its memory is in use.
const LOAD_LEAD: Duration = Duration::from_secs(1);
/// Time limit of a migration, far more than an idle guest takes over the slow link.
const PATIENCE: Duration = Duration::from_secs(150);

/// Runs a series; `moved` contains the measurements even after a failure.
///
/// # Errors
/// The failure of the system, a guest or a monitor.
pub(super) fn run(
    testbed: &Testbed<'_>,
    link: &Link,
    (sizes, strategy): (Sizes, Strategy),
    series: &mut Series,
    moved: &mut Vec<Moved>,
) -> Result<(), LabError> {
    let fast = (0..sizes.repeats).map(|_| Case::Fast);
    let mut guest = None;
    for case in fast.chain([Case::Slow, Case::Busy]) {
        let mut attempts = 0;
        let done = loop {
            match one(testbed, link, (sizes, strategy), case, &mut guest, &mut series.notes) {
                Ok(done) => break done,
                // An emulated host loses a guest occasionally, which is retried; damaged memory is
                // not.
                Err(error) if attempts == 0 && !is_damage(&error) => {
                    attempts += 1;
                    guest = None;
                    let place = format!("{}, {}", case.rate().describe(), case.load());
                    series.notes.push(format!("run again with a new guest ({place}): {error}"));
                }
                Err(error) => return Err(error),
            }
        };
        moved.push(done);
    }
    Ok(())
}

fn is_damage(error: &LabError) -> bool {
    matches!(error, LabError::Guest { problem: GuestProblem::Damaged(_), .. })
}

/// One migration of the guest, which is booted if necessary.
fn one<'a, 'b>(
    testbed: &'a Testbed<'b>,
    link: &'a Link,
    (sizes, strategy): (Sizes, Strategy),
    case: Case,
    guest: &mut Option<Subject<'a, 'b>>,
    notes: &mut Vec<String>,
) -> Result<Moved, LabError> {
    let subject = match guest {
        Some(subject) => subject,
        None => guest.insert(Subject::boot(testbed, link, sizes.guest, sizes.hold_mib)?),
    };
    subject.use_memory(sizes.program_mib)?;
    if testbed.setup().reporting {
        subject.wait_for_return(sizes.program_mib, testbed.scale())?;
    }
    link.shape(case.rate())?;
    let lasts = Duration::from_secs(sizes.load_s);
    let load = match case {
        Case::Fast | Case::Slow => None,
        Case::Busy => Some(subject.begin_load(sizes.working_set_mib, lasts)?),
    };
    if load.is_some() {
        thread::sleep(LOAD_LEAD);
    }
    let used_bytes = subject.used_bytes()?;
    subject.step(format!("moves over {}, {}", case.rate().describe(), case.load()));
    let patience = if load.is_some() { lasts / 2 } else { PATIENCE };
    let (report, answered_ms) = subject.migrate(strategy, patience)?;
    if report.forced {
        notes.push(format!(
            "{}: stopped after {patience:?}, since it did not converge",
            case.load()
        ));
    }
    if let Some(reason) = &report.not_asked {
        notes.push(format!("the guest's free pages were not requested: {reason}"));
    }
    if let Some(load) = load {
        if load.is_over() {
            notes.push(format!("{}: this ended before the migration", case.load()));
        }
        subject.finish_load(load)?;
    }
    subject.verify()?;
    Ok(Moved { case, report, answered_ms, used_bytes })
}
