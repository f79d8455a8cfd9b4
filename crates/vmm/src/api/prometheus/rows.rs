//! The table of metrics.

use ebb_abi::balloon::QueueKind;

use crate::api::merge::MergeStatistics;
use crate::api::metrics::{BalloonMetrics, KindCount, Metrics, QueueCounters, VsockMetrics};

/// A metric.
pub(super) struct Row<T> {
    /// Its name, after the prefix of its table.
    pub(super) name: &'static str,
    /// Its help text.
    pub(super) help: &'static str,
    /// Its value.
    pub(super) value: fn(&T) -> Sampled,
}

/// The value of a metric.
pub(super) enum Sampled {
    /// Not counted here.
    None,
    /// A number.
    Number(i128),
    /// A time, published in seconds.
    Milliseconds(u64),
    /// A number for each value of the label `kind`.
    Kinds(Vec<KindCount>),
}

impl From<u64> for Sampled {
    fn from(number: u64) -> Self {
        Self::Number(number.into())
    }
}

impl<T: Into<i128>> From<Option<T>> for Sampled {
    fn from(number: Option<T>) -> Self {
        number.map_or(Self::None, |number| Self::Number(number.into()))
    }
}

fn kinds(counts: impl IntoIterator<Item = (&'static str, u64)>) -> Sampled {
    Sampled::Kinds(counts.into_iter().map(|(kind, count)| KindCount::new(kind, count)).collect())
}

/// Sum of a counter for each queue.
fn queues(balloon: &BalloonMetrics, count: impl Fn(&QueueCounters) -> u64) -> Sampled {
    let of = |kind: QueueKind| (kind.name(), count(balloon.counters.queue(kind)));
    kinds(QueueKind::ALL.into_iter().map(of))
}

const fn row<T>(name: &'static str, help: &'static str, value: fn(&T) -> Sampled) -> Row<T> {
    Row { name, help, value }
}

/// With the prefix `ebb_`.
pub(super) const MACHINE: [Row<Metrics>; 12] = [
    row("memory_bytes", "Guest memory, including pages in the balloon.", |m| m.memory_bytes.into()),
    row("guest_resident_bytes", "Resident guest memory.", |m| m.guest_resident_bytes.into()),
    row("guest_shared_bytes", "Mappings of shared pages in guest memory.", |m| {
        m.guest_shared_bytes.into()
    }),
    row(
        "process_resident_bytes",
        "Resident memory of the monitor process, with guest memory.",
        |m| m.process_resident_bytes.into(),
    ),
    row(
        "overhead_resident_bytes",
        "Resident memory of the monitor process, without guest memory.",
        |m| m.overhead_resident_bytes.into(),
    ),
    row("uptime_seconds", "Time since the vCPUs were started.", |m| {
        Sampled::Milliseconds(m.uptime_ms)
    }),
    row("delayed_requests_total", "Requests that had to wait for a limit, by device.", |m| {
        Sampled::Kinds(m.delayed_requests.clone())
    }),
    row("net_frames_total", "Frames of network devices, by device and direction.", |m| {
        Sampled::Kinds(m.net_frames.clone())
    }),
    row("net_bytes_total", "Bytes of those frames.", |m| Sampled::Kinds(m.net_bytes.clone())),
    row("net_dropped_frames_total", "Frames of network devices that were dropped.", |m| {
        Sampled::Kinds(m.net_dropped.clone())
    }),
    row("vcpu_exits_total", "vCPU exits to the monitor, by kind.", |m| {
        Sampled::Kinds(m.vcpu_exits.clone())
    }),
    row("start_microseconds", "Time that the monitor's start took, by part.", |m| {
        Sampled::Kinds(m.start_us.clone())
    }),
];

/// With the prefix `ebb_merge_`, or `ebb_merge_host_` for counters of the host's kernel.
pub(super) const MERGE: [Row<MergeStatistics>; 24] = [
    row("pages_shared", "Pages that are shared.", |m| m.pages_shared.into()),
    row("pages_sharing", "Further mappings of shared pages.", |m| m.pages_sharing.into()),
    row("pages_unshared", "Pages without an equal one so far.", |m| m.pages_unshared.into()),
    row("pages_volatile", "Pages that change too fast to be merged.", |m| m.pages_volatile.into()),
    row("pages_refused", "Equal pages that could not be shared.", |m| m.pages_refused.into()),
    row("ksm_zero_pages", "Zero pages that take no memory.", |m| m.ksm_zero_pages.into()),
    row("stable_node_chains", "Shared pages with several copies.", |m| m.stable_node_chains.into()),
    row("stable_node_dups", "Copies of shared pages.", |m| m.stable_node_dups.into()),
    row("pages_scanned_total", "Pages scanned.", |m| m.pages_scanned.into()),
    row("pages_skipped_total", "Pages skipped by smart scan.", |m| m.pages_skipped.into()),
    row("full_scans_total", "Full scans.", |m| m.full_scans.into()),
    row("remote_merged_pages", "Pages that share a page of another NUMA node.", |m| {
        m.remote_merged_pages.into()
    }),
    row("hashed_pages_total", "Pages whose content was hashed.", |m| m.hashed_pages.into()),
    row("clean_pages_total", "Pages that had not been written to since the last scan.", |m| {
        m.clean_pages.into()
    }),
    row("written_pages_total", "Pages that had been written to since the last scan.", |m| {
        m.written_pages.into()
    }),
    row(
        "untracked_pages_total",
        "Scanned pages of huge pages, whose writes are not tracked.",
        |m| m.untracked_pages.into(),
    ),
    row("huge_pages_split_total", "Huge pages that were split to share their pages.", |m| {
        m.huge_pages_split.into()
    }),
    row(
        "huge_pages_split_in_vain_total",
        "Split huge pages of which too few pages could be shared.",
        |m| m.huge_pages_split_in_vain.into(),
    ),
    row("huge_pages_collapsed_total", "Split huge pages that were made huge again.", |m| {
        m.huge_pages_collapsed.into()
    }),
    row("broken_pages_total", "Merged pages that were written to.", |m| m.broken_pages.into()),
    row(
        "brought_back_pages_total",
        "Pages that were written to after a merge and are ordinary memory again.",
        |m| m.brought_back_pages.into(),
    ),
    row(
        "remerged_pages_total",
        "Pages that were written to after a merge and are merged again.",
        |m| m.remerged_pages.into(),
    ),
    row("metadata_bytes", "Memory used by merging itself.", |m| m.metadata_bytes.into()),
    row("general_profit_bytes", "Memory saved minus its cost.", |m| m.general_profit.into()),
];

/// With the prefix `ebb_merge_` for either backend.
pub(super) const MERGE_OF_MACHINE: [Row<MergeStatistics>; 2] = [
    row("merged_bytes", "Shared memory of this machine.", |m| m.merged_bytes.into()),
    row("replaced_pages_total", "Attempts to replace a page by a shared one, by result.", |m| {
        m.replaced.map_or(Sampled::None, |replaced| {
            kinds([
                ("done", replaced.done),
                ("different", replaced.different),
                ("busy", replaced.busy),
                ("no_mappings", replaced.no_mappings),
                ("gone", replaced.gone),
            ])
        })
    }),
];

/// With the prefix `ebb_balloon_`.
pub(super) const BALLOON: [Row<BalloonMetrics>; 18] = [
    row("target_bytes", "Target size of the balloon.", |m| m.target_bytes.into()),
    row("actual_bytes", "Size of the balloon as reported by the guest.", |m| m.actual_bytes.into()),
    row("reported_bytes_total", "Memory the guest reported as free.", |m| {
        m.counters.reporting.bytes.into()
    }),
    row("inflated_bytes_total", "Memory the guest put into the balloon.", |m| {
        m.counters.inflate.bytes.into()
    }),
    row("deflated_bytes_total", "Memory the guest took out of the balloon.", |m| {
        m.counters.deflate.bytes.into()
    }),
    row("discarded_bytes_total", "Memory discarded.", |m| m.counters.discard.bytes.into()),
    row("discarded_ranges_total", "Ranges discarded, after coalescing.", |m| {
        m.counters.discard.ranges.into()
    }),
    row("discard_syscalls_total", "System calls that discarded memory.", |m| {
        m.counters.discard.syscalls.into()
    }),
    row("discard_nanoseconds_total", "Time spent in system calls that discard memory.", |m| {
        m.counters.discard.elapsed_ns.into()
    }),
    row(
        "verified_pages_total",
        "Pages overwritten before they were discarded, to check the guest.",
        |m| m.counters.discard.verified_pages.into(),
    ),
    row(
        "initialized_bytes_total",
        "Memory that the guest was told to be zero, since it was discarded.",
        |m| m.counters.initialized_bytes.into(),
    ),
    row("kept_bytes_total", "Memory given by the guest but not discarded, by reason.", |m| {
        let discard = &m.counters.discard;
        kinds([
            ("inhibited", discard.inhibited_bytes),
            ("deferred", discard.deferred_bytes),
            ("poisoned", discard.poisoned_bytes),
            ("dropped", discard.dropped_bytes),
        ])
    }),
    row(
        "translate_nanoseconds_total",
        "Time spent reading the buffers of a queue and finding their ranges.",
        |m| queues(m, |queue| queue.translate_ns),
    ),
    row("queue_buffers_total", "Buffers received on a queue.", |m| {
        queues(m, |queue| queue.buffers)
    }),
    row("queue_bytes_total", "Bytes of the arrays and messages received on a queue.", |m| {
        queues(m, |queue| queue.message_bytes)
    }),
    row("messages_total", "Arrays and messages that named pages, by encoding.", |m| {
        let encodings = &m.counters.encodings;
        kinds([
            ("arrays", encodings.arrays),
            ("pfns", encodings.pfns),
            ("bitmaps", encodings.bitmaps),
            ("ranges", encodings.ranges),
        ])
    }),
    row("free_page_requests_total", "Requests for free pages, by result.", |m| {
        let requests = &m.counters.requests;
        kinds([
            ("sent", requests.sent),
            ("completed", requests.completed),
            ("aborted", requests.aborted),
            ("cancelled", requests.cancelled),
        ])
    }),
    row("errors_total", "Errors of the guest and failures of the host, by kind.", |m| {
        let mistakes = m.counters.errors.iter().map(|(kind, count)| (kind.name(), count));
        kinds(mistakes.chain([("discard_failed", m.counters.discard.failures)]))
    }),
];

/// With the prefix `ebb_vsock_`.
pub(super) const VSOCK: [Row<VsockMetrics>; 8] = [
    row("connections", "Connections, also those that are about to begin or to end.", |m| {
        m.connections.into()
    }),
    row("accepted_total", "Connections accepted, by the side that began them.", |m| {
        let counters = &m.counters;
        kinds([("host", counters.accepted_from_host), ("guest", counters.accepted_from_guest)])
    }),
    row("refused_total", "Connections refused, by the side that began them.", |m| {
        let counters = &m.counters;
        kinds([("host", counters.refused_from_host), ("guest", counters.refused_from_guest)])
    }),
    row("resets_total", "Open connections ended by a reset or a time limit.", |m| {
        m.counters.resets.into()
    }),
    row("bytes_to_guest_total", "Data sent to the guest.", |m| m.counters.bytes_to_guest.into()),
    row("bytes_from_guest_total", "Data of the guest that the host's sockets have taken.", |m| {
        m.counters.bytes_from_guest.into()
    }),
    row("packets_from_guest_total", "Packets of the guest.", |m| {
        m.counters.packets_from_guest.into()
    }),
    row("invalid_packets_total", "Invalid packets and buffers of the guest, by kind.", |m| {
        kinds(m.counters.invalid.kinds())
    }),
];
