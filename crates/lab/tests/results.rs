//! Committed pages with results are rendered from the committed documents.
//!
//! `UPDATE=1 cargo test -p ebb-lab --test results` rewrites them.

#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::{env, fs};

use ebb_lab::experiments;
use ebb_lab::report::collection;
use ebb_lab::report::results::Results;

/// Line of README.md before its table, which ends with the next empty line.
const README_MARK: &str = "<!-- from docs/results/density.json -->\n";
/// Metrics and series of the table in README.md.
const README_METRICS: [&str; 4] =
    ["guests_without_swap", "swap_used_mib", "idle_guest_rss_mib", "return_90_s"];
const README_SERIES: [&str; 2] = ["no-reporting", "reporting"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn documents() -> Vec<(String, Results)> {
    collection::read_all(&root().join("docs/results")).unwrap()
}

/// Checks, or with `UPDATE` rewrites, a file.
fn check(path: &Path, rendered: &str) {
    if env::var_os("UPDATE").is_some() {
        fs::write(path, rendered).unwrap();
    }
    let committed = fs::read_to_string(path).unwrap_or_default();
    assert!(
        committed == rendered,
        "{} is out of date; rewrite it with UPDATE=1 cargo test -p ebb-lab --test results",
        path.display()
    );
}

#[test]
fn the_page_is_rendered_from_the_documents() {
    let all = documents();
    for (name, results) in &all {
        let experiment = &results.experiment;
        let further = name.strip_prefix(experiment.as_str()).map(|rest| rest.starts_with('-'));
        assert!(
            name == experiment || further == Some(true),
            "{name}.json is not named after its experiment {experiment}"
        );
    }
    check(&root().join("docs/results.md"), &collection::render(&all));
}

#[test]
fn every_experiment_has_a_document() {
    let all = documents();
    for experiment in experiments::ALL {
        assert!(all.iter().any(|(name, _)| name == experiment.name), "{}", experiment.name);
    }
}

#[test]
fn the_table_of_the_readme_is_rendered_from_a_document() {
    let all = documents();
    let (_, density) = all.iter().find(|(name, _)| name == "density").unwrap();
    let table = collection::excerpt(density, &README_METRICS, &README_SERIES);
    let path = root().join("README.md");
    let text = fs::read_to_string(&path).unwrap();
    let (before, rest) = text.split_once(README_MARK).unwrap();
    let (_, after) = rest.split_once("\n\n").unwrap();
    check(&path, &format!("{before}{README_MARK}{table}\n{after}"));
}
