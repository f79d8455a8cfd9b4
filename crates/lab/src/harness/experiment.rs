//! What an experiment is, and which there are.

use std::collections::BTreeMap;

use crate::LabError;
use crate::experiments::{
    clock, density, faults, free_pages, inflate, memhog, merge_speed, migrate, numa_merge,
};
use crate::harness::monitor::Setup;
use crate::harness::testbed::Testbed;
use crate::report::event::Events;
use crate::report::results::{MetricInfo, Place, Scale, Series};

/// The host that an experiment is made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostShape {
    /// RAM in MiB.
    pub memory_mib: u64,
    /// Swap in MiB.
    pub swap_mib: u64,
    /// NUMA nodes, which share everything evenly.
    pub nodes: u32,
}

/// How large a run is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RunSize {
    /// The experiment's size.
    pub scale: Scale,
    /// The most guests that somebody wants in a series; `None` leaves it to the experiment.
    pub most_guests: Option<u32>,
}

impl RunSize {
    /// How many guests there may be when the experiment itself would start `planned`.
    pub fn guests(&self, planned: u32) -> u32 {
        self.most_guests.map_or(planned, |most| most.min(planned))
    }
}

/// When a series runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Runs {
    /// Always, unless others are asked for.
    ByDefault,
    /// Only when its name is given to `--series`.
    WhenNamed,
}

/// Whether the guests of an experiment need the real `memhog`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NeedsMemhog {
    /// It is put into their image where this machine has it.
    Yes,
    /// Their image stays small.
    No,
}

/// Whether an experiment sets up network links.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NeedsNetwork {
    /// The programs for that are put into the virtual host; without them it cannot run.
    Yes,
    /// It does not.
    No,
}

/// What an experiment needs of the kernel under the monitors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NeedsKernel {
    /// Any that has KVM.
    Any,
    /// One under which a monitor can merge its guest's pages: Linux 6.8. A virtual host gets the
    /// newest there is.
    Merging,
}

/// How the series about the machine of an experiment are run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Turns {
    /// One after another.
    OneByOne,
    /// All at once: they take turns, since the machine changes from minute to minute.
    InTurns,
}

/// What a series about the machine has at hand.
#[derive(Debug, Clone, Copy)]
pub struct OnMachine<'a> {
    /// The size of the run.
    pub size: RunSize,
    /// The machine: the one the run was started on, or the virtual host.
    pub place: Place,
    /// Where to tell what goes on.
    pub events: &'a Events,
}

/// What a series is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Subject {
    /// Guests that are run like this, on a host of the experiment's shape.
    Guests(Setup),
    /// The machine itself, or a calculation: no guest is started, and no host is needed for one.
    Machine,
}

/// How the series about guests of an experiment are run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Grouping {
    /// Each with guests of its own, on a host that is as if it were fresh.
    OneByOne,
    /// All in the same guests, which are run like this, since they are to be compared within a
    /// guest.
    Together(Setup),
}

/// One series that an experiment offers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SeriesPlan {
    /// Name for `--series` and for documents.
    pub name: &'static str,
    /// What it shows, in a few words.
    pub summary: &'static str,
    /// When it runs.
    pub runs: Runs,
    /// What it is about.
    pub subject: Subject,
}

/// An experiment: a host shape, series that do the same work on it, and measures.
pub trait Experiment: Sync {
    /// Name for the command line and documents.
    fn name(&self) -> &'static str;
    /// What it does and measures, in a sentence.
    fn summary(&self) -> &'static str;
    /// The host it needs: the largest one, if series differ in that.
    fn host(&self, scale: Scale) -> HostShape;
    /// The host that this series needs. Neighbours in the list of series with the same host share
    /// one.
    fn host_of(&self, scale: Scale, plan: &SeriesPlan) -> HostShape {
        let _ = plan;
        self.host(scale)
    }
    /// Its sizes by name with unit, for the document.
    fn parameters(&self, scale: Scale) -> BTreeMap<String, u64>;
    /// What it measures, in the order of a table.
    fn metrics(&self) -> Vec<MetricInfo>;
    /// The series it offers.
    fn series(&self) -> Vec<SeriesPlan>;
    /// Whether its guests need the real `memhog`.
    fn needs_memhog(&self) -> NeedsMemhog {
        NeedsMemhog::No
    }
    /// Whether it sets up network links.
    fn needs_network(&self) -> NeedsNetwork {
        NeedsNetwork::No
    }
    /// What it needs of the host's kernel.
    fn needs_kernel(&self) -> NeedsKernel {
        NeedsKernel::Any
    }
    /// Why its series about the machine cannot run on this one; then they run in the virtual host.
    fn machine_lacks(&self) -> Option<String> {
        None
    }
    /// How its series about the machine are run.
    fn turns(&self) -> Turns {
        Turns::OneByOne
    }
    /// How many guests a series may come to, for the progress bar.
    fn guests(&self, scale: Scale) -> u32;
    /// Runs one series about guests, and fills in its metrics, guests and notes as they become
    /// known.
    ///
    /// # Errors
    /// What ended the series early; what `series` holds by then is kept.
    fn run(&self, testbed: &mut Testbed<'_>, series: &mut Series) -> Result<(), LabError>;
    /// Whether the series about guests run one by one.
    fn grouping(&self) -> Grouping {
        Grouping::OneByOne
    }
    /// Runs all series at once if [`Self::grouping`] says so, like [`Self::run`].
    ///
    /// # Errors
    /// As [`Self::run`].
    fn run_together(
        &self,
        testbed: &mut Testbed<'_>,
        series: &mut [Series],
    ) -> Result<(), LabError> {
        series.iter_mut().try_for_each(|series| self.run(testbed, series))
    }
    /// Says of each series how it compares with the others, when all are over.
    fn compare(&self, series: &mut [Series]) {
        let _ = series;
    }
    /// Runs one series about the machine ([`Subject::Machine`]), which `series` has the name of,
    /// like [`Self::run`].
    ///
    /// # Errors
    /// As [`Self::run`]. Experiments that have no such series are never asked.
    fn run_on_machine(&self, machine: OnMachine<'_>, series: &mut Series) -> Result<(), LabError> {
        let _ = machine;
        Err(LabError::NoMachineSeries { experiment: self.name(), series: series.name.clone() })
    }
    /// Runs all chosen series about the machine at once if [`Self::turns`] says so; one that fails
    /// gets its error.
    fn run_in_turns(&self, machine: OnMachine<'_>, series: &mut [Series]) {
        for series in series {
            series.error =
                self.run_on_machine(machine, series).err().map(|error| error.to_string());
        }
    }
}

/// All experiments, in the order of `ebb-lab list`.
pub fn all() -> [&'static dyn Experiment; 9] {
    [
        &density::Density,
        &memhog::Memhog,
        &inflate::Inflate,
        &free_pages::FreePages,
        &migrate::Migrate,
        &faults::Faults,
        &clock::Clock,
        &merge_speed::MergeSpeed,
        &numa_merge::NumaMerge,
    ]
}

/// The experiment of this name.
///
/// # Errors
/// [`LabError::UnknownExperiment`] with the names there are.
pub fn find(name: &str) -> Result<&'static dyn Experiment, LabError> {
    all().into_iter().find(|experiment| experiment.name() == name).ok_or_else(|| {
        LabError::UnknownExperiment {
            name: name.to_owned(),
            known: all().map(Experiment::name).join(", "),
        }
    })
}

/// The series to run: those named, in the order of the experiment and each once, or the default
/// ones.
///
/// # Errors
/// [`LabError::UnknownSeries`] and [`LabError::NoSeries`] with the names there are.
pub fn choose(
    experiment: &dyn Experiment,
    names: Option<&[String]>,
) -> Result<Vec<SeriesPlan>, LabError> {
    let plans = experiment.series();
    let Some(names) = names else {
        return Ok(plans.into_iter().filter(|plan| plan.runs == Runs::ByDefault).collect());
    };
    let known = || plans.iter().map(|plan| plan.name).collect::<Vec<_>>().join(", ");
    if let Some(name) = names.iter().find(|name| plans.iter().all(|plan| plan.name != **name)) {
        return Err(LabError::UnknownSeries {
            experiment: experiment.name().to_owned(),
            name: name.clone(),
            known: known(),
        });
    }
    if names.is_empty() {
        return Err(LabError::NoSeries { known: known() });
    }
    Ok(plans.into_iter().filter(|plan| names.iter().any(|name| name == plan.name)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn names(plans: &[SeriesPlan]) -> Vec<&str> {
        plans.iter().map(|plan| plan.name).collect()
    }

    #[test]
    fn experiments_are_found_by_name_and_others_are_answered_with_the_list() {
        assert_eq!(find("density").unwrap().name(), "density");
        let message = find("densitiy").err().unwrap().to_string();
        assert_eq!(
            message,
            "unknown experiment 'densitiy'; there are: density, memhog, inflate, free-pages, migrate, faults, clock, \
             merge-speed, numa-merge"
        );
    }

    #[test]
    fn series_come_in_the_order_of_the_experiment() {
        let experiment = find("density").unwrap();
        let chosen = ["reporting", "no-reporting", "reporting"].map(str::to_owned);
        assert_eq!(
            names(&choose(experiment, Some(&chosen)).unwrap()),
            ["no-reporting", "reporting"]
        );
        let default = choose(experiment, None).unwrap();
        assert_eq!(names(&default), ["no-reporting", "reporting", "bitmap", "qemu-reporting"]);
    }

    #[test]
    fn unknown_and_missing_series_are_answered_with_the_list() {
        let experiment = find("memhog").unwrap();
        let unknown = choose(experiment, Some(&["fast".to_owned()])).unwrap_err().to_string();
        assert!(
            unknown.contains("'memhog' has no series 'fast'; there are: no-reporting, reporting"),
            "{unknown}"
        );
        assert!(matches!(choose(experiment, Some(&[])), Err(LabError::NoSeries { .. })));
    }

    #[test]
    fn each_experiment_is_consistent() {
        for experiment in all() {
            let plans = experiment.series();
            assert_eq!(
                plans.iter().map(|plan| plan.name).collect::<BTreeSet<_>>().len(),
                plans.len()
            );
            let metrics = experiment.metrics();
            assert_eq!(
                metrics.iter().map(|info| &info.name).collect::<BTreeSet<_>>().len(),
                metrics.len()
            );
            let (demo, full) = (experiment.host(Scale::Demo), experiment.host(Scale::Full));
            assert!(demo.memory_mib < full.memory_mib && demo.swap_mib < full.swap_mib);
            assert!(experiment.guests(Scale::Demo) > 0);
            assert_eq!(
                experiment.parameters(Scale::Demo).into_keys().collect::<Vec<_>>(),
                experiment.parameters(Scale::Full).into_keys().collect::<Vec<_>>()
            );
        }
    }
}
