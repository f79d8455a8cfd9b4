//! Requests that are about same-page merging.

use super::{Fields, Operation, Parameters};
use crate::api::http::Request;
use crate::api::merge::{
    MAX_MERGE_CLEAN_PASSES, MAX_MERGE_PAGE_SHARING, MAX_MERGE_PAGES_PER_SECOND,
    MAX_MERGE_PASS_MILLISECS, MAX_MERGE_SCAN_SECONDS, MergeChange, MergeRun,
};
use crate::api::reply::{Problem, Status};

/// All fields of a change.
pub(super) const MERGE_FIELDS: [&str; 10] = [
    "run",
    "merge_across_nodes",
    "max_page_sharing",
    "use_zero_pages",
    "smart_scan",
    "pages_per_second",
    "cpu_percent",
    "target_scan_seconds",
    "min_pass_millisecs",
    "clean_passes",
];

pub(super) fn set_merge(request: &Request<'_>) -> Result<Operation, Problem> {
    Parameters::of_query(request, &[])?;
    let fields = Fields::of_body(request, &MERGE_FIELDS)?;
    let change = MergeChange {
        run: fields.optional_word("run", &MergeRun::ALL, MergeRun::name)?,
        merge_across_nodes: fields.optional_switch("merge_across_nodes")?,
        max_page_sharing: fields.optional_integer(
            "max_page_sharing",
            "pages",
            2..=MAX_MERGE_PAGE_SHARING,
        )?,
        use_zero_pages: fields.optional_switch("use_zero_pages")?,
        smart_scan: fields.optional_switch("smart_scan")?,
        pages_per_second: fields.optional_integer(
            "pages_per_second",
            "pages",
            1..=MAX_MERGE_PAGES_PER_SECOND,
        )?,
        cpu_percent: fields.optional_integer("cpu_percent", "percent", 1..=100)?,
        target_scan_seconds: fields.optional_integer(
            "target_scan_seconds",
            "seconds",
            1..=MAX_MERGE_SCAN_SECONDS,
        )?,
        min_pass_millisecs: fields.optional_integer(
            "min_pass_millisecs",
            "milliseconds",
            0..=MAX_MERGE_PASS_MILLISECS,
        )?,
        clean_passes: fields.optional_integer(
            "clean_passes",
            "scans",
            1..=MAX_MERGE_CLEAN_PASSES,
        )?,
    };
    if change.is_empty() {
        let message = "the object says nothing that could be changed";
        return Err(Problem::new(Status::UnprocessableContent, message)
            .with_remedy(format!("send some of {}", MERGE_FIELDS.join(", "))));
    }
    if change.pages_per_second.is_some() && change.target_scan_seconds.is_some() {
        let message = "'pages_per_second' is a fixed pace, and 'target_scan_seconds' lets the pace follow from how much there is to scan";
        return Err(Problem::new(Status::UnprocessableContent, message)
            .with_field("pages_per_second")
            .with_remedy("send one of both"));
    }
    Ok(Operation::SetMerge(Box::new(change)))
}
