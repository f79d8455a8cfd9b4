//! The experiments, one file or folder each, and their list.

use crate::LabError;
use crate::harness::experiment::Experiment;

pub mod boot;
pub mod churn;
pub mod clock;
pub mod clones;
pub mod density;
pub mod disk;
pub mod faults;
pub mod fleet;
pub mod fork;
pub mod free_pages;
pub mod inflate;
pub mod memhog;
pub mod merge_speed;
pub mod merge_survey;
pub mod migrate;
pub mod network;
pub mod numa_merge;
pub mod park;
pub mod pressure;
pub mod warm_start;

/// All experiments, in the order of the list.
pub static ALL: [&Experiment; 20] = [
    &density::DENSITY,
    &memhog::MEMHOG,
    &inflate::INFLATE,
    &free_pages::FREE_PAGES,
    &churn::CHURN,
    &park::PARK,
    &pressure::PRESSURE,
    &fleet::FLEET,
    &fork::FORK,
    &clones::CLONES,
    &warm_start::WARM_START,
    &migrate::MIGRATE,
    &faults::FAULTS,
    &clock::CLOCK,
    &merge_speed::MERGE_SPEED,
    &merge_survey::MERGE_SURVEY,
    &numa_merge::NUMA_MERGE,
    &network::NETWORK,
    &disk::DISK,
    &boot::BOOT,
];

/// The experiment of this name.
///
/// # Errors
/// [`LabError::UnknownExperiment`] with the available names.
pub fn find(name: &str) -> Result<&'static Experiment, LabError> {
    ALL.into_iter().find(|experiment| experiment.name == name).ok_or_else(|| {
        LabError::UnknownExperiment {
            name: name.to_owned(),
            known: ALL.map(|experiment| experiment.name).join(", "),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::experiment::SeriesPlan;
    use crate::report::results::Scale;
    use std::collections::BTreeSet;

    fn names(plans: &[SeriesPlan]) -> Vec<&str> {
        plans.iter().map(|plan| plan.name).collect()
    }

    #[test]
    fn experiments_are_found_by_name_and_unknown_names_are_refused_with_the_list() {
        assert_eq!(find("density").unwrap().name, "density");
        let message = find("densitiy").err().unwrap().to_string();
        assert_eq!(
            message,
            "unknown experiment 'densitiy'; available: density, memhog, inflate, free-pages, \
             churn, park, pressure, fleet, fork, clones, warm-start, migrate, faults, clock, \
             merge-speed, merge-survey, numa-merge, network, disk, boot"
        );
    }

    #[test]
    fn series_come_in_the_order_of_the_experiment() {
        let experiment = find("density").unwrap();
        let chosen = ["reporting", "no-reporting", "reporting"].map(str::to_owned);
        assert_eq!(
            names(&experiment.choose(Some(&chosen)).unwrap()),
            ["no-reporting", "reporting"]
        );
        let default = experiment.choose(None).unwrap();
        assert_eq!(names(&default), ["no-reporting", "reporting", "bitmap", "qemu-reporting"]);
    }

    #[test]
    fn unknown_and_missing_series_are_refused_with_the_list() {
        let experiment = find("memhog").unwrap();
        let unknown = experiment.choose(Some(&["fast".to_owned()])).unwrap_err().to_string();
        assert!(
            unknown.contains("'memhog' has no series 'fast'; available: no-reporting, reporting"),
            "{unknown}"
        );
        assert!(matches!(experiment.choose(Some(&[])), Err(LabError::NoSeries { .. })));
    }

    #[test]
    fn each_experiment_is_consistent() {
        for experiment in ALL {
            let plans = (experiment.series)();
            assert_eq!(names(&plans).into_iter().collect::<BTreeSet<_>>().len(), plans.len());
            let metrics = (experiment.metrics)();
            assert_eq!(
                metrics.iter().map(|info| &info.name).collect::<BTreeSet<_>>().len(),
                metrics.len()
            );
            for plan in &plans {
                let [demo, full] =
                    [Scale::Demo, Scale::Full].map(|scale| (experiment.host)(scale, plan.name));
                assert!(demo.memory_mib < full.memory_mib && demo.swap_mib < full.swap_mib);
            }
            assert!((experiment.guests)(Scale::Demo) > 0);
            let parameters = |scale| (experiment.parameters)(scale);
            let names = |scale| parameters(scale).into_keys().collect::<Vec<_>>();
            assert_eq!(names(Scale::Demo), names(Scale::Full));
            let host_mib = |scale| parameters(scale)["host_mib"];
            assert!(host_mib(Scale::Demo) < host_mib(Scale::Full));
        }
    }
}
