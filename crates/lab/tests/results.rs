//! Committed pages with results are rendered from the committed documents.
//!
//! `UPDATE=1 cargo test -p ebb-lab --test results` rewrites them.

#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::{env, fs};

use ebb_lab::experiments;
use ebb_lab::report::collection;
use ebb_lab::report::results::Results;

/// A table of some results on a page, after a line that names their document, up to the next empty
/// line.
struct Excerpt {
    page: &'static str,
    document: &'static str,
    metrics: &'static [&'static str],
    series: &'static [&'static str],
}

const EXCERPTS: [Excerpt; 6] = [
    Excerpt {
        page: "README.md",
        document: "density",
        metrics: &["guests_without_swap", "swap_used_mib", "idle_guest_rss_mib", "return_90_s"],
        series: &["no-reporting", "reporting"],
    },
    Excerpt {
        page: "docs/merging.md",
        document: "density-merge",
        metrics: &["host_per_guest_mib", "merge_cpu_s", "program_s", "start_to_init_s"],
        series: &["reporting", "merge", "merge-kernel"],
    },
    Excerpt {
        page: "docs/merging.md",
        document: "density-alone",
        metrics: &["host_per_guest_mib", "merge_cpu_s", "program_s", "start_to_init_s"],
        series: &["reporting", "merge-alone", "packed-alone"],
    },
    Excerpt {
        page: "docs/merging.md",
        document: "density-packed",
        metrics: &[
            "guests_without_swap",
            "swap_used_mib",
            "host_per_guest_mib",
            "idle_guest_rss_mib",
            "idle_guest_pss_mib",
            "return_90_s",
            "merge_cpu_s",
        ],
        series: &["packed", "packed-bzimage"],
    },
    Excerpt {
        page: "docs/merging.md",
        document: "density-packed-100",
        metrics: &[
            "guests_without_swap",
            "swap_used_mib",
            "host_per_guest_mib",
            "return_90_s",
            "start_to_init_s",
            "program_s",
            "merge_cpu_s",
        ],
        series: &["packed"],
    },
    Excerpt {
        page: "docs/merging.md",
        document: "merge-speed-full",
        metrics: &[
            "runs_freed_per_cpu_s",
            "runs_freed_percent",
            "runs_huge_percent",
            "clones_freed_per_cpu_s",
            "clones_freed_percent",
            "scattered_freed_percent",
            "scattered_huge_percent",
            "small_freed_per_cpu_s",
            "small_freed_percent",
            "unique_steady_pages_per_cpu_s",
        ],
        series: &["owner", "owner-mappings", "ksmd"],
    },
];

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
fn the_tables_of_pages_are_rendered_from_documents() {
    let all = documents();
    for Excerpt { page, document, metrics, series } in EXCERPTS {
        let (_, results) = all.iter().find(|(name, _)| name == document).unwrap();
        let table = collection::excerpt(results, metrics, series);
        let mark = format!("<!-- from docs/results/{document}.json -->\n");
        let path = root().join(page);
        let text = fs::read_to_string(&path).unwrap();
        let (before, rest) = text.split_once(&mark).unwrap();
        let (_, after) = rest.split_once("\n\n").unwrap();
        check(&path, &format!("{before}{mark}{table}\n{after}"));
    }
}
