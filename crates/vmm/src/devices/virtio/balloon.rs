//! The balloon device (crate `ebb-balloon`) as a virtio device of this monitor.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ebb_abi::balloon::{DEVICE_ID, Feature, Features, QueueKind};
use ebb_abi::{Order, PAGE_SIZE_BYTES};
use ebb_balloon::{
    Balloon, BalloonConfig, BalloonError, Counters, HintSink, QueueCounters, ReportCheck,
    Statistics,
};
use ebb_guest_ram::GuestRam;
use virtio_queue::{Queue, QueueState};

use super::state::DeviceState;
use super::{DeferredWork, VirtioDevice, Work};
use crate::api::control::{
    BalloonFeature, BalloonInfo, BalloonMetrics, BalloonState, ControlError, KindCount,
    StatisticsReading, StatisticsValues,
};
use crate::config::{BalloonDeviceConfig, Switch};

/// Pages that could become part of a whole huge page wait for this long after the last buffer of
/// the guest.
const FLUSH_AFTER: Duration = Duration::from_millis(10);

/// The device with its timers.
pub struct BalloonDevice {
    balloon: Balloon,
    ram: Arc<GuestRam>,
    flush_at: Option<Instant>,
    poll_at: Option<Instant>,
    check: ReportCheck,
}

fn features(config: &BalloonDeviceConfig) -> Features {
    let optional = [
        (Feature::StatisticsQueue, config.statistics),
        (Feature::DeflateOnOom, config.deflate_on_oom),
        (Feature::FreePageHint, config.hinting),
        (Feature::PagePoison, config.poison),
        (Feature::PageReporting, config.reporting),
        (Feature::PageBitmap, config.page_bitmap),
        (Feature::PageRanges, config.page_ranges),
        (Feature::HostRequest, config.host_requests),
    ];
    optional
        .into_iter()
        .filter(|(_, switch)| *switch == Switch::On)
        .fold(Features::NONE.with(Feature::MustTellHost), |features, (feature, _)| {
            features.with(feature)
        })
}

impl BalloonDevice {
    /// A balloon over `ram`.
    pub fn new(config: &BalloonDeviceConfig, ram: Arc<GuestRam>) -> Result<Self, BalloonError> {
        let check =
            if config.verify_reports.is_on() { ReportCheck::Overwrite } else { ReportCheck::None };
        let config = BalloonConfig {
            features: features(config),
            target_bytes: config.size.bytes(),
            statistics_interval: config.statistics_interval,
        };
        let mut balloon = Balloon::new(config, ram.clone())?;
        balloon.set_report_check(check);
        Ok(Self { balloon, ram, flush_at: None, poll_at: None, check })
    }

    /// Target and actual size in bytes.
    pub fn sizes_bytes(&self) -> (u64, u64) {
        (self.balloon.target_bytes(), self.balloon.actual_bytes())
    }

    /// The device for the API.
    pub fn describe(&self, state: BalloonState) -> BalloonInfo {
        let info = self.balloon.info();
        let interval = self.balloon.statistics_interval().unwrap_or_default();
        BalloonInfo {
            target_bytes: info.target_bytes,
            actual_bytes: info.actual_bytes,
            state,
            offered_features: BalloonFeature::from_bits(info.offered_features),
            negotiated_features: BalloonFeature::from_bits(info.negotiated_features),
            poison: info.poison_value,
            discard_inhibited: (!info.inhibited.is_empty()).then(|| info.inhibited.join("; ")),
            statistics_interval_seconds: u32::try_from(interval.as_secs()).unwrap_or(u32::MAX),
        }
    }

    /// Sets the size asked for; `true` when the driver has to be told.
    pub fn set_target_bytes(&mut self, target_bytes: u64) -> Result<bool, ControlError> {
        let invalid = |message: String| ControlError::Invalid {
            field: "target_bytes",
            message,
            remedy: Some(
                "ask for a multiple of 4096 that is at most the guest's memory".to_owned(),
            ),
        };
        if !target_bytes.is_multiple_of(PAGE_SIZE_BYTES) {
            return Err(invalid(format!(
                "a balloon of {target_bytes} bytes is not made of whole pages"
            )));
        }
        self.balloon.set_target_bytes(target_bytes).map_err(|error| invalid(error.to_string()))
    }

    /// Asks the guest for statistics; `true` when the driver has to be interrupted for that.
    pub fn request_statistics(&mut self) -> Result<bool, ControlError> {
        if self.balloon.queue_index(QueueKind::Statistics).is_none() {
            return Err(ControlError::WrongState {
                message: "the guest's balloon driver and this device have not agreed on statistics"
                    .to_owned(),
                remedy: Some(
                    "start with --balloon statistics=on and use a driver that tells them"
                        .to_owned(),
                ),
            });
        }
        Ok(self.balloon.request_statistics())
    }

    /// Asks the guest for its free pages; the sink is told. Returns the number of the request, and
    /// `true` when the driver has to be interrupted for it.
    pub fn request_free_pages(
        &mut self,
        smallest: Order,
        sink: Box<dyn HintSink>,
    ) -> Result<(u64, bool), ControlError> {
        let wrong_state = |message: String, remedy: &str| ControlError::WrongState {
            message,
            remedy: Some(remedy.to_owned()),
        };
        match self.balloon.request_free_pages(smallest, sink) {
            Ok(interrupt) => Ok((self.balloon.last_request_id(), interrupt)),
            Err(error @ BalloonError::RequestActive) => {
                Err(wrong_state(error.to_string(), "ask again when it has answered"))
            }
            Err(_) => Err(wrong_state(
                "the guest's balloon driver and this device have not agreed on host requests"
                    .to_owned(),
                "start with --balloon host_requests=on and use a driver that knows them, such as ebb_balloon",
            )),
        }
    }

    /// Withdraws the request with this number, unless it has ended; `true` when the driver has to
    /// be interrupted.
    pub fn cancel_free_pages(&mut self, request_id: u64) -> bool {
        self.balloon.last_request_id() == request_id && self.balloon.cancel_free_pages()
    }

    /// Features that the driver has accepted; none without a driver.
    pub fn negotiated(&self) -> Features {
        self.balloon.negotiated()
    }

    /// Whether a driver that relies on the content of its free pages could have said so.
    pub fn asks_for_poison(&self) -> bool {
        Features(self.balloon.info().offered_features).contains(Feature::PagePoison)
    }

    /// Asks the driver for hints, which go to the sink. The configuration changes.
    pub fn start_hinting(&mut self, sink: Box<dyn HintSink>) -> Result<(), BalloonError> {
        self.balloon.start_hinting(sink)
    }

    /// No more hints are wanted; `true` when the configuration changes by that.
    pub fn stop_hinting(&mut self) -> bool {
        self.balloon.stop_hinting()
    }

    /// The driver may use the hinted pages again; `true` when the configuration changes by that.
    pub fn finish_hinting(&mut self) -> bool {
        self.balloon.finish_hinting()
    }

    /// The statistics received last.
    pub fn statistics(&self) -> StatisticsReading {
        let statistics = self.balloon.statistics();
        StatisticsReading {
            age: statistics.age_ms.map(Duration::from_millis),
            values: values(&statistics),
        }
    }

    /// Asks for statistics regularly from now on, or no more.
    pub fn set_statistics_interval(&mut self, interval: Option<Duration>) {
        self.balloon.set_statistics_interval(interval);
        self.poll_at = interval.map(|_| Instant::now());
    }

    /// Gives back what waits to become a whole huge page.
    pub fn flush(&mut self) {
        self.balloon.flush();
        self.flush_at = None;
    }

    /// The device's counters.
    pub fn metrics(&self) -> BalloonMetrics {
        let counters = self.balloon.counters();
        let mut errors: Vec<_> = counters
            .errors
            .iter()
            .map(|(error, count)| KindCount::new(error.name(), count))
            .collect();
        errors.push(KindCount::new("discard_failed", counters.discard.failures));
        BalloonMetrics {
            target_bytes: self.balloon.target_bytes(),
            actual_bytes: self.balloon.actual_bytes(),
            reported_bytes: counters.reporting.bytes,
            inflated_bytes: counters.inflate.bytes,
            deflated_bytes: counters.deflate.bytes,
            discarded_bytes: counters.discard.bytes,
            discarded_ranges: counters.discard.ranges,
            discard_syscalls: counters.discard.syscalls,
            discard_ns: counters.discard.elapsed_ns,
            kept_bytes: kinds([
                ("inhibited", counters.discard.inhibited_bytes),
                ("deferred", counters.discard.deferred_bytes),
                ("poisoned", counters.discard.poisoned_bytes),
                ("dropped", counters.discard.dropped_bytes),
            ]),
            verified_pages: counters.discard.verified_pages,
            translate_ns: queues(&counters, |queue| queue.translate_ns),
            queue_buffers: queues(&counters, |queue| queue.buffers),
            queue_bytes: queues(&counters, |queue| queue.message_bytes),
            messages: kinds([
                ("arrays", counters.encodings.arrays),
                ("pfns", counters.encodings.pfns),
                ("bitmaps", counters.encodings.bitmaps),
                ("ranges", counters.encodings.ranges),
            ]),
            requests: kinds([
                ("sent", counters.requests.sent),
                ("completed", counters.requests.completed),
                ("aborted", counters.requests.aborted),
                ("cancelled", counters.requests.cancelled),
            ]),
            errors,
        }
    }
}

fn kinds<const N: usize>(counts: [(&'static str, u64); N]) -> Vec<KindCount> {
    counts.into_iter().map(|(kind, count)| KindCount::new(kind, count)).collect()
}

/// A counter of each queue.
fn queues(counters: &Counters, value: impl Fn(&QueueCounters) -> u64) -> Vec<KindCount> {
    let count = |kind: QueueKind| KindCount::new(kind.name(), value(counters.queue(kind)));
    QueueKind::ALL.into_iter().map(count).collect()
}

fn values(statistics: &Statistics) -> StatisticsValues {
    StatisticsValues {
        swap_in_bytes: statistics.swap_in_bytes,
        swap_out_bytes: statistics.swap_out_bytes,
        major_faults: statistics.major_faults,
        minor_faults: statistics.minor_faults,
        free_memory_bytes: statistics.free_bytes,
        total_memory_bytes: statistics.total_bytes,
        available_memory_bytes: statistics.available_bytes,
        disk_caches_bytes: statistics.disk_caches_bytes,
        hugetlb_allocations: statistics.hugetlb_allocations,
        hugetlb_failures: statistics.hugetlb_failures,
        oom_kills: statistics.oom_kills,
        allocation_stalls: statistics.allocation_stalls,
        async_scan_bytes: statistics.async_scans,
        direct_scan_bytes: statistics.direct_scans,
        async_reclaim_bytes: statistics.async_reclaims,
        direct_reclaim_bytes: statistics.direct_reclaims,
    }
}

impl VirtioDevice for BalloonDevice {
    fn device_id(&self) -> u32 {
        DEVICE_ID
    }

    fn features(&self) -> u64 {
        self.balloon.device_features()
    }

    fn queue_sizes(&self) -> Vec<u16> {
        self.balloon.queue_max_sizes()
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        self.balloon.read_config(offset, data);
    }

    fn write_config(&mut self, offset: u64, data: &[u8]) {
        self.balloon.write_config(offset, data);
    }

    fn activate(&mut self, features: u64, queues: Vec<Queue>) -> Result<(), String> {
        self.balloon.activate(features, queues).map_err(|error| error.to_string())?;
        self.poll_at = self.balloon.statistics_interval().map(|_| Instant::now());
        Ok(())
    }

    fn process_queue(&mut self, index: usize) -> Work {
        let progress = self.balloon.process_queue(index);
        self.flush_at = progress.pending.then(|| Instant::now() + FLUSH_AFTER);
        Work { interrupt: progress.interrupt, more: progress.more, deferred: progress.due }
    }

    fn deferred_work(&self) -> Option<DeferredWork> {
        let discarder = self.balloon.discarder();
        Some(Box::new(move || discarder.discard_due()))
    }

    fn deadline(&self) -> Option<Instant> {
        self.flush_at.into_iter().chain(self.poll_at).min()
    }

    fn on_timer(&mut self, now: Instant) -> Work {
        let mut work = Work::default();
        if self.flush_at.is_some_and(|at| at <= now) {
            self.flush();
        }
        if self.poll_at.is_some_and(|at| at <= now) {
            let poll = self.balloon.poll_statistics(now);
            work.interrupt = poll.interrupt;
            self.poll_at = poll.next;
        }
        work
    }

    fn quiesce(&mut self) {
        self.flush();
    }

    fn reset(&mut self) {
        self.balloon.reset();
        self.flush_at = None;
        self.poll_at = None;
    }

    fn queue_states(&self) -> Vec<QueueState> {
        self.balloon.queue_states()
    }

    fn save(&mut self) -> DeviceState {
        DeviceState::Balloon(self.balloon.save())
    }

    fn restore(
        &mut self,
        state: &DeviceState,
        driver: Option<(u64, Vec<Queue>)>,
    ) -> Result<(), String> {
        let DeviceState::Balloon(state) = state else {
            return Err("its state is that of another device".to_owned());
        };
        let queues = driver.map(|(_, queues)| queues).unwrap_or_default();
        self.balloon =
            Balloon::restore(state, self.ram.clone(), queues).map_err(|error| error.to_string())?;
        self.balloon.set_report_check(self.check);
        self.poll_at = self.balloon.statistics_interval().map(|_| Instant::now());
        Ok(())
    }
}

#[cfg(test)]
mod tests;
