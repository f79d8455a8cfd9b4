//! Whole documents that the double answers with.

use ebb_vmm::api::*;

use super::MEMORY_BYTES;

/// All counters of merging.
pub fn counted() -> MergeStatistics {
    MergeStatistics {
        scope: MergeScope::Machine,
        pages_shared: Some(1),
        pages_sharing: Some(2),
        pages_unshared: Some(3),
        pages_volatile: Some(4),
        pages_refused: Some(22),
        pages_scanned: Some(5),
        pages_skipped: Some(6),
        full_scans: Some(7),
        ksm_zero_pages: Some(8),
        general_profit: Some(-9),
        stable_node_chains: Some(10),
        stable_node_dups: Some(11),
        merged_bytes: Some(12),
        remote_merged_pages: Some(13),
        hashed_pages: Some(14),
        clean_pages: Some(15),
        written_pages: Some(23),
        untracked_pages: Some(24),
        huge_pages_split: Some(25),
        huge_pages_split_in_vain: Some(26),
        huge_pages_collapsed: Some(27),
        broken_pages: Some(21),
        brought_back_pages: Some(20),
        remerged_pages: Some(19),
        metadata_bytes: Some(16),
        replaced: Some(MergeReplaced { done: 17, ..MergeReplaced::default() }),
    }
}

/// A parking that evicted all but what the guest keeps of its 100 MiB of caches.
pub fn parked(request: &ParkRequest) -> ParkReport {
    let caches = 100 << 20;
    let returned_bytes = caches - request.keep_bytes.min(caches);
    let stage = |stage, end, reason: Option<&str>, returned_bytes| ParkStage {
        stage,
        end,
        reason: reason.map(str::to_owned),
        returned_bytes,
        elapsed_us: 250_000,
    };
    ParkReport {
        stages: vec![
            stage(
                ParkStageName::Evict,
                ParkStageEnd::Stopped,
                Some("it reads files"),
                returned_bytes,
            ),
            stage(ParkStageName::Report, ParkStageEnd::Skipped, Some("no such driver"), 0),
            stage(ParkStageName::Trim, ParkStageEnd::Done, None, 0),
        ],
        resident_before_bytes: 200 << 20,
        resident_bytes: (200 << 20) - returned_bytes,
        elapsed_us: 500_000,
    }
}

/// Metrics of every kind.
pub fn metrics() -> Metrics {
    Metrics {
        memory_bytes: MEMORY_BYTES,
        guest_resident_bytes: 123 << 20,
        guest_shared_bytes: 0,
        process_resident_bytes: 128 << 20,
        overhead_resident_bytes: 5 << 20,
        uptime_ms: 1234,
        balloon: Some(BalloonMetrics {
            counters: Counters {
                reporting: QueueCounters { bytes: 2 << 20, ..QueueCounters::default() },
                discard: DiscardCounters { failures: 3, ..DiscardCounters::default() },
                ..Counters::default()
            },
            ..BalloonMetrics::default()
        }),
        merge: Some(counted()),
        delayed_requests: vec![KindCount::new("disk0", 5)],
        vsock: Some(VsockMetrics::default()),
        net_frames: vec![KindCount::new("net0_rx", 8), KindCount::new("net0_tx", 9)],
        net_bytes: vec![KindCount::new("net0_rx", 800), KindCount::new("net0_tx", 900)],
        net_dropped: vec![KindCount::new("net0_rx", 0), KindCount::new("net0_tx", 1)],
        vcpu_exits: vec![KindCount::new("io", 17)],
        start_us: vec![KindCount::new("build", 1800)],
    }
}

/// A parking that ended a minute ago.
pub fn park_status() -> ParkStatus {
    ParkStatus {
        last: Some(parked(&ParkRequest::default())),
        since: Some(ParkSince {
            elapsed_ms: 61_000,
            resident_bytes: 160 << 20,
            major_faults: Some(12),
            caches_grown_bytes: Some(9 << 20),
            swapped_in_bytes: None,
        }),
    }
}

/// A working set of one range.
pub fn working_set() -> WorkingSet {
    WorkingSet {
        snapshot: "0123456789abcdef".into(),
        extents: vec![WorkingSetExtent { offset_bytes: 1 << 20, size_bytes: 1 << 16 }],
    }
}

/// A checkpoint with this name.
pub fn checkpoint(name: String) -> CheckpointReport {
    CheckpointReport { name, pid: 4711, paused_us: 900, forked_us: 300 }
}

/// A reclaim that returned 6 MiB.
pub fn reclaimed(request: &ReclaimRequest) -> ReclaimReport {
    ReclaimReport {
        request_id: 8,
        status: RequestStatus::Done,
        min_order: request.min_order,
        reported_bytes: 6 << 20,
        resident_before_bytes: 8 << 20,
        resident_bytes: 2 << 20,
        elapsed_us: 1000,
    }
}

/// A snapshot of 99 MiB.
pub fn snapshot(target: &SnapshotTarget) -> SnapshotReport {
    SnapshotReport {
        path: target.path.display().to_string(),
        file_bytes: 1 << 30,
        stored_bytes: 100 << 20,
        ram_bytes: 99 << 20,
        elapsed_ms: 700,
        paused_ms: 600,
        copied: CopiedWhile::Running,
    }
}

/// A trim that returned a quarter of what it looked at.
pub const TRIMMED: TrimReport = TrimReport {
    scanned_bytes: 4 << 20,
    returned_bytes: 1 << 20,
    pauses: 1,
    longest_pause_us: 900,
    complete: true,
};
