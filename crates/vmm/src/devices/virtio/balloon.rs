//! The balloon device (crate `ebb-balloon`) as a virtio device of this monitor.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ebb_abi::Order;
use ebb_abi::PageRange;
use ebb_abi::balloon::{DEVICE_ID, Feature, Features};
use ebb_balloon::{
    Balloon, BalloonConfig, BalloonError, HintEnd, HintPhase, HintSink, ReportCheck,
};
use ebb_guest_ram::GuestRam;
use virtio_queue::{Queue, QueueState};

use super::state::DeviceState;
use super::{DeferredWork, VirtioDevice, Work};
use crate::config::{BalloonDeviceConfig, Switch};

/// How long pages that could become part of a whole huge page are kept back after the guest's last
/// buffer.
const FLUSH_AFTER: Duration = Duration::from_millis(10);

/// What follows when the driver has named its free pages in a run of the operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AfterHints {
    /// It may use them again at once.
    Release,
    /// It keeps them aside until the run is stopped.
    Keep,
}

/// Takes hints that are only counted: nothing is ever discarded on a hint.
struct Counted;

impl HintSink for Counted {
    fn hint(&mut self, _: &[PageRange]) {}

    fn ended(&mut self, _: HintEnd) {}
}

/// The device with its timers.
pub struct BalloonDevice {
    balloon: Balloon,
    ram: Arc<GuestRam>,
    flush_at: Option<Instant>,
    poll_at: Option<Instant>,
    check: ReportCheck,
    /// A run of hints that the operator has started.
    hint_run: Option<AfterHints>,
}

fn features(config: &BalloonDeviceConfig) -> Features {
    let both = |one: Switch, other: Switch| if one.is_on() { other } else { Switch::Off };
    let optional = [
        (Feature::StatisticsQueue, config.statistics),
        (Feature::DeflateOnOom, config.deflate_on_oom),
        (Feature::FreePageHint, config.hinting),
        (Feature::PagePoison, config.poison),
        (Feature::PageReporting, config.reporting),
        (Feature::DeviceInitReported, both(config.init_reported, config.reporting)),
        (Feature::DeviceInitOnInflate, config.init_on_inflate),
        (Feature::PageBitmap, config.page_bitmap),
        (Feature::PageRanges, config.page_ranges),
        (Feature::HostRequest, config.host_requests),
        (Feature::ReportRequest, both(config.host_requests, config.reporting)),
    ];
    optional
        .into_iter()
        .filter(|(_, switch)| *switch == Switch::On)
        .fold(Features::NONE.with(Feature::MustTellHost), |features, (feature, _)| {
            features.with(feature)
        })
}

impl BalloonDevice {
    /// Creates a balloon over `ram`.
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
        Ok(Self { balloon, ram, flush_at: None, poll_at: None, check, hint_run: None })
    }

    /// The device core.
    pub fn balloon(&self) -> &Balloon {
        &self.balloon
    }

    /// The device core, for requests to the guest.
    pub fn balloon_mut(&mut self) -> &mut Balloon {
        &mut self.balloon
    }

    /// Requests the guest's free pages; `sink` receives them. Returns the number of the request,
    /// and `true` if the driver must be interrupted for it.
    pub fn request_free_pages(
        &mut self,
        smallest: Order,
        sink: Box<dyn HintSink>,
    ) -> Result<(u64, bool), BalloonError> {
        let interrupt = self.balloon.request_free_pages(smallest, sink)?;
        Ok((self.balloon.last_request_id(), interrupt))
    }

    /// Requests that the guest reports its free pages at once; `sink` receives the end. Returns as
    /// [`request_free_pages`](Self::request_free_pages) does.
    pub fn request_report(
        &mut self,
        smallest: Order,
        sink: Box<dyn HintSink>,
    ) -> Result<(u64, bool), BalloonError> {
        let interrupt = self.balloon.request_report(smallest, sink)?;
        Ok((self.balloon.last_request_id(), interrupt))
    }

    /// Withdraws the request with this number, unless it has ended; `true` if the driver must be
    /// interrupted.
    pub fn cancel_request(&mut self, request_id: u64) -> bool {
        self.balloon.last_request_id() == request_id && self.balloon.cancel_request()
    }

    /// Starts to request statistics at this interval; `None` stops the requests.
    pub fn set_statistics_interval(&mut self, interval: Option<Duration>) {
        self.balloon.set_statistics_interval(interval);
        self.poll_at = interval.map(|_| Instant::now());
    }

    /// Starts a run of hints, after the end of an earlier one. The configuration changes: the
    /// caller notifies the driver.
    pub fn start_hint_run(&mut self, after: AfterHints) -> Result<(), BalloonError> {
        self.stop_hint_run();
        self.balloon.start_hinting(Box::new(Counted))?;
        self.hint_run = Some(after);
        Ok(())
    }

    /// Ends the run, so that the driver may use all of its pages. Returns whether the configuration
    /// has changed.
    pub fn stop_hint_run(&mut self) -> bool {
        self.hint_run.take().is_some() && self.balloon.finish_hinting()
    }

    /// Discards the pages kept back for a whole huge page.
    pub fn flush(&mut self) {
        self.balloon.flush();
        self.flush_at = None;
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
        let is_complete = self.hint_run == Some(AfterHints::Release)
            && self.balloon.hint_phase() == HintPhase::Stopped;
        Work {
            interrupt: progress.interrupt,
            more: progress.more,
            deferred: progress.due,
            config_changed: is_complete && self.stop_hint_run(),
            ..Work::default()
        }
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

    fn finish_requests(&mut self) -> Work {
        // Neither a snapshot nor another monitor knows of the run.
        Work { config_changed: self.stop_hint_run(), ..Work::default() }
    }

    fn reset(&mut self) {
        self.balloon.reset();
        self.hint_run = None;
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
            return Err("its state belongs to another device".to_owned());
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
