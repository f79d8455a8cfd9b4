//! A folder of results, and the Markdown page rendered from it.
//!
//! The folder has the documents of experiments, exactly as the laboratory wrote them: `NAME.json`,
//! and `NAME-WORD.json` for further runs of the same experiment.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use crate::LabError;
use crate::report::output::{Temporary, document};
use crate::report::results::Results;
use crate::report::table;

/// Columns of the page's prose.
const COLUMNS: usize = 100;

/// Reads a document.
///
/// # Errors
/// [`LabError::SystemFile`], and [`LabError::Document`] for a file that is not a document.
pub fn read(path: &Path) -> Result<Results, LabError> {
    let text = fs::read_to_string(path).map_err(LabError::of_file(path))?;
    serde_json::from_str(&text).map_err(|cause| LabError::Document { path: path.to_owned(), cause })
}

/// Reads all documents of a folder with their names, in the order of these.
///
/// # Errors
/// As [`read`].
pub fn read_all(folder: &Path) -> Result<Vec<(String, Results)>, LabError> {
    let entries = fs::read_dir(folder).map_err(LabError::of_file(folder))?;
    let mut paths: Vec<PathBuf> = entries
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "json"))
        .collect();
    paths.sort();
    let name = |path: &Path| path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    paths.iter().map(|path| Ok((name(path), read(path)?))).collect()
}

/// The document of an experiment in a folder.
pub fn path(folder: &Path, experiment: &str) -> PathBuf {
    folder.join(format!("{experiment}.json"))
}

/// Writes a document into a folder under the name of its experiment; returns its path.
///
/// # Errors
/// [`LabError::Output`].
pub fn write(folder: &Path, results: &Results) -> Result<PathBuf, LabError> {
    let path = path(folder, &results.experiment);
    let write = || {
        let mut file = Temporary::create(&path)?;
        file.write(&document(results)?)?;
        file.keep()
    };
    write().map_err(|cause| LabError::Output { directory: folder.to_owned(), cause })?;
    Ok(path)
}

/// All results, with their names, as one page of Markdown.
pub fn render(all: &[(String, Results)]) -> String {
    let mut text = "# Results\n\nMade from `docs/results` by `ebb-lab results docs/results`; \
                    [experiments.md](experiments.md) describes the experiments and metrics. Each \
                    table is one run on one machine: compare columns, not rows with those of other \
                    machines.\n"
        .to_owned();
    for (name, results) in all {
        let machine = &results.machine;
        // Writing to a String cannot fail.
        let _ = write!(
            text,
            "\n## {} ({})\n\n{}.\n\n{}, {}, {} CPUs, {} MiB, Linux {}; ebb {}\n\n{}",
            name,
            results.scale,
            results.summary,
            date(results.started_unix_s),
            machine.cpu,
            machine.cpus,
            machine.memory_mib,
            machine.kernel,
            results.ebb_version,
            table::markdown(results),
        );
    }
    wrapped(&text)
}

/// A table of some metrics of some series, for a page that shows only these.
pub fn excerpt(results: &Results, metrics: &[&str], series: &[&str]) -> String {
    let mut part = results.clone();
    part.metrics.retain(|metric| metrics.contains(&metric.name.as_str()));
    part.series.retain(|one| series.contains(&one.name.as_str()));
    table::metrics(&part)
}

/// Breaks lines of prose before a word that cannot start another block of Markdown. Rows of tables
/// stay whole, and list items are indented.
fn wrapped(text: &str) -> String {
    let mut page = String::new();
    for line in text.lines() {
        let indent = if line.starts_with("- ") { "  " } else { "" };
        let mut column = 0;
        for (index, word) in line.split(' ').enumerate() {
            let width = word.chars().count();
            let is_plain = word != "1."
                && word.starts_with(|first: char| first.is_alphanumeric() || "`([".contains(first));
            if index > 0 && is_plain && !line.starts_with('|') && column + 1 + width > COLUMNS {
                page.push('\n');
                page.push_str(indent);
                column = indent.len();
            } else if index > 0 {
                page.push(' ');
                column += 1;
            }
            page.push_str(word);
            column += width;
        }
        page.push('\n');
    }
    page
}

/// The day of a time, in UTC (H. Hinnant, "chrono-Compatible Low-Level Date Algorithms").
fn date(unix_s: u64) -> String {
    // Days since 1 March of the year 0: leap days come last.
    let days = unix_s / 86_400 + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    format!("{year}-{month:02}-{day:02}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::results::tests::example;

    #[test]
    fn days_are_those_of_the_calendar() {
        for (unix_s, day) in [
            (0, "1970-01-01"),
            (951_782_399, "2000-02-28"),
            (951_782_400, "2000-02-29"),
            (951_868_800, "2000-03-01"),
            (1_790_000_000, "2026-09-21"),
            (4_102_444_799, "2099-12-31"),
        ] {
            assert_eq!(date(unix_s), day);
        }
    }

    #[test]
    fn written_documents_are_read_in_the_order_of_names() {
        let folder = tempfile::tempdir().unwrap();
        let second = Results { experiment: "clock".to_owned(), ..example() };
        for results in [&example(), &second] {
            let path = write(folder.path(), results).unwrap();
            assert_eq!(&read(&path).unwrap(), results);
        }
        fs::write(folder.path().join("notes.txt"), "none").unwrap();
        let all = read_all(folder.path()).unwrap();
        assert_eq!(all, [("clock".to_owned(), second), ("density".to_owned(), example())]);
        fs::write(folder.path().join("broken.json"), "{").unwrap();
        let message = read_all(folder.path()).unwrap_err().to_string();
        assert!(message.contains("broken.json"), "{message}");
    }

    #[test]
    fn prose_is_wrapped_and_tables_and_lists_stay_valid() {
        let long = "word ".repeat(20);
        let text = format!("{long}- next\n\n| {long}|\n- item {long}end\n");
        let first = long.trim_end();
        let item = "word ".repeat(18);
        let expected =
            format!("{first} -\nnext\n\n| {long}|\n- item {}\n  word word end\n", item.trim_end());
        assert_eq!(wrapped(&text), expected);
    }

    #[test]
    fn the_page_has_each_experiment_with_its_machine_and_day() {
        let page = render(&[("density".to_owned(), example())]);
        assert!(page.contains("\n## density (demo)\n\nHow many guests fit.\n"), "{page}");
        assert!(page.contains("\n2026-09-21, A & B, 2 CPUs, 24000 MiB, Linux 6.1.0; ebb 0.1.0\n"));
        assert!(page.contains("\n- no-reporting: swap was used \\<by\\> guest 4\n"), "{page}");
    }
}
