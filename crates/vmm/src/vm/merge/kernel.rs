//! Merging by Linux's KSM. Its settings belong to the host: a machine only makes its memory
//! mergeable.

use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::{Arc, Mutex};

use ebb_guest_ram::{GuestRam, KernelMerging as Advice};
use ebb_page_merge::kernel::knobs::{ADVISOR_SCAN_TIME, RUN_MERGE};
use ebb_page_merge::kernel::{
    Counter, Counters, KernelDomain, Knob, Ksm, RUN_FOLDER, SYSFS, Values,
};

use super::{Status, failed, wrong_state};
use crate::api::control::ControlError;
use crate::api::merge::{
    MergeChange, MergeRun, MergeScope, MergeSettings, MergeState, MergeStatistics,
};
use crate::config::MergeConfig;
use crate::config::merge::DEFAULT_KERNEL_DOMAIN;
use crate::vm::lock;

/// Merging by the kernel. Dropping it ends it; merged pages stay merged.
pub(super) struct KernelMerging {
    ksm: Ksm,
    status: Mutex<Status>,
    ram: Arc<GuestRam>,
    /// Dropped last: while there is memory that the kernel may merge, machines of other domains
    /// must stay out.
    domain: KernelDomain,
}

impl KernelMerging {
    /// Lets the kernel merge the pages of `ram`.
    ///
    /// # Errors
    /// Why the kernel cannot merge.
    pub(super) fn start(config: &MergeConfig, ram: &Arc<GuestRam>) -> Result<Self, String> {
        Self::start_among(Path::new(RUN_FOLDER), config, ram)
    }

    /// The same for the machines whose domain is recorded in `folder`.
    fn start_among(
        folder: &Path,
        config: &MergeConfig,
        ram: &Arc<GuestRam>,
    ) -> Result<Self, String> {
        let ksm = Ksm::open(Path::new(SYSFS)).map_err(text)?;
        if let Some(across) = config.across_nodes {
            let present = ksm.settings().map_err(text)?.get(Knob::MergeAcrossNodes);
            if present != Some(u64::from(across)) {
                return Err(format!(
                    "merge_across_nodes is a setting of the host for merge=kernel, and it is {}; \
                     set {SYSFS}/{} for all machines, or leave it out",
                    match present {
                        None => "unavailable (this kernel does not support nodes)",
                        Some(0) => "off",
                        Some(_) => "on",
                    },
                    Knob::MergeAcrossNodes.name(),
                ));
            }
        }
        let domain = config.domain.as_deref().unwrap_or(DEFAULT_KERNEL_DOMAIN);
        let domain = KernelDomain::join(folder, domain).map_err(text)?;
        // Only after joining: no machine of another domain is present.
        ram.advise_mergeable(Advice::Allow).map_err(text)?;
        Ok(Self { ksm, status: Mutex::default(), ram: ram.clone(), domain })
    }

    /// That of a process which was forked from this one's, with the same memory. The advice comes
    /// with it (Linux mm/ksm.c, `ksm_fork`), and merged pages stay merged.
    ///
    /// # Errors
    /// What the kernel refused.
    pub(super) fn in_fork(&self) -> Result<Self, String> {
        Ok(Self {
            ksm: self.ksm.try_clone().map_err(text)?,
            status: Mutex::new(lock(&self.status).clone()),
            ram: self.ram.clone(),
            domain: self.domain.try_clone().map_err(text)?,
        })
    }

    /// Descriptors that a forked process keeps.
    pub(super) fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.ksm.descriptors().chain([self.domain.descriptor()])
    }

    pub(super) fn status(&self) -> Status {
        let mut status = lock(&self.status).clone();
        let run = self.ksm.settings().ok().and_then(|values| values.get(Knob::Run));
        if status.state == MergeState::Merging && run != Some(RUN_MERGE) {
            status.state = MergeState::Stopped;
            status.reason = Some(format!(
                "the kernel's merging does not run on this host; \
                 start it with `echo {RUN_MERGE} > {SYSFS}/run`"
            ));
        }
        status
    }

    pub(super) fn settings(&self) -> Result<MergeSettings, ControlError> {
        let values = self.ksm.settings().map_err(failed)?;
        Ok(settings(&values, lock(&self.status).run))
    }

    pub(super) fn merged_bytes(&self) -> Option<u64> {
        self.ram.residency().ok().map(|residency| residency.merged_bytes)
    }

    pub(super) fn statistics(&self) -> Result<MergeStatistics, ControlError> {
        let counters = self.ksm.counters().map_err(failed)?;
        Ok(MergeStatistics { merged_bytes: self.merged_bytes(), ..statistics(&counters) })
    }

    /// Makes the machine's memory mergeable, or unmerges it: its pages become private again, while
    /// those of other processes stay merged. Returns when that is done.
    pub(super) fn change(&self, change: &MergeChange) -> Result<(), ControlError> {
        if change.min_pass_millisecs.is_some() || change.clean_passes.is_some() {
            return Err(wrong_state(
                "the kernel has no settings 'min_pass_millisecs' and 'clean_passes'",
                "leave them out, or let the monitor merge (merge=owner)",
            ));
        }
        if let Some((what, file)) = of_the_host(change) {
            return Err(wrong_state(
                format!(
                    "{what} is a setting of the host for merge=kernel, \
                     common to all processes whose pages the kernel merges"
                ),
                &format!("change it in {SYSFS}/{file}, or let the monitor merge (merge=owner)"),
            ));
        }
        let (run, advice, state) = match change.run {
            Some(run @ MergeRun::Merge) => (run, Advice::Allow, MergeState::Merging),
            Some(run @ MergeRun::Unmerge) => (run, Advice::Forbid, MergeState::Unmerged),
            Some(MergeRun::Stop) | None => return Ok(()),
        };
        let result = self.ram.advise_mergeable(advice);
        *lock(&self.status) = match &result {
            Ok(()) => Status { run, state, reason: None },
            Err(error) => Status {
                run,
                state: MergeState::Stopped,
                reason: Some(match advice {
                    Advice::Allow => error.to_string(),
                    Advice::Forbid => format!("not all pages could be unmerged: {error}"),
                }),
            },
        };
        result.map_err(failed)
    }
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// The first setting in `change` that belongs to the whole host, and its file.
fn of_the_host(change: &MergeChange) -> Option<(&'static str, &'static str)> {
    [
        ("run=stop", change.run == Some(MergeRun::Stop), Knob::Run),
        ("merge_across_nodes", change.merge_across_nodes.is_some(), Knob::MergeAcrossNodes),
        ("max_page_sharing", change.max_page_sharing.is_some(), Knob::MaxPageSharing),
        ("use_zero_pages", change.use_zero_pages.is_some(), Knob::UseZeroPages),
        ("smart_scan", change.smart_scan.is_some(), Knob::SmartScan),
        ("pages_per_second", change.pages_per_second.is_some(), Knob::PagesToScan),
        ("cpu_percent", change.cpu_percent.is_some(), Knob::AdvisorMaxCpu),
        ("target_scan_seconds", change.target_scan_seconds.is_some(), Knob::AdvisorTargetScanTime),
    ]
    .into_iter()
    .find_map(|(name, is_wanted, knob)| is_wanted.then_some((name, knob.name())))
}

/// KSM's settings in terms of the API.
fn settings(values: &Values, run: MergeRun) -> MergeSettings {
    let on = |knob| values.get(knob).map(|value| value != 0);
    let is_advised = values.get(Knob::AdvisorMode) == Some(ADVISOR_SCAN_TIME);
    let advised = |knob| values.get(knob).filter(|_| is_advised);
    let rests = values.get(Knob::SleepMillisecs).filter(|sleep_ms| *sleep_ms > 0 && !is_advised);
    MergeSettings {
        run: Some(run),
        merge_across_nodes: on(Knob::MergeAcrossNodes),
        max_page_sharing: values.get(Knob::MaxPageSharing),
        use_zero_pages: on(Knob::UseZeroPages),
        smart_scan: on(Knob::SmartScan),
        pages_per_second: values
            .get(Knob::PagesToScan)
            .zip(rests)
            .map(|(pages, sleep_ms)| pages.saturating_mul(1000) / sleep_ms),
        cpu_percent: advised(Knob::AdvisorMaxCpu),
        target_scan_seconds: advised(Knob::AdvisorTargetScanTime),
        min_pass_millisecs: None,
        clean_passes: None,
    }
}

/// KSM's counters, which cover the whole host.
fn statistics(counters: &Counters) -> MergeStatistics {
    let count = |counter| counters.get(counter).and_then(|value| u64::try_from(value).ok());
    MergeStatistics {
        scope: MergeScope::Host,
        pages_shared: count(Counter::PagesShared),
        pages_sharing: count(Counter::PagesSharing),
        pages_unshared: count(Counter::PagesUnshared),
        pages_volatile: count(Counter::PagesVolatile),
        pages_scanned: count(Counter::PagesScanned),
        pages_skipped: count(Counter::PagesSkipped),
        full_scans: count(Counter::FullScans),
        ksm_zero_pages: count(Counter::KsmZeroPages),
        general_profit: counters.get(Counter::GeneralProfit),
        stable_node_chains: count(Counter::StableNodeChains),
        stable_node_dups: count(Counter::StableNodeDups),
        ..MergeStatistics::default()
    }
}

#[cfg(test)]
mod tests;
