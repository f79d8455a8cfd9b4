//! Definition of an experiment: data, and functions that run its series.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::Serialize;

use crate::LabError;
use crate::harness::monitor::Setup;
use crate::harness::size::{HostShape, RunSize};
use crate::harness::testbed::Testbed;
use crate::report::event::Events;
use crate::report::results::{MetricInfo, Place, Scale, Series};

/// An experiment: series that do the same work on a host of one shape, and their metrics.
#[derive(Debug)]
pub struct Experiment {
    /// Name for the command line and documents.
    pub name: &'static str,
    /// Summary in a sentence.
    pub summary: &'static str,
    /// The host that the series of this name needs. Neighbours in the list of series with the same
    /// host share one.
    pub host: fn(Scale, &str) -> HostShape,
    /// Its sizes by name with unit, for the document.
    pub parameters: fn(Scale) -> Parameters,
    /// Maximum number of guests of a series, for the progress bar.
    pub guests: fn(Scale) -> u32,
    /// Requirements in addition to KVM.
    pub needs: Needs,
    /// Why its series about the machine cannot run on this one; then they run in the virtual host.
    pub machine_lacks: fn() -> Option<String>,
    /// Its metrics, in the order of a table.
    pub metrics: fn() -> Vec<MetricInfo>,
    /// Its series.
    pub series: fn() -> Vec<SeriesPlan>,
    /// Compares each series with the others, when all have ended.
    pub compare: fn(&mut [Series]),
}

impl Experiment {
    /// Defaults of most experiments: one guest in a series, and no special requirements.
    pub const DEFAULT: Self = Self {
        name: "",
        summary: "",
        host: |_, _| HostShape { memory_mib: 0, swap_mib: 0, nodes: 1 },
        parameters: |_| Parameters::new(),
        guests: |_| 1,
        needs: Needs::NONE,
        machine_lacks: || None,
        metrics: Vec::new,
        series: Vec::new,
        compare: |_| {},
    };

    /// The series to run: those named, in the order of the experiment and each once, or the default
    /// ones.
    ///
    /// # Errors
    /// [`LabError::UnknownSeries`] and [`LabError::NoSeries`] with the available names.
    pub fn choose(&self, names: Option<&[String]>) -> Result<Vec<SeriesPlan>, LabError> {
        let plans = (self.series)();
        let Some(names) = names else {
            return Ok(plans.into_iter().filter(|plan| plan.runs == Runs::ByDefault).collect());
        };
        let known = || plans.iter().map(|plan| plan.name).collect::<Vec<_>>().join(", ");
        if let Some(name) = names.iter().find(|name| plans.iter().all(|plan| plan.name != **name)) {
            return Err(LabError::UnknownSeries {
                experiment: self.name.to_owned(),
                name: name.clone(),
                known: known(),
            });
        }
        if names.is_empty() {
            return Err(LabError::NoSeries { known: known() });
        }
        Ok(plans.into_iter().filter(|plan| names.iter().any(|name| name == plan.name)).collect())
    }
}

/// Sizes by name with unit.
pub type Parameters = BTreeMap<String, u64>;

/// The numbers of a structure, by the names of its fields.
pub fn parameters(sizes: &impl Serialize) -> Parameters {
    let numbers = |value: serde_json::Value| {
        let serde_json::Value::Object(fields) = value else { return Parameters::new() };
        fields.into_iter().filter_map(|(name, value)| Some((name, value.as_u64()?))).collect()
    };
    serde_json::to_value(sizes).map(numbers).unwrap_or_default()
}

/// An experiment's requirements in addition to KVM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Needs {
    /// The real `memhog` in the guests' image, where this machine has it.
    pub memhog: bool,
    /// Whether it needs the programs that set up network links.
    pub network: bool,
    /// A kernel under the monitors with which they can merge their guests' pages: Linux 6.8. A
    /// virtual host gets the newest available one.
    pub merging: bool,
    /// Whether it needs the host daemon `ebbd`.
    pub daemon: bool,
    /// Programs in the host, with their packages.
    pub programs: &'static [Needed],
    /// Modules that the host has loaded, with their parameters after a space.
    pub modules: &'static [&'static str],
    /// Programs in the guests' image.
    pub guest_programs: &'static [Needed],
    /// Modules that the guests load after the standard ones.
    pub guest_modules: &'static [&'static str],
}

impl Needs {
    /// None.
    pub const NONE: Self = Self {
        memhog: false,
        network: false,
        merging: false,
        daemon: false,
        programs: &[],
        modules: &[],
        guest_programs: &[],
        guest_modules: &[],
    };
}

/// A program that an experiment needs: its path, and the package that has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Needed {
    /// Its path.
    pub path: &'static str,
    /// What installs it.
    pub remedy: &'static str,
}

impl Needed {
    /// The paths of programs.
    ///
    /// # Errors
    /// [`LabError::MissingFile`] for the first one that this machine does not have.
    pub fn paths(all: &[Self]) -> Result<Vec<PathBuf>, LabError> {
        let path = |needed: &Self| {
            let (path, remedy) = (PathBuf::from(needed.path), needed.remedy);
            let what = "a program that the experiment runs";
            if path.is_file() {
                Ok(path)
            } else {
                Err(LabError::MissingFile { what, path, remedy })
            }
        };
        all.iter().map(path).collect()
    }
}

/// When a series runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Runs {
    /// By default, unless others are named.
    ByDefault,
    /// Only when its name is given to `--series`.
    WhenNamed,
}

/// Environment of a series about the machine.
#[derive(Debug, Clone, Copy)]
pub struct OnMachine<'a> {
    /// The size of the run.
    pub size: RunSize,
    /// The machine: the one the run was started on, or the virtual host.
    pub place: Place,
    /// Receiver of the events.
    pub events: &'a Events,
}

/// How a series is run. Results that a function has added to its series are kept if it fails.
#[derive(Debug, Clone, Copy)]
pub enum Run {
    /// With its own guests, run with this setup on a reset host.
    Guests(Setup, fn(&mut Testbed<'_>, &mut Series) -> Result<(), LabError>),
    /// In the same guests as all others of this kind, to be compared within a guest.
    SameGuests(Setup, fn(&mut Testbed<'_>, &mut [Series]) -> Result<(), LabError>),
    /// On the machine itself, or as a calculation: without guests of the lab.
    Machine(fn(OnMachine<'_>, &mut Series) -> Result<(), LabError>),
    /// The same, in turns with all others of this kind, because a machine's speed varies over time;
    /// a series that fails gets its error.
    MachineInTurns(fn(OnMachine<'_>, &mut [Series])),
    /// With guests in an emulator on this machine, even if other guests run in the virtual host,
    /// and together with all others of this kind; a series that fails gets its error.
    Emulated(fn(OnMachine<'_>, &mut [Series])),
}

/// One series that an experiment offers.
#[derive(Debug, Clone, Copy)]
pub struct SeriesPlan {
    /// Name for `--series` and for documents.
    pub name: &'static str,
    /// Short summary.
    pub summary: &'static str,
    /// When it runs.
    pub runs: Runs,
    /// How it is run.
    pub run: Run,
}

impl SeriesPlan {
    /// A series that is run by default.
    pub fn new(name: &'static str, summary: &'static str, run: Run) -> Self {
        Self { name, summary, runs: Runs::ByDefault, run }
    }

    /// The same, run only when it is named.
    #[must_use]
    pub fn when_named(self) -> Self {
        Self { runs: Runs::WhenNamed, ..self }
    }

    /// How its guests are run; `None` for a series without guests on KVM.
    pub fn setup(&self) -> Option<&Setup> {
        match &self.run {
            Run::Guests(setup, _) | Run::SameGuests(setup, _) => Some(setup),
            Run::Machine(_) | Run::MachineInTurns(_) | Run::Emulated(_) => None,
        }
    }

    /// Whether its guests run in an emulator.
    pub fn is_emulated(&self) -> bool {
        matches!(self.run, Run::Emulated(_))
    }

    /// Whether it runs together with this one.
    pub(crate) fn runs_with(&self, other: &Self) -> bool {
        matches!(
            (&self.run, &other.run),
            (Run::SameGuests(..), Run::SameGuests(..))
                | (Run::MachineInTurns(_), Run::MachineInTurns(_))
                | (Run::Emulated(_), Run::Emulated(_))
        )
    }
}
