//! The guest's answers about its free pages, as tables.

use ebb_vmm::api::{FreePagesReport, ReclaimReport, RequestStatus};

use super::{Row, bytes, duration, row};

fn status(status: RequestStatus) -> &'static str {
    match status {
        RequestStatus::Done => "done",
        RequestStatus::Aborted => "aborted by the guest",
        RequestStatus::Timeout => "incomplete at the time limit",
        RequestStatus::Reset => "the guest's driver was reset",
    }
}

/// Rows of the table.
pub(super) fn rows(report: &FreePagesReport) -> Vec<Row> {
    let encodings = report.encodings;
    let mut rows = vec![
        row("request", format!("{}: {}", report.request_id, status(report.status))),
        row("free", format!("{} of {}", bytes(report.bytes), bytes(report.memory_bytes))),
        row(
            "ranges",
            format!("{}, the largest {}", report.ranges, bytes(report.largest_range_bytes)),
        ),
        row(
            "messages",
            format!(
                "{} ({} of pfns, {} bitmaps, {} of ranges), {}",
                report.messages,
                encodings.pfns,
                encodings.bitmaps,
                encodings.ranges,
                bytes(report.message_bytes)
            ),
        ),
        row("took", format!("{:.1} ms", report.elapsed_us as f64 / 1000.0)),
        row("decoding took", format!("{:.1} ms", report.translate_ns as f64 / 1e6)),
    ];
    if let (Some(free), Some(percent)) = (report.free_memory_bytes, report.coverage_percent) {
        let age = duration(report.free_memory_age_ms.unwrap_or(0));
        let text = format!("{percent:.1} % of the {} in its statistics ({age} old)", bytes(free));
        rows.push(row("named", text));
    }
    if report.poisoned_bytes > 0 {
        let text = format!(
            "{}: the guest relies on the content of free pages",
            bytes(report.poisoned_bytes)
        );
        rows.push(row("not usable", text));
    }
    rows.push(row("blocks", report.blocks.to_string()));
    for blocks in report.by_order.iter().rev() {
        let what = format!("  of order {} ({})", blocks.order, bytes(blocks.block_bytes));
        rows.push(row(&what, format!("{} = {}", blocks.blocks, bytes(blocks.bytes))));
    }
    rows
}

/// Rows of the table for memory that the guest has reported on request.
pub(super) fn reclaim_rows(report: &ReclaimReport) -> Vec<Row> {
    vec![
        row("request", format!("{}: {}", report.request_id, status(report.status))),
        row("reported", bytes(report.reported_bytes)),
        row(
            "resident",
            format!(
                "{}, before {}",
                bytes(report.resident_bytes),
                bytes(report.resident_before_bytes)
            ),
        ),
        row("took", format!("{:.1} ms", report.elapsed_us as f64 / 1000.0)),
    ]
}
