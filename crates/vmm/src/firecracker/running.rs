//! The API of a machine that was started: translates requests into [`Operation`]s.

use std::fmt::Display;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::Instance;
use super::documents::{
    BlockDeviceUpdateConfig, CreateSnapshotParams, NetworkInterfaceUpdateConfig, SnapshotType,
};
use super::door::{counted, lock, refuse, without_null};
use super::fault::{self, Answer, Fault, NO_DEVICE, POST_BOOT};
use super::machine::changed_limits;
use super::metrics::MetricsFile;
use super::request::{Absent, Action, route};
use super::resources::{Resources, backing_file, in_use};
use super::snapshot::{absolute, write_state};
use crate::api::balloon::{BalloonInfo, BalloonState, BalloonTarget, HintRun, StatisticsInterval};
use crate::api::control::{ControlError, Document, Machine, Operation, Outcome, Wait};
use crate::api::disks::DiskResize;
use crate::api::door::{Door, Pending, Served};
use crate::api::http::Request;
use crate::api::lease::PauseRequest;
use crate::api::limits::LimitsChange;
use crate::api::reply::{Problem, Reply, Use};
use crate::api::vm::{SnapshotTarget, VmState};
use crate::isolation::Companion;
use crate::mmds::{Store, StoreError};

const MIB: u64 = 1 << 20;
/// Page of a balloon, in bytes.
const PAGE_BYTES: u64 = 4096;

/// The API of a machine.
pub(super) struct Running {
    vm: Arc<dyn Machine>,
    companion: Option<Companion>,
    instance: Instance,
    /// Where the monitor was started.
    directory: PathBuf,
    state: Arc<Mutex<State>>,
}

/// What the API knows and the machine does not.
pub(super) struct State {
    pub resources: Resources,
    pub metrics: MetricsFile,
}

/// Makes a reply of the machine's answer.
type Translate = Box<dyn Fn(Result<Document, ControlError>) -> Result<Answer, Fault> + Send>;

/// A request that was passed on: done, or waited for with what makes a reply of its answer.
enum Passed {
    Done(Answer),
    Await(Wait, Translate),
}

impl From<Answer> for Passed {
    fn from(answer: Answer) -> Self {
        Self::Done(answer)
    }
}

impl Running {
    pub(super) fn new(
        vm: Arc<dyn Machine>,
        companion: Option<Companion>,
        instance: Instance,
        directory: PathBuf,
        state: State,
    ) -> Self {
        Self { vm, companion, instance, directory, state: Arc::new(Mutex::new(state)) }
    }

    /// Executes an operation that is done at once.
    fn now(&self, operation: Operation) -> Result<Document, ControlError> {
        match self.vm.handle(operation, Vec::new())? {
            Outcome::Done(document) => Ok(*document),
            Outcome::Await(_) => Err(ControlError::failed("the operation takes time")),
        }
    }

    fn vm_state(&self) -> VmState {
        match self.now(Operation::VmInfo) {
            Ok(Document::Vm(info)) => info.state,
            _ => VmState::Stopping,
        }
    }

    /// The balloon that a client has configured; `what` begins the message if there is none.
    fn balloon(&self, what: &'static str) -> Result<BalloonInfo, Fault> {
        if lock(&self.state).resources.balloon.is_none() {
            return Err(Fault::new(NO_DEVICE).within(what));
        }
        match self.now(Operation::Balloon).map_err(Fault::of(what))? {
            Document::Balloon(info) => Ok(info),
            _ => Err(Fault::new(NO_DEVICE).within(what)),
        }
    }

    fn execute(&self, action: Action) -> Result<Passed, Fault> {
        let done = match action {
            Action::InstanceInfo => self.instance.info(match self.vm_state() {
                VmState::Starting | VmState::Running => "Running",
                _ => "Paused",
            }),
            Action::Version => Instance::version(),
            Action::FullConfig => Answer::of(&lock(&self.state).resources.full_config())?,
            Action::MachineConfig => Answer::of(&lock(&self.state).resources.machine)?,
            Action::Pause => self.timed("pause_vm", Operation::Pause(PauseRequest::default()))?,
            Action::Resume => self.timed("resume_vm", Operation::Resume)?,
            Action::CtrlAltDel => {
                self.now(Operation::PowerButton).map_err(Fault::of("Internal VMM error"))?;
                Answer::Empty
            }
            Action::FlushMetrics => self.flush_metrics()?,
            Action::Balloon => {
                self.balloon("Internal VMM error")?;
                Answer::of(&lock(&self.state).resources.balloon)?
            }
            Action::UpdateBalloon(update) => self.update_balloon(update.amount_mib)?,
            Action::UpdateStatistics(update) => {
                self.update_statistics(update.stats_polling_interval_s)?
            }
            Action::Statistics => return self.statistics(),
            Action::Hinting(run) => self.hinting(run)?,
            Action::UpdateDrive(update) => self.update_drive(&update)?,
            Action::UpdateNetwork(update) => self.update_network(&update)?,
            Action::Mmds => Answer::Document(self.mmds(|store| Ok(store.get()))?),
            Action::PutMmds(value) => {
                self.mmds(|store| store.put(value).map(|()| Answer::Empty))?
            }
            Action::PatchMmds(value) => {
                self.mmds(|store| store.patch(value).map(|()| Answer::Empty))?
            }
            Action::CreateSnapshot(params) => return self.create_snapshot(&params),
            Action::Drive(_) | Action::Network(_) | Action::Unplug => {
                return Err(Fault::new("PCI is not enabled"));
            }
            Action::Absent(Absent::SetPmem) => return Err(Fault::new("PCI is not enabled")),
            Action::Absent(Absent::UpdatePmem) => {
                return Err(Fault::new(format!(
                    "Pmem config error: Unable to patch the pmem device: {NO_DEVICE} Please verify \
                     the request arguments."
                )));
            }
            Action::Absent(Absent::UpdateMemoryHotplug) => {
                return Err(Fault::new(NO_DEVICE).within("Memory hotplug update error"));
            }
            Action::Absent(Absent::MemoryHotplug) => {
                return Err(Fault::new(NO_DEVICE).within("Internal VMM error"));
            }
            Action::UpdateMachine(_)
            | Action::BootSource(_)
            | Action::Vsock(_)
            | Action::Entropy(_)
            | Action::Serial(_)
            | Action::Logger(_)
            | Action::Metrics(_)
            | Action::CpuConfig(_)
            | Action::SetBalloon(_)
            | Action::MmdsConfig(_)
            | Action::Start
            | Action::LoadSnapshot(_)
            | Action::Absent(Absent::SetMemoryHotplug) => return Err(Fault::new(POST_BOOT)),
        };
        Ok(done.into())
    }

    fn timed(&self, name: &'static str, operation: Operation) -> Result<Answer, Fault> {
        let started = Instant::now();
        self.now(operation).map_err(Fault::of("Internal VMM error"))?;
        lock(&self.state).metrics.took(name, started.elapsed());
        Ok(Answer::Empty)
    }

    fn flush_metrics(&self) -> Result<Answer, Fault> {
        let fault =
            |problem: String| Fault::new(problem).within("Internal VMM error: Metrics error");
        match self.now(Operation::Metrics).map_err(Fault::of("Internal VMM error"))? {
            Document::Metrics(metrics) => {
                let state = &mut *lock(&self.state);
                let counts = state.resources.mmds.lock().counts;
                let written = state.metrics.write(&metrics, counts);
                written.map_err(|error| fault(error.to_string()))?;
                Ok(Answer::Empty)
            }
            _ => Err(fault("there are none".to_owned())),
        }
    }

    fn update_balloon(&self, amount_mib: u32) -> Result<Answer, Fault> {
        const WHAT: &str = "Balloon update error";
        let fault = |message: String| Fault::new(message).within(WHAT);
        if self.balloon(WHAT)?.state == BalloonState::DriverAbsent {
            return Err(fault("Balloon: Device not activated yet.".to_owned()));
        }
        let mut state = lock(&self.state);
        let memory_mib = state.resources.machine.mem_size_mib;
        if amount_mib as usize > memory_mib {
            return Err(fault(format!(
                "Balloon: Requested memory should be less than {memory_mib}MiB"
            )));
        }
        let target_bytes = u64::from(amount_mib) * MIB;
        let target = BalloonTarget { target_bytes, lease_ms: None };
        self.now(Operation::SetBalloon(target)).map_err(Fault::of(WHAT))?;
        if let Some(balloon) = &mut state.resources.balloon {
            balloon.amount_mib = amount_mib;
        }
        Ok(Answer::Empty)
    }

    fn update_statistics(&self, seconds: u16) -> Result<Answer, Fault> {
        const WHAT: &str = "Balloon update error";
        self.balloon(WHAT)?;
        let mut state = lock(&self.state);
        let Some(balloon) = &mut state.resources.balloon else { return Ok(Answer::Empty) };
        if (seconds == 0) != (balloon.stats_polling_interval_s == 0) {
            return Err(Fault::new(
                "Balloon: Statistics cannot be enabled/disabled after activation.",
            )
            .within(WHAT));
        }
        if seconds != 0 {
            let interval = StatisticsInterval { interval_seconds: seconds.into() };
            self.now(Operation::SetStatisticsInterval(interval)).map_err(Fault::of(WHAT))?;
            balloon.stats_polling_interval_s = seconds;
        }
        Ok(Answer::Empty)
    }

    /// `GET /balloon/statistics`: values that are not older than the interval, or the last ones.
    fn statistics(&self) -> Result<Passed, Fault> {
        const WHAT: &str = "Internal VMM error";
        let info = self.balloon(WHAT)?;
        let interval = lock(&self.state)
            .resources
            .balloon
            .as_ref()
            .map_or(0, |balloon| balloon.stats_polling_interval_s);
        if interval == 0 {
            return Err(
                Fault::new("Balloon: Received stats query when stats are disabled.").within(WHAT)
            );
        }
        let sizes = json!({
            "target_pages": info.target_bytes / PAGE_BYTES,
            "actual_pages": info.actual_bytes / PAGE_BYTES,
            "target_mib": info.target_bytes / MIB,
            "actual_mib": info.actual_bytes / MIB,
        });
        if info.state == BalloonState::DriverAbsent {
            return Ok(Answer::Document(sizes).into());
        }
        let max_age = Some(Duration::from_secs(u64::from(interval) + 1));
        let answer = move |answer| Ok(Answer::Document(statistics_document(&sizes, answer)));
        match self.vm.handle(Operation::Statistics { max_age }, Vec::new()) {
            Ok(Outcome::Await(wait)) => Ok(Passed::Await(wait, Box::new(answer))),
            Ok(Outcome::Done(document)) => answer(Ok(*document)).map(Passed::Done),
            Err(error) => answer(Err(error)).map(Passed::Done),
        }
    }

    /// Starts, ends or describes a run of hints.
    fn hinting(&self, run: HintRun) -> Result<Answer, Fault> {
        const WHAT: &str = "Balloon update error";
        let fault = |message: &'static str| Err(Fault::new(message).within(WHAT));
        let info = self.balloon(WHAT)?;
        let is_enabled = lock(&self.state)
            .resources
            .balloon
            .as_ref()
            .is_some_and(|known| known.free_page_hinting);
        if !is_enabled {
            return fault("Balloon: Attempting to use hinting when not enabled");
        }
        if run != HintRun::Describe && info.state == BalloonState::DriverAbsent {
            return fault("Balloon: Device not activated yet.");
        }
        match self.now(Operation::HintRun(run)).map_err(Fault::of(WHAT))? {
            Document::HintRun(status) if run == HintRun::Describe => Ok(Answer::Document(json!({
                "host_cmd": status.host_command,
                "guest_cmd": status.driver_command,
            }))),
            _ => Ok(Answer::Empty),
        }
    }

    fn update_drive(&self, update: &BlockDeviceUpdateConfig) -> Result<Answer, Fault> {
        let fault = |problem: &str| {
            Fault::new(format!(
                "Drive config error: Unable to patch the block device: {problem} Please verify the \
                 request arguments."
            ))
        };
        let mut state = lock(&self.state);
        let drives = &mut state.resources.drives;
        let index = drives.iter().position(|drive| drive.drive_id == update.drive_id);
        let index = index.ok_or_else(|| fault(NO_DEVICE))?;
        if update.path_on_host.is_none() && update.rate_limiter.is_none() {
            return Err(fault("Block: Running method expected different backend."));
        }
        if let Some(path) = &update.path_on_host {
            let backing =
                |problem: &dyn Display| fault(&format!("Block: {}", backing_file(problem, path)));
            if path.is_empty() {
                return Err(backing(&io::Error::from_raw_os_error(libc::ENOENT)));
            }
            let change = DiskResize {
                device: format!("disk{index}"),
                size_bytes: None,
                path: Some(absolute(&self.directory, Path::new(path))),
            };
            self.now(Operation::ResizeDisk(change)).map_err(|error| backing(&error))?;
            drives[index].path_on_host = Some(path.clone());
        }
        if let Some(limiter) = &update.rate_limiter {
            let change =
                LimitsChange { device: format!("disk{index}"), limits: changed_limits(limiter) };
            self.now(Operation::SetLimits(change)).map_err(Fault::of("Drive config error"))?;
            let mut limits = drives[index].rate_limiter.unwrap_or_default();
            limits.bandwidth = limiter.bandwidth.or(limits.bandwidth);
            limits.ops = limiter.ops.or(limits.ops);
            drives[index].rate_limiter = in_use(limits);
        }
        Ok(Answer::Empty)
    }

    /// Limits of a network device, which Ebb has under a name for each direction.
    fn update_network(&self, update: &NetworkInterfaceUpdateConfig) -> Result<Answer, Fault> {
        const WHAT: &str = "Network config error: Unable to update the net device";
        let mut state = lock(&self.state);
        let networks = &mut state.resources.networks;
        let index = networks.iter().position(|network| network.iface_id == update.iface_id);
        let index = index.ok_or_else(|| Fault::new(NO_DEVICE).within(WHAT))?;
        let network = &mut networks[index];
        let directions = [
            ("rx", &update.rx_rate_limiter, &mut network.rx_rate_limiter),
            ("tx", &update.tx_rate_limiter, &mut network.tx_rate_limiter),
        ];
        for (direction, limiter, known) in directions {
            let Some(limiter) = limiter else { continue };
            let device = format!("net{index}_{direction}");
            let change = LimitsChange { device, limits: changed_limits(limiter) };
            self.now(Operation::SetLimits(change)).map_err(Fault::of("Network config error"))?;
            let mut limits = known.unwrap_or_default();
            limits.bandwidth = limiter.bandwidth.or(limits.bandwidth);
            limits.ops = limiter.ops.or(limits.ops);
            *known = in_use(limits);
        }
        Ok(Answer::Empty)
    }

    /// Uses the metadata of a machine whose guest can read them.
    fn mmds<T>(&self, with: impl FnOnce(&mut Store) -> Result<T, StoreError>) -> Result<T, Fault> {
        let resources = &lock(&self.state).resources;
        let has = resources.mmds_config.as_ref().ok_or(StoreError::Uninitialized);
        has.and_then(|_| with(&mut resources.mmds.lock().store)).map_err(Fault::of_store)
    }

    fn create_snapshot(&self, params: &CreateSnapshotParams) -> Result<Passed, Fault> {
        const WHAT: &str = "Create snapshot error";
        let fault = |message: String| Fault::new(message).within(WHAT);
        if params.snapshot_type == SnapshotType::Diff {
            return Err(Fault::not_served("snapshots are Full; a snapshot of Ebb has no Diff"));
        }
        if self.vm_state() != VmState::Paused {
            return Err(fault(
                "Cannot save the microVM state: Operation not allowed: save/restore unavailable \
                 while running"
                    .to_owned(),
            ));
        }
        let path = |path: &Path| absolute(&self.directory, path);
        let companion = self.companion.as_ref();
        let companion = companion.ok_or_else(|| fault("there is no companion".to_owned()))?;
        let resources = &lock(&self.state).resources;
        write_state(companion, &path(&params.snapshot_path), resources).map_err(|problem| {
            fault(format!("Cannot perform open on the snapshot backing file: {problem}"))
        })?;
        let started = Instant::now();
        let target = SnapshotTarget { path: path(&params.mem_file_path) };
        let memory = "Create snapshot error: Cannot perform open on the memory backing file";
        let outcome = self.vm.handle(Operation::Snapshot(target), Vec::new());
        let state = self.state.clone();
        let answer = move |answer: Result<Document, ControlError>| {
            answer.map_err(Fault::of(WHAT))?;
            lock(&state).metrics.took("full_create_snapshot", started.elapsed());
            Ok(Answer::Empty)
        };
        match outcome.map_err(Fault::of(memory))? {
            Outcome::Await(wait) => Ok(Passed::Await(wait, Box::new(answer))),
            Outcome::Done(document) => answer(Ok(*document)).map(Passed::Done),
        }
    }
}

/// Statistics with Firecracker's names; after an error, the last ones that are known.
fn statistics_document(sizes: &Value, answer: Result<Document, ControlError>) -> Value {
    let values = match answer {
        Ok(Document::Statistics(document)) => Some(document.statistics),
        Err(ControlError::NoFreshStatistics { last_known, .. }) => Some(last_known.statistics),
        _ => None,
    };
    let mut document = sizes.clone();
    let Some(values) = values else { return document };
    let known = without_null(&json!({
        "swap_in": values.swap_in_bytes,
        "swap_out": values.swap_out_bytes,
        "major_faults": values.major_faults,
        "minor_faults": values.minor_faults,
        "free_memory": values.free_memory_bytes,
        "total_memory": values.total_memory_bytes,
        "available_memory": values.available_memory_bytes,
        "disk_caches": values.disk_caches_bytes,
        "hugetlb_allocations": values.hugetlb_allocations,
        "hugetlb_failures": values.hugetlb_failures,
        "oom_kill": values.oom_kills,
        "alloc_stall": values.allocation_stalls,
        "async_scan": values.async_scan_bytes,
        "direct_scan": values.direct_scan_bytes,
        "async_reclaim": values.async_reclaim_bytes,
        "direct_reclaim": values.direct_reclaim_bytes,
    }));
    if let (Value::Object(document), Value::Object(known)) = (&mut document, known) {
        document.extend(known);
    }
    document
}

impl Door for Running {
    fn serve(&self, request: &Request<'_>, _: Vec<OwnedFd>) -> Served {
        let routed = route(request);
        let form = routed.as_ref().map_or(Use::Current, |(_, form)| *form);
        let result = routed.and_then(|(action, _)| self.execute(action));
        let (method, name) = counted(request);
        lock(&self.state).metrics.count(method, name, result.is_err());
        let reply = match result {
            Ok(Passed::Await(wait, answer)) => {
                return Served::Await(Pending::of(wait, move |late| fault::reply(answer(late))));
            }
            Ok(Passed::Done(answer)) => fault::reply(Ok(answer)),
            Err(fault) => fault::reply(Err(fault)),
        };
        Served::Done(Reply { use_of: form, ..reply })
    }

    fn refuse(&self, problem: Problem) -> Reply {
        refuse(&problem)
    }

    fn max_body_bytes(&self) -> usize {
        self.instance.max_body_bytes
    }

    fn on_time(&self, now: Instant) -> Option<Instant> {
        let (is_due, next) = lock(&self.state).metrics.due(now);
        if is_due && let Err(fault) = self.flush_metrics() {
            tracing::debug!("no metrics: {}", fault.message());
        }
        next
    }
}
