//! Running every experiment of a list, one after another, into a folder of results.

use std::fs;
use std::path::Path;

use crate::LabError;
use crate::harness::direct::{Chosen, Selection};
use crate::harness::experiment::Experiment;
use crate::harness::run::{self, Request};
use crate::harness::size::RunSize;
use crate::harness::target::Wanted;
use crate::report::collection;
use crate::report::progress::Progress;

/// Outcome of an experiment of the list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ending {
    /// All of its series succeeded.
    Done,
    /// It, or a series of it, failed. The results so far are in the folder.
    Failed(String),
    /// This machine cannot run it, with the reason.
    Skipped(String),
}

impl Ending {
    /// Describes the outcome.
    pub fn describe(&self) -> String {
        match self {
            Self::Done => "done".to_owned(),
            Self::Failed(reason) => format!("FAILED: {reason}"),
            Self::Skipped(reason) => format!("skipped: {reason}"),
        }
    }
}

/// Runs the default series of experiments, each of which writes `NAME.json` to the folder. One that
/// fails does not stop the others.
///
/// # Errors
/// [`LabError::SystemFile`] without a folder.
pub fn run(
    experiments: &[&'static Experiment],
    size: RunSize,
    place: Wanted,
    folder: &Path,
    progress: &mut Progress,
) -> Result<Vec<(&'static str, Ending)>, LabError> {
    fs::create_dir_all(folder).map_err(LabError::of_file(folder))?;
    let mut endings = Vec::new();
    for (experiment, number) in experiments.iter().zip(1..) {
        let name = experiment.name;
        progress.say(&format!("experiment {number} of {}: {name}", experiments.len()));
        let ending = match one(experiment, size, place, folder, progress) {
            Ok(None) => Ending::Done,
            Ok(Some(failure)) => Ending::Failed(failure),
            Err(error) => {
                let mut reason = error.to_string();
                if collection::path(folder, name).exists() {
                    reason.push_str("; the folder still has its document of an earlier run");
                }
                if error.is_lack() { Ending::Skipped(reason) } else { Ending::Failed(reason) }
            }
        };
        progress.say(&format!("{name}: {}", ending.describe()));
        endings.push((name, ending));
    }
    Ok(endings)
}

/// Runs one experiment; the first error of its series.
fn one(
    experiment: &'static Experiment,
    size: RunSize,
    place: Wanted,
    folder: &Path,
    progress: &mut Progress,
) -> Result<Option<String>, LabError> {
    let selection = Selection { plans: experiment.choose(None)?, chosen: Chosen::ByDefault };
    let results = run::run(&Request { experiment, size, selection, place }, progress)?;
    collection::write(folder, &results)?;
    Ok(results.first_error().map(|(series, error)| format!("series {series}: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::experiment::{Run, SeriesPlan};
    use crate::report::results::Scale;

    fn machine(name: &'static str, run: Run) -> Vec<SeriesPlan> {
        vec![SeriesPlan::new(name, "for a test", run)]
    }

    static WELL: Experiment = Experiment {
        name: "well",
        series: || machine("well", Run::Machine(|_, _| Ok(()))),
        ..Experiment::DEFAULT
    };
    static BADLY: Experiment = Experiment {
        name: "badly",
        series: || machine("badly", Run::Machine(|_, _| Err(LabError::Slew("no".to_owned())))),
        ..Experiment::DEFAULT
    };
    static NOT_HERE: Experiment = Experiment {
        name: "not-here",
        series: || machine("elsewhere", Run::Machine(|_, _| Ok(()))),
        machine_lacks: || Some("it is another one".to_owned()),
        ..Experiment::DEFAULT
    };

    #[test]
    fn an_experiment_that_fails_or_cannot_run_does_not_stop_the_others() {
        let folder = tempfile::tempdir().unwrap();
        let size = RunSize { scale: Scale::Demo, guests: None };
        let all = [&BADLY, &NOT_HERE, &WELL];
        let endings =
            run(&all, size, Wanted::Direct, folder.path(), &mut Progress::Silent).unwrap();
        assert!(matches!(&endings[0].1, Ending::Failed(why) if why.contains("series badly")));
        assert!(matches!(&endings[1].1, Ending::Skipped(why) if why.contains("another one")));
        assert_eq!(endings[2], ("well", Ending::Done));
        let written = collection::read_all(folder.path()).unwrap();
        let names: Vec<&str> = written.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["badly", "well"]);
        assert!(written[0].1.first_error().is_some());
    }
}
