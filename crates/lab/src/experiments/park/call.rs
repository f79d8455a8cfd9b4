//! The call that makes a guest small, in each of its kinds.

use std::thread;
use std::time::{Duration, Instant};

use ebb_agent::protocol::Command;
use ebb_vmm::api::{ParkReport, ParkStage};
use serde::Serialize;

use crate::LabError;
use crate::harness::balloon::Balloon;
use crate::harness::host::mib;
use crate::harness::monitor::{Idle, MonitorKind};
use crate::harness::testbed::Testbed;
use crate::report::figures::DataTable;
use crate::report::statistics::rounded;

/// A balloon whose size has not changed for so long does not reach its target.
const STALLED: Duration = Duration::from_secs(2);
/// Interval of reading its size.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);

/// A call that has ended.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Parked {
    /// Time until its answer.
    pub(super) elapsed: Duration,
    /// What it did.
    pub(super) stages: Vec<Stage>,
}

/// A stage of a call.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Stage {
    name: String,
    end: String,
    reason: Option<String>,
    returned_mib: Option<f64>,
    elapsed_s: Option<f64>,
}

impl Stage {
    fn of(stage: &ParkStage) -> Self {
        Self {
            name: word(stage.stage),
            end: word(stage.end),
            reason: stage.reason.clone(),
            returned_mib: Some(stage.returned_bytes as f64 / f64::from(1 << 20)),
            elapsed_s: Some(stage.elapsed_us as f64 / 1e6),
        }
    }
}

/// Makes a guest small that keeps `keep_mib` of memory available, in the way of its series.
pub(super) fn park(
    testbed: &mut Testbed<'_>,
    guest: u32,
    keep_mib: u64,
) -> Result<Parked, LabError> {
    let setup = testbed.setup();
    let available_mib = available_mib(testbed, guest)?;
    testbed.events().step(guest, "is made small");
    let begin = Instant::now();
    if setup.monitor == MonitorKind::Qemu {
        return pulse(testbed, guest, available_mib.saturating_sub(keep_mib));
    }
    let stages = if setup.idle == Idle::Trimmed {
        vec![trim(testbed, guest)?]
    } else {
        stages_of(&testbed.park(guest, keep_mib)?).collect()
    };
    Ok(Parked { elapsed: begin.elapsed(), stages })
}

/// The stages in the answer of `PUT /vm/park`.
pub(super) fn stages_of(report: &ParkReport) -> impl Iterator<Item = Stage> {
    report.stages.iter().map(Stage::of)
}

/// The API's word for a value.
fn word(value: impl Serialize) -> String {
    let value = serde_json::to_value(value).ok();
    value.as_ref().and_then(|value| value.as_str()).unwrap_or_default().to_owned()
}

/// Trims until all of the guest's memory has been scanned.
fn trim(testbed: &mut Testbed<'_>, guest: u32) -> Result<Stage, LabError> {
    let report = testbed.trim(guest)?;
    Ok(Stage {
        name: "trim".to_owned(),
        end: "done".to_owned(),
        reason: None,
        returned_mib: Some(report.returned_bytes as f64 / f64::from(1 << 20)),
        elapsed_s: None,
    })
}

/// Inflates the balloon to this size and deflates it, as an operator does with any monitor.
fn pulse(testbed: &mut Testbed<'_>, guest: u32, size_mib: u64) -> Result<Parked, LabError> {
    let mut parked = Parked { elapsed: Duration::ZERO, stages: Vec::new() };
    for (target_mib, name) in [(size_mib, "inflate"), (0, "deflate")] {
        let (begin, before_mib) = (Instant::now(), testbed.footprint_mib(guest)?);
        let size_mib = resize(testbed, guest, target_mib)?;
        let missed = size_mib.abs_diff(target_mib);
        let elapsed = begin.elapsed();
        parked.elapsed += elapsed;
        parked.stages.push(Stage {
            name: name.to_owned(),
            end: if missed == 0 { "done" } else { "stopped" }.to_owned(),
            reason: (missed > 0).then(|| format!("{missed} MiB from the target")),
            returned_mib: Some(before_mib - testbed.footprint_mib(guest)?),
            elapsed_s: Some(elapsed.as_secs_f64()),
        });
    }
    Ok(parked)
}

/// Sets the balloon's target, and waits until it is reached or the size no longer changes: a guest
/// that has no more memory to give tries again and again. Returns the size, in MiB.
fn resize(testbed: &mut Testbed<'_>, guest: u32, target_mib: u64) -> Result<u64, LabError> {
    testbed.through(guest, |balloon| balloon.set_target_mib(target_mib))?;
    let (mut last_mib, mut changed) = (None, Instant::now());
    loop {
        let size_mib = testbed.through(guest, Balloon::actual_mib)?;
        if last_mib != Some(size_mib) {
            (last_mib, changed) = (Some(size_mib), Instant::now());
        }
        if size_mib == target_mib || changed.elapsed() > STALLED {
            return Ok(size_mib);
        }
        thread::sleep(LOOK_INTERVAL);
    }
}

/// Memory that the guest's kernel can give to programs, in MiB; an operator reads it from the
/// balloon's statistics.
fn available_mib(testbed: &mut Testbed<'_>, guest: u32) -> Result<u64, LabError> {
    let fields = testbed.ask(guest, Command::MemInfo)?;
    let kib = fields["MemAvailable"].as_u64();
    let kib = kib.ok_or_else(|| LabError::unexpected(guest, "no MemAvailable"))?;
    Ok(mib(kib) as u64)
}

/// The stages of all calls.
pub(super) fn table(stages: &[(u32, Stage)]) -> Option<DataTable> {
    let number = |value: Option<f64>| value.map(rounded).into();
    (!stages.is_empty()).then(|| {
        DataTable::of(
            "stages of the call",
            stages,
            &[
                ("call or guest", &|(number, _)| (*number).into()),
                ("stage", &|(_, stage)| stage.name.as_str().into()),
                ("end", &|(_, stage)| stage.end.as_str().into()),
                ("reason", &|(_, stage)| stage.reason.clone().into()),
                ("returned, MiB", &|(_, stage)| number(stage.returned_mib)),
                ("time, s", &|(_, stage)| number(stage.elapsed_s)),
            ],
        )
    })
}

#[cfg(test)]
mod tests {
    use ebb_vmm::api::{ParkStageEnd, ParkStageName};

    use super::*;

    #[test]
    fn stages_are_those_of_the_answer() {
        let stage = Stage::of(&ParkStage {
            stage: ParkStageName::Evict,
            end: ParkStageEnd::Stopped,
            reason: Some("refaults".to_owned()),
            returned_bytes: 3 << 20,
            elapsed_us: 1_500_000,
        });
        assert_eq!((stage.name.as_str(), stage.end.as_str()), ("evict", "stopped"));
        assert_eq!((stage.returned_mib, stage.elapsed_s), (Some(3.0), Some(1.5)));
        let bare = Stage { reason: None, returned_mib: None, elapsed_s: None, ..stage.clone() };
        let shown = table(&[(1, stage), (1, bare)]).unwrap();
        assert_eq!(shown.rows[0][3], "refaults".into());
        assert_eq!(shown.rows[1][3..], ["-".into(), "-".into(), "-".into()]);
        assert_eq!(table(&[]), None);
    }
}
