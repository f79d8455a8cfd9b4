//! The device's interface for its owner.

use std::sync::Arc;
use std::time::Duration;

use ebb_abi::PAGE_SIZE_BYTES;
use ebb_abi::balloon::{
    Feature, Features, MAX_QUEUES, QueueIndexes, QueueKind, QueueMap, STANDARD_QUEUES,
};
use ebb_guest_ram::{DiscardOutcome, GuestRam, RamError};
use serde::Serialize;
use virtio_queue::{Queue, QueueT};

use crate::config::ConfigSpace;
use crate::counters::{Counters, Faults, GuestError};
use crate::hinting::{HintPhase, Hinting};
use crate::host_request::{HostRequests, RequestPhase};
use crate::inflate::Scratch;
use crate::pending::Discarder;
use crate::queue::{DeviceQueue, DeviceQueues, Progress};
use crate::state::{BalloonState, READABLE_VERSIONS, STATE_VERSION};
use crate::statistics::Collector;
use crate::verify::ReportCheck;
use crate::{BalloonConfig, BalloonError, StatisticsBuffer};

/// Entries of each queue. Reporting needs at least 32.
const QUEUE_SIZE: u16 = 128;

/// The device's state, for the API.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Info {
    /// Target size of the balloon in bytes.
    pub target_bytes: u64,
    /// Size reported by the driver in bytes; not trusted.
    pub actual_bytes: u64,
    /// Pages of the balloon that wait to be discarded, in bytes.
    pub pending_bytes: u64,
    /// Whether a driver is active.
    pub active: bool,
    /// Offered features.
    pub offered_features: u64,
    /// Negotiated features; 0 without a driver.
    pub negotiated_features: u64,
    /// Names of the negotiated features.
    pub features: Vec<&'static str>,
    /// Pattern with which the guest fills free pages, if it keeps pages from being discarded.
    pub poison_value: Option<u32>,
    /// State of free page hinting.
    pub hinting: HintPhase,
    /// State of the request for free pages.
    pub free_pages: RequestPhase,
    /// Location of the statistics buffer.
    pub statistics_buffer: StatisticsBuffer,
    /// Reasons why nothing is discarded at present.
    pub inhibited: Vec<String>,
}

/// State set up by a driver.
#[derive(Debug)]
pub(crate) struct Active {
    negotiated: Features,
    queues: DeviceQueues,
}

impl Active {
    pub(crate) fn has_queue(&self, kind: QueueKind) -> bool {
        self.queues.map.index(kind).is_some()
    }

    pub(crate) fn queue_mut(&mut self, kind: QueueKind) -> Option<&mut DeviceQueue> {
        let index = self.queues.map.index(kind)?;
        self.queues.queues.get_mut(index)
    }
}

/// A virtio-balloon device.
#[derive(Debug)]
pub struct Balloon {
    pub(crate) ram: Arc<GuestRam>,
    offered: Features,
    pub(crate) space: ConfigSpace,
    pub(crate) active: Option<Active>,
    pub(crate) discarder: Discarder,
    pub(crate) statistics: Collector,
    pub(crate) hinting: Hinting,
    pub(crate) requests: HostRequests,
    pub(crate) counters: Counters,
    pub(crate) faults: Faults,
    pub(crate) scratch: Scratch,
    check: ReportCheck,
}

impl Balloon {
    /// Creates a device for this memory.
    ///
    /// # Errors
    /// [`BalloonError::TargetTooLarge`].
    pub fn new(config: BalloonConfig, ram: Arc<GuestRam>) -> Result<Self, BalloonError> {
        let mut balloon = Self {
            discarder: Discarder::new(ram.clone()),
            ram,
            offered: config.features & Features::KNOWN,
            space: ConfigSpace::default(),
            active: None,
            statistics: Collector::new(config.statistics_interval),
            hinting: Hinting::default(),
            requests: HostRequests::default(),
            counters: Counters::default(),
            faults: Faults::default(),
            scratch: Scratch::default(),
            check: ReportCheck::None,
        };
        balloon.set_target_bytes(config.target_bytes)?;
        Ok(balloon)
    }

    /// Returns a handle that discards pages of this balloon without the lock that guards the
    /// device.
    pub fn discarder(&self) -> Discarder {
        self.discarder.clone()
    }

    /// Turns overwriting pages before they are discarded on or off. Pages of a guest that has
    /// negotiated `PAGE_POISON` or one of the proposed features are never overwritten: it relies on
    /// the content of pages that are not discarded after all.
    pub fn set_report_check(&mut self, check: ReportCheck) {
        self.check = check;
        let relies_on_content = self.negotiated().relies_on_free_pages();
        self.discarder.set_check(if relies_on_content { ReportCheck::None } else { check });
    }

    /// Offered feature bits. The transport adds those of virtio and of the rings.
    pub fn device_features(&self) -> u64 {
        self.offered.0
    }

    /// Accepted features among those of virtio-balloon; none without a driver.
    pub fn negotiated(&self) -> Features {
        self.active.as_ref().map_or(Features::NONE, |active| active.negotiated)
    }

    /// Maximum size of each queue, by transport index.
    ///
    /// Indexes that a declined or unoffered queue leaves unused are included, because drivers
    /// number the queues in different ways, see [`QueueMap`].
    pub fn queue_max_sizes(&self) -> Vec<u16> {
        let extended = self.offered.contains(Feature::HostRequest);
        vec![QUEUE_SIZE; if extended { MAX_QUEUES } else { STANDARD_QUEUES }]
    }

    /// Reads from the configuration space.
    pub fn read_config(&self, offset: u64, data: &mut [u8]) {
        self.space.read(offset, data);
    }

    /// Handles the driver's write to the configuration space. Writes to read-only fields have no
    /// effect.
    pub fn write_config(&mut self, offset: u64, data: &[u8]) {
        let write = self.space.write(offset, data);
        if write.read_only {
            self.faults.count(
                GuestError::ReadOnlyConfig,
                format_args!("{} bytes at {offset}", data.len()),
            );
        }
        if write.actual && self.space.actual_pages() == self.space.target_pages() {
            // The driver has finished: no more pages will complete the huge pages that wait.
            self.flush();
        }
    }

    /// Generation of the configuration space, for the transport's register.
    pub fn config_generation(&self) -> u32 {
        self.space.generation()
    }

    /// Activates the device for a driver. `queues` are all queues by transport index, whether the
    /// driver made them ready or not; `negotiated_features` may contain the transport's bits.
    ///
    /// [`process_queue`](Self::process_queue) must be called once for every queue after this.
    ///
    /// # Errors
    /// [`BalloonError`] if the driver cannot be served with these. The transport should set
    /// `DEVICE_NEEDS_RESET`.
    pub fn activate(
        &mut self,
        negotiated_features: u64,
        queues: Vec<Queue>,
    ) -> Result<(), BalloonError> {
        if self.active.is_some() {
            return Err(BalloonError::AlreadyActive);
        }
        let negotiated = Features(negotiated_features) & Features::KNOWN;
        if negotiated.0 & !self.offered.0 != 0 {
            return Err(BalloonError::FeaturesNotOffered { negotiated, offered: self.offered });
        }
        let mut ready = QueueIndexes::NONE;
        for (index, queue) in queues.iter().enumerate().filter(|(_, queue)| queue.ready()) {
            if !queue.is_valid(self.ram.memory()) {
                return Err(BalloonError::InvalidQueue { index });
            }
            ready = ready.with(index);
        }
        let map = QueueMap::resolve(self.offered, negotiated, ready)?;
        let queues = queues.into_iter().map(DeviceQueue::new).collect();
        self.active = Some(Active { negotiated, queues: DeviceQueues { map, queues } });
        self.set_report_check(self.check);
        self.counters.activations += 1;
        tracing::debug!("balloon active with features {negotiated}");
        Ok(())
    }

    /// Transport index of a queue, if a driver is active and uses it.
    pub fn queue_index(&self, kind: QueueKind) -> Option<usize> {
        self.active.as_ref()?.queues.map.index(kind)
    }

    /// Does a bounded amount of work on the queue with this transport index. Does nothing without a
    /// driver or for a queue without a function.
    pub fn process_queue(&mut self, index: usize) -> Progress {
        // Taken out so that the handlers can borrow the device and the queue.
        let Some(mut active) = self.active.take() else { return Progress::default() };
        let negotiated = active.negotiated;
        let kind = active.queues.map.kind(index);
        let mut progress = match (kind, active.queues.queues.get_mut(index)) {
            (Some(kind), Some(queue)) => match kind {
                QueueKind::Inflate => self.process_inflate(queue, negotiated),
                QueueKind::Deflate => self.process_deflate(queue, negotiated),
                QueueKind::Statistics => self.process_statistics(queue),
                QueueKind::FreePageHint => self.process_hinting(queue),
                QueueKind::Reporting => self.process_reporting(queue, negotiated),
                QueueKind::HostRequest => self.process_host_requests(queue, negotiated),
            },
            _ => Progress::default(),
        };
        self.active = Some(active);
        progress.due = self.discarder.is_due();
        progress.pending = self.discarder.pending_bytes() > 0;
        progress
    }

    /// Resets the device, because the driver did or the guest was reset: the balloon is empty, all
    /// pages belong to the guest, and all state of the driver is dropped. The target stays.
    pub fn reset(&mut self) {
        self.active = None;
        self.discarder.clear();
        self.ram.reclaim_all();
        self.statistics.reset();
        Self::reset_hinting(&mut self.hinting, &mut self.space);
        self.requests.reset();
        self.space.reset();
    }

    /// Sets the target size in bytes, rounded down to pages. Returns whether that changed the
    /// configuration, which means that its interrupt must be raised.
    ///
    /// # Errors
    /// [`BalloonError::TargetTooLarge`].
    pub fn set_target_bytes(&mut self, target_bytes: u64) -> Result<bool, BalloonError> {
        let ram_bytes = self.ram.size_bytes();
        let pages = u32::try_from(target_bytes / PAGE_SIZE_BYTES)
            .ok()
            .filter(|_| target_bytes <= ram_bytes);
        let pages = pages.ok_or(BalloonError::TargetTooLarge { target_bytes, ram_bytes })?;
        Ok(self.space.set_target_pages(pages))
    }

    /// Target size of the balloon in bytes.
    pub fn target_bytes(&self) -> u64 {
        self.space.target_bytes()
    }

    /// Size of the balloon reported by the driver, in bytes.
    pub fn actual_bytes(&self) -> u64 {
        u64::from(self.space.actual_pages()) * PAGE_SIZE_BYTES
    }

    /// All counters since the device was created.
    pub fn counters(&self) -> Counters {
        let discard = self.counters.discard.sum(self.discarder.counters());
        Counters { errors: self.faults.counts(), discard, ..self.counters }
    }

    /// The device's state, for the API.
    pub fn info(&self) -> Info {
        let negotiated = self.negotiated();
        Info {
            target_bytes: self.target_bytes(),
            actual_bytes: self.actual_bytes(),
            pending_bytes: self.discarder.pending_bytes(),
            active: self.active.is_some(),
            offered_features: self.offered.0,
            negotiated_features: negotiated.0,
            features: Feature::ALL
                .into_iter()
                .filter(|feature| negotiated.contains(*feature))
                .map(Feature::name)
                .collect(),
            poison_value: self.is_poisoned(negotiated).then(|| self.space.poison_value()),
            hinting: self.hinting.phase(),
            free_pages: self.requests.phase(),
            statistics_buffer: self.statistics_buffer(),
            inhibited: self.ram.inhibit_reasons().iter().map(ToString::to_string).collect(),
        }
    }

    /// Whether the guest expects a pattern in free pages, which a discarded page would not have
    /// (virtio 1.3 section 5.5.6.6).
    pub(crate) fn is_poisoned(&self, negotiated: Features) -> bool {
        negotiated.contains(Feature::PagePoison) && self.space.poison_value() != 0
    }

    /// Accounts for the result of a discard; returns whether all of its pages read as zeros now.
    pub(crate) fn account(&mut self, result: Result<DiscardOutcome, RamError>) -> bool {
        match result {
            Ok(outcome) => {
                self.counters.discard.add(outcome);
                outcome.is_complete()
            }
            Err(error) => {
                self.counters.discard.failures += 1;
                self.faults.log_host_error(&error);
                false
            }
        }
    }

    /// States of the queues, by transport index; empty without a driver.
    pub fn queue_states(&self) -> Vec<virtio_queue::QueueState> {
        let active = self.active.as_ref();
        active.map_or_else(Vec::new, |active| {
            active.queues.queues.iter().map(DeviceQueue::state).collect()
        })
    }

    /// Saves the state for a snapshot. Pages that wait are discarded first; hinting must have been
    /// finished. A request for free pages continues on this device, and is not part of the state.
    pub fn save(&mut self) -> BalloonState {
        self.flush();
        BalloonState {
            version: STATE_VERSION,
            offered: self.offered.0,
            negotiated: self.active.as_ref().map(|active| active.negotiated.0),
            config: self.space.save(),
            last_hint_id: self.hinting.last_id,
            unstopped_hint_id: self.hinting.unstopped_id,
            last_request_id: self.requests.last_id,
            request_buffer: self.requests.buffer.clone(),
            statistics_head: self.statistics.held,
            statistics_interval_ms: self
                .statistics
                .interval()
                .map(|interval| u64::try_from(interval.as_millis()).unwrap_or(u64::MAX)),
        }
    }

    /// Creates a device in a saved state. `queues` must have the positions of the time of the save.
    ///
    /// # Errors
    /// [`BalloonError`] if the state does not fit this version, this memory or these queues.
    pub fn restore(
        state: &BalloonState,
        ram: Arc<GuestRam>,
        queues: Vec<Queue>,
    ) -> Result<Self, BalloonError> {
        if !READABLE_VERSIONS.contains(&state.version) {
            return Err(BalloonError::State(
                "it was written by an incompatible version; take a new snapshot",
            ));
        }
        let config = BalloonConfig {
            features: state.offered_features(),
            target_bytes: 0,
            statistics_interval: state.statistics_interval_ms.map(Duration::from_millis),
        };
        let mut balloon = Self::new(config, ram)?;
        balloon.space.restore(state.config);
        balloon.set_target_bytes(balloon.target_bytes())?;
        balloon.hinting.last_id = state.last_hint_id;
        balloon.hinting.unstopped_id = state.unstopped_hint_id;
        balloon.requests.last_id = state.last_request_id;
        if balloon.requests.last_id == u64::MAX {
            return Err(BalloonError::State("its request numbers are exhausted"));
        }
        if let Some(negotiated) = state.negotiated {
            balloon.activate(negotiated, queues)?;
        }
        if let Some(head) = state.statistics_head {
            let queue =
                balloon.active.as_mut().and_then(|active| active.queue_mut(QueueKind::Statistics));
            if queue.is_none_or(|queue| head >= queue.size()) {
                return Err(BalloonError::State(
                    "it holds a statistics buffer that does not exist",
                ));
            }
            balloon.statistics.held = Some(head);
        }
        if let Some(buffer) = &state.request_buffer {
            let queue =
                balloon.active.as_mut().and_then(|active| active.queue_mut(QueueKind::HostRequest));
            let exists = queue.is_some_and(|queue| buffer.head < queue.size());
            if !exists || !buffer.is_usable(balloon.ram.memory()) {
                return Err(BalloonError::State("it holds a request buffer that does not exist"));
            }
            balloon.requests.buffer = Some(buffer.clone());
        }
        Ok(balloon)
    }

    /// Pages that wait to be discarded.
    #[cfg(any(test, feature = "testing"))]
    #[doc(hidden)]
    pub fn pending_ranges(&self) -> Vec<ebb_abi::PageRange> {
        self.discarder.ranges()
    }
}
