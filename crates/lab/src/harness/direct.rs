//! Running the series of an experiment on the host, or the machine, that this process is on.

use crate::LabError;
use crate::harness::experiment::{
    Experiment, Grouping, OnMachine, RunSize, SeriesPlan, Subject, Turns,
};
use crate::harness::host::{self, Gauge, MemoryState};
use crate::harness::monitor::{Assets, Missing, Setup};
use crate::harness::testbed::Testbed;
use crate::report::event::{Event, Events};
use crate::report::results::{MemoryLimit, Place, Series};

/// Which series, and whether somebody asked for them by name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Selection {
    /// The series, in order.
    pub plans: Vec<SeriesPlan>,
    /// How they were chosen.
    pub chosen: Chosen,
}

/// How series were chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Chosen {
    /// The experiment's default: what cannot run here is left out.
    ByDefault,
    /// By their names: what cannot run here is an error.
    ByName,
}

impl Selection {
    /// The series about the machine itself, and those about guests.
    pub fn by_subject(self) -> (Vec<SeriesPlan>, Self) {
        let (machine, guests) =
            self.plans.into_iter().partition(|plan| plan.subject == Subject::Machine);
        (machine, Self { plans: guests, chosen: self.chosen })
    }

    /// Leaves out, or refuses, what needs something that is not here; the reasons for what is left
    /// out.
    ///
    /// # Errors
    /// [`LabError::Missing`] for a series that was asked for by its name, or when nothing is left.
    pub fn keep_possible(
        &mut self,
        missing: impl Fn(&Setup) -> Option<Missing>,
    ) -> Result<Vec<String>, LabError> {
        let mut left_out = Vec::new();
        let mut kept = Vec::new();
        let mut last = None;
        for plan in self.plans.drain(..) {
            let Subject::Guests(setup) = plan.subject else {
                kept.push(plan);
                continue;
            };
            match missing(&setup) {
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

/// Runs the series one after another and tells what happens.
///
/// All series share the host. Between them all guests are killed, swap is emptied, caches are
/// dropped and free memory is compacted, so that each finds the host as the first one did. A series
/// that fails is told with its error; the others run all the same.
///
/// # Errors
/// What concerns the host and so every series.
pub fn run(
    experiment: &dyn Experiment,
    size: RunSize,
    mut selection: Selection,
    place: Place,
    assets: &Assets,
    events: &Events,
) -> Result<(), LabError> {
    let shape = selection
        .plans
        .first()
        .map_or_else(|| experiment.host(size.scale), |plan| experiment.host_of(size.scale, plan));
    let gauge = Gauge::new(shape.memory_mib, shape.swap_mib)?;
    let host = host::describe(place, &gauge)?;
    let available_mib = MemoryState::read()?.available_kib / 1024;
    if gauge.limit() == MemoryLimit::Budget && available_mib < shape.memory_mib {
        return Err(LabError::TooLittleMemory {
            what: format!("{} at {} scale", experiment.name(), size.scale),
            needed_mib: shape.memory_mib,
            available_mib,
        });
    }
    let host_memory_mib = host.memory_mib;
    events.tell(Event::Host(host));
    for reason in selection.keep_possible(|setup| assets.missing(setup))? {
        events.step(0, reason);
    }
    events.step(0, "touches the host's memory once");
    host::warm_up(&gauge)?;
    let hosting = Hosting { experiment, size, assets, gauge, host_memory_mib, events };
    match experiment.grouping() {
        Grouping::OneByOne => selection.plans.iter().try_for_each(|plan| match plan.subject {
            Subject::Guests(setup) => hosting.run(setup, std::slice::from_ref(plan)),
            Subject::Machine => Ok(()),
        }),
        Grouping::Together(setup) => hosting.run(setup, &selection.plans),
    }
}

/// What all series of a run have in common.
struct Hosting<'a> {
    experiment: &'a dyn Experiment,
    size: RunSize,
    assets: &'a Assets,
    gauge: Gauge,
    host_memory_mib: u64,
    events: &'a Events,
}

impl Hosting<'_> {
    /// Runs these series in the same guests, with their error if they fail.
    fn run(&self, setup: Setup, plans: &[SeriesPlan]) -> Result<(), LabError> {
        host::reset(&self.gauge)?;
        let series = plans.iter().filter_map(|plan| match plan.subject {
            Subject::Guests(setup) => Some(Series::new(plan.name, setup.describe())),
            Subject::Machine => None,
        });
        let mut series: Vec<Series> = series.collect();
        let Some(first) = series.first() else { return Ok(()) };
        let names: Vec<&str> = series.iter().map(|series| series.name.as_str()).collect();
        self.events.tell(Event::SeriesBegins {
            series: names.join("+"),
            guests: self.size.guests(self.experiment.guests(self.size.scale)),
        });
        let mut testbed = Testbed::new(
            &first.name,
            self.size,
            setup,
            self.assets,
            self.gauge,
            self.host_memory_mib,
            self.events.clone(),
        );
        let outcome = match series.as_mut_slice() {
            [only] => self.experiment.run(&mut testbed, only),
            all => self.experiment.run_together(&mut testbed, all),
        };
        drop(testbed);
        for mut series in series {
            series.error = outcome.as_ref().err().map(ToString::to_string);
            self.events.tell(Event::SeriesEnds(series));
        }
        Ok(())
    }
}

/// Runs the series that are about the machine itself, one after another; others are left out. A
/// series that fails is told with its error; the others run all the same.
///
/// # Errors
/// What concerns the machine and so every series.
pub fn run_on_machine(
    experiment: &dyn Experiment,
    size: RunSize,
    plans: &[SeriesPlan],
    place: Place,
    events: &Events,
) -> Result<(), LabError> {
    let shape = experiment.host(size.scale);
    events
        .tell(Event::Host(host::describe(place, &Gauge::new(shape.memory_mib, shape.swap_mib)?)?));
    let plans: Vec<&SeriesPlan> =
        plans.iter().filter(|plan| plan.subject == Subject::Machine).collect();
    let together = match experiment.turns() {
        Turns::OneByOne => 1,
        Turns::InTurns => plans.len().max(1),
    };
    for plans in plans.chunks(together) {
        let names: Vec<&str> = plans.iter().map(|plan| plan.name).collect();
        events.tell(Event::SeriesBegins { series: names.join("+"), guests: 1 });
        let series = plans.iter().map(|plan| Series::new(plan.name, plan.summary.to_owned()));
        let mut series: Vec<Series> = series.collect();
        experiment.run_in_turns(OnMachine { size, place, events }, &mut series);
        for series in series {
            events.tell(Event::SeriesEnds(series));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::experiment;
    use crate::harness::monitor::Presence;

    fn selection(names: &[&str], chosen: Chosen) -> Selection {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let experiment = experiment::find("density").unwrap();
        Selection { plans: experiment::choose(experiment, Some(&names)).unwrap(), chosen }
    }

    fn bare() -> Assets {
        Assets {
            ebb: "ebb".into(),
            qemu: None,
            bzimage: "vmlinuz".into(),
            elf: None,
            initrd: "guest.cpio".into(),
            module: Presence::Absent,
        }
    }

    #[test]
    fn a_default_series_that_cannot_run_is_left_out_with_its_reason() {
        let mut chosen = selection(&["reporting", "qemu-reporting"], Chosen::ByDefault);
        let reasons = chosen.keep_possible(|setup| bare().missing(setup)).unwrap();
        assert_eq!(chosen.plans.len(), 1);
        assert!(
            reasons[0].contains("qemu-reporting") && reasons[0].contains("apt-get install"),
            "{reasons:?}"
        );
    }

    #[test]
    fn a_series_asked_for_by_name_is_refused_with_its_reason() {
        let mut chosen = selection(&["vmlinux-pvh"], Chosen::ByName);
        assert!(matches!(
            chosen.keep_possible(|setup| bare().missing(setup)),
            Err(LabError::Missing(_))
        ));
    }

    #[test]
    fn series_about_the_machine_need_no_files_of_guests() {
        let experiment = experiment::find("clock").unwrap();
        let plans = experiment::choose(experiment, Some(&["raw".to_owned()])).unwrap();
        let mut chosen = Selection { plans, chosen: Chosen::ByName };
        assert!(chosen.keep_possible(|setup| bare().missing(setup)).unwrap().is_empty());
        let (machine, guests) = chosen.by_subject();
        assert_eq!((machine.len(), guests.plans.len()), (1, 0));
        let (machine, guests) =
            selection(&["reporting", "no-reporting"], Chosen::ByName).by_subject();
        assert_eq!((machine.len(), guests.plans.len()), (0, 2));
    }

    #[test]
    fn nothing_left_is_an_error() {
        let mut chosen = selection(&["qemu-reporting"], Chosen::ByDefault);
        assert!(chosen.keep_possible(|setup| bare().missing(setup)).is_err());
    }
}
