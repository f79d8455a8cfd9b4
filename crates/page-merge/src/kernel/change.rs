//! Order of changes to settings.

use super::error::KsmError;
use super::knobs::{ADVISOR_NONE, ADVISOR_SCAN_TIME, Knob, RUN_UNMERGE, Values};

/// One step of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// Write a value.
    Write(Knob, u64),
    /// Unmerge everything and wait until no page is shared; `run` is 2 afterwards.
    Unmerge,
}

/// The steps from `present` to `wanted`; settings that `wanted` lacks stay unchanged.
///
/// - `merge_across_nodes` and `max_page_sharing` are written after everything was unmerged;
///   otherwise the kernel refuses them, or, worse, pages of the old trees would remain (patch "ksm:
///   allow trees per NUMA node", 2013).
/// - `advisor_mode` is written before `pages_to_scan`, which cannot be written while an advisor is
///   active, and which the kernel resets when the advisor is turned off.
/// - `run` is written last, so that no page is merged under a setting that is about to change.
pub(super) fn plan(present: &Values, wanted: &Values) -> Result<Vec<Action>, KsmError> {
    if let Some((knob, _)) = wanted.iter().find(|(knob, _)| present.get(*knob).is_none()) {
        return Err(KsmError::NoKnob { knob });
    }
    let mut steps = Vec::new();
    let changes = |knob: Knob| wanted.get(knob).filter(|value| present.get(knob) != Some(*value));
    let guarded: Vec<_> = Knob::ALL
        .into_iter()
        .filter(|knob| knob.needs_nothing_shared())
        .filter_map(|knob| Some(Action::Write(knob, changes(knob)?)))
        .collect();
    let unmerges = !guarded.is_empty();
    if unmerges {
        steps.push(Action::Unmerge);
        steps.extend(guarded);
    }
    let advisor =
        wanted.get(Knob::AdvisorMode).or(present.get(Knob::AdvisorMode)).unwrap_or(ADVISOR_NONE);
    if let Some(mode) = changes(Knob::AdvisorMode) {
        steps.push(Action::Write(Knob::AdvisorMode, mode));
    }
    for knob in Knob::ALL {
        let value = match knob {
            Knob::Run | Knob::AdvisorMode | Knob::MergeAcrossNodes | Knob::MaxPageSharing => None,
            Knob::PagesToScan if advisor == ADVISOR_SCAN_TIME => None,
            // Turning the advisor off resets the value that was read.
            Knob::PagesToScan if present.get(Knob::AdvisorMode) != Some(advisor) => {
                wanted.get(knob)
            }
            knob => changes(knob),
        };
        steps.extend(value.map(|value| Action::Write(knob, value)));
    }
    let run = wanted.get(Knob::Run).or(present.get(Knob::Run));
    match run {
        Some(RUN_UNMERGE) if unmerges => {}
        Some(RUN_UNMERGE) if wanted.get(Knob::Run).is_some() => steps.push(Action::Unmerge),
        Some(run) if unmerges || present.get(Knob::Run) != Some(run) => {
            steps.push(Action::Write(Knob::Run, run));
        }
        _ => {}
    }
    Ok(steps)
}
