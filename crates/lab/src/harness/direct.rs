//! Running the series of an experiment on the host, or the machine, of this process.

use crate::LabError;
use crate::error::Missing;
use crate::harness::disk_image::WorkDiskSource;
use crate::harness::experiment::{Experiment, OnMachine, Run, SeriesPlan};
use crate::harness::host::{self, Gauge, MemoryState};
use crate::harness::monitor::{Assets, Setup};
use crate::harness::size::RunSize;
use crate::harness::testbed::Testbed;
use crate::report::event::{Event, Events};
use crate::report::results::{MemoryLimit, Place, Series};

/// The series to run, and how they were chosen.
#[derive(Debug, Clone)]
pub struct Selection {
    /// The series, in order.
    pub plans: Vec<SeriesPlan>,
    /// How they were chosen.
    pub chosen: Chosen,
}

/// How series were chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Chosen {
    /// The experiment's default: series that cannot run here are left out.
    ByDefault,
    /// By their names: a series that cannot run here is an error.
    ByName,
}

impl Selection {
    /// The series about the machine itself, and those about guests.
    pub fn by_subject(self) -> (Vec<SeriesPlan>, Self) {
        self.partition(|plan| plan.setup().is_none())
    }

    /// The series in an emulator, and all others.
    pub fn by_emulation(self) -> (Vec<SeriesPlan>, Self) {
        self.partition(SeriesPlan::is_emulated)
    }

    fn partition(self, first: impl Fn(&SeriesPlan) -> bool) -> (Vec<SeriesPlan>, Self) {
        let (first, rest) = self.plans.into_iter().partition(first);
        (first, Self { plans: rest, chosen: self.chosen })
    }

    /// Leaves out, or refuses, series whose requirements are not met here; returns the reasons for
    /// those left out.
    ///
    /// # Errors
    /// [`LabError::Missing`] for a series that was requested by its name, or when none is left.
    pub fn keep_possible(
        &mut self,
        missing: impl Fn(&SeriesPlan) -> Option<Missing>,
    ) -> Result<Vec<String>, LabError> {
        let mut left_out = Vec::new();
        let mut kept = Vec::new();
        let mut last = None;
        for plan in self.plans.drain(..) {
            match missing(&plan) {
                None => kept.push(plan),
                Some(missing) if self.chosen == Chosen::ByName => return Err(missing.into()),
                Some(missing) => {
                    left_out.push(format!("series {} is left out: {missing}", plan.name));
                    last = Some(missing);
                }
            }
        }
        self.plans = kept;
        match last {
            Some(missing) if self.plans.is_empty() => Err(missing.into()),
            _ => Ok(left_out),
        }
    }
}

/// Runs the series with guests one after another and reports the events.
///
/// All series share the host. Between them all guests are killed, swap is emptied, caches are
/// dropped and free memory is compacted, so that the host is the same for each. A series that fails
/// is reported with its error; the others still run.
///
/// # Errors
/// Errors of the host, which affect every series.
pub fn run_guests(
    experiment: &Experiment,
    size: RunSize,
    mut selection: Selection,
    place: Place,
    assets: &Assets,
    events: &Events,
) -> Result<(), LabError> {
    let Some(first) = selection.plans.first() else { return Ok(()) };
    let shape = (experiment.host)(size.scale, first.name);
    let gauge = Gauge::new(shape.memory_mib, shape.swap_mib)?;
    let host = host::describe(place, &gauge)?;
    let available_mib = MemoryState::read()?.available_kib / 1024;
    if gauge.limit() == MemoryLimit::Budget && available_mib < shape.memory_mib {
        return Err(LabError::TooLittleMemory {
            what: format!("{} at {} scale", experiment.name, size.scale),
            needed_mib: shape.memory_mib,
            available_mib,
        });
    }
    let host_memory_mib = host.memory_mib;
    events.send(Event::Host(host));
    for reason in selection.keep_possible(|plan| assets.missing(plan.setup()?))? {
        events.step(0, reason);
    }
    events.step(0, "touches the host's memory once");
    host::warm_up(&gauge)?;
    let guests = size.guests((experiment.guests)(size.scale));
    let mut disks = WorkDiskSource::new(&assets.work_disks);
    for group in selection.plans.chunk_by(SeriesPlan::runs_with) {
        let [SeriesPlan { name, run, .. }, ..] = group else { continue };
        host::reset(&gauge)?;
        let work_disk = group[0].setup().and_then(|setup| disks.of_next(setup));
        in_series(group, guests, events, |all| {
            let testbed = |setup: &Setup| {
                let events = events.clone();
                Testbed::new(name, size, *setup, assets, gauge, host_memory_mib, events)
                    .with_work_disk(work_disk)
            };
            let outcome = match run {
                Run::Guests(setup, run) => {
                    all.iter_mut().try_for_each(|series| run(&mut testbed(setup), series))
                }
                Run::SameGuests(setup, run) => run(&mut testbed(setup), all),
                Run::Machine(_) | Run::MachineInTurns(_) | Run::Emulated(_) => Ok(()),
            };
            for series in all {
                series.error = outcome.as_ref().err().map(ToString::to_string);
            }
        });
    }
    Ok(())
}

/// Runs the series that are about the machine itself; others are left out. A series that fails is
/// reported with its error; the others still run.
///
/// # Errors
/// Errors of the machine, which affect every series.
pub fn run_on_machine(
    experiment: &Experiment,
    size: RunSize,
    plans: &[SeriesPlan],
    place: Place,
    events: &Events,
) -> Result<(), LabError> {
    let Some(first) = plans.first() else { return Ok(()) };
    let shape = (experiment.host)(size.scale, first.name);
    let gauge = Gauge::new(shape.memory_mib, shape.swap_mib)?;
    events.send(Event::Host(host::describe(place, &gauge)?));
    let machine = OnMachine { size, place, events };
    for group in plans.chunk_by(SeriesPlan::runs_with) {
        in_series(group, 1, events, |all| match group.first().map(|plan| &plan.run) {
            Some(Run::MachineInTurns(run) | Run::Emulated(run)) => run(machine, all),
            Some(Run::Machine(run)) => {
                for series in all {
                    series.error = run(machine, series).err().map(|error| error.to_string());
                }
            }
            _ => {}
        });
    }
    Ok(())
}

/// Reports the begin and the end of series that run together.
fn in_series(plans: &[SeriesPlan], guests: u32, events: &Events, run: impl FnOnce(&mut [Series])) {
    let names: Vec<&str> = plans.iter().map(|plan| plan.name).collect();
    events.send(Event::SeriesBegins { series: names.join("+"), guests });
    let describe =
        |plan: &SeriesPlan| plan.setup().map_or_else(|| plan.summary.to_owned(), Setup::describe);
    let mut all: Vec<Series> =
        plans.iter().map(|plan| Series::new(plan.name, describe(plan))).collect();
    run(&mut all);
    for series in all {
        events.send(Event::SeriesEnds(series));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiments;
    use crate::harness::monitor::{Presence, WorkDisks};

    fn selection(names: &[&str], chosen: Chosen) -> Selection {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let experiment = experiments::find("density").unwrap();
        Selection { plans: experiment.choose(Some(&names)).unwrap(), chosen }
    }

    fn bare() -> Assets {
        Assets {
            ebb: "ebb".into(),
            qemu: None,
            bzimage: "vmlinuz".into(),
            elf: None,
            initrd: "guest.cpio".into(),
            module: Presence::Absent,
            debian: None,
            work_disks: WorkDisks::None,
        }
    }

    #[test]
    fn a_default_series_that_cannot_run_is_left_out_with_its_reason() {
        let mut chosen = selection(&["reporting", "qemu-reporting"], Chosen::ByDefault);
        let reasons = chosen.keep_possible(|plan| bare().missing(plan.setup()?)).unwrap();
        assert_eq!(chosen.plans.len(), 1);
        assert!(
            reasons[0].contains("qemu-reporting") && reasons[0].contains("apt-get install"),
            "{reasons:?}"
        );
    }

    #[test]
    fn a_series_requested_by_name_is_refused_with_its_reason() {
        let mut chosen = selection(&["vmlinux-pvh"], Chosen::ByName);
        assert!(matches!(
            chosen.keep_possible(|plan| bare().missing(plan.setup()?)),
            Err(LabError::Missing(_))
        ));
    }

    #[test]
    fn series_about_the_machine_need_no_files_of_guests() {
        let experiment = experiments::find("clock").unwrap();
        let plans = experiment.choose(Some(&["raw".to_owned()])).unwrap();
        let mut chosen = Selection { plans, chosen: Chosen::ByName };
        assert!(chosen.keep_possible(|plan| bare().missing(plan.setup()?)).unwrap().is_empty());
        let (machine, guests) = chosen.by_subject();
        assert_eq!((machine.len(), guests.plans.len()), (1, 0));
        let (machine, guests) =
            selection(&["reporting", "no-reporting"], Chosen::ByName).by_subject();
        assert_eq!((machine.len(), guests.plans.len()), (0, 2));
    }

    #[test]
    fn series_in_an_emulator_are_apart_from_those_of_a_virtual_host() {
        let experiment = experiments::find("faults").unwrap();
        let names = ["none", "counted-none"].map(str::to_owned);
        let plans = experiment.choose(Some(&names)).unwrap();
        let (emulated, rest) = Selection { plans, chosen: Chosen::ByName }.by_emulation();
        assert_eq!((emulated[0].name, rest.plans[0].name), ("counted-none", "none"));
        assert_eq!((emulated.len(), rest.plans.len()), (1, 1));
    }

    #[test]
    fn an_empty_selection_is_an_error() {
        let mut chosen = selection(&["qemu-reporting"], Chosen::ByDefault);
        assert!(chosen.keep_possible(|plan| bare().missing(plan.setup()?)).is_err());
    }
}
