//! The API before the start of the machine: a state machine that ends with a [`Wish`].

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::Serialize;
use serde_json::{Value, json};

use super::documents::{LoadSnapshotConfig, MetricsConfig};
use super::fault::{self, Answer, Fault, PRE_BOOT};
use super::machine::{self, Host};
use super::metrics::MetricsFile;
use super::request::{Absent, Action, route};
use super::resources::Resources;
use super::snapshot::{self, Loaded};
use super::{Instance, Log};
use crate::api::door::{Door, Pending, Served};
use crate::api::http::Request;
use crate::api::reply::{Problem, Reply, Status, Use};
use crate::config::VmConfig;

/// The machine that a client has started.
pub(super) enum Wish {
    /// Boots its kernel.
    Boot(Box<VmConfig>),
    /// Continues from a snapshot.
    Load(Box<Loaded>),
}

/// Whether the machine was started; the client that has asked for it waits.
pub(super) type Started = Arc<Mutex<Option<Result<(), String>>>>;

/// The API before the start.
pub(super) struct PreBoot {
    instance: Instance,
    host: Host,
    state: Mutex<State>,
    started: Started,
}

struct State {
    resources: Resources,
    metrics: MetricsFile,
    wish: Option<Wish>,
    log: Log,
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl PreBoot {
    pub(super) fn new(
        instance: Instance,
        host: Host,
        resources: Resources,
        metrics: MetricsFile,
        started: Started,
    ) -> Self {
        let state = Mutex::new(State { resources, metrics, wish: None, log: Log::default() });
        Self { instance, host, state, started }
    }

    /// Whether a client has started the machine.
    pub(super) fn is_done(&self) -> bool {
        lock(&self.state).wish.is_some()
    }

    /// The machine that a client has started, what was configured, and the metrics.
    pub(super) fn take(&self) -> (Option<Wish>, Resources, MetricsFile) {
        let mut state = lock(&self.state);
        let resources = std::mem::replace(&mut state.resources, Resources::new(0));
        (state.wish.take(), resources, std::mem::take(&mut state.metrics))
    }

    fn execute(&self, action: Action) -> Result<Answer, Fault> {
        let mut state = lock(&self.state);
        let State { resources, metrics, wish, log } = &mut *state;
        match action {
            Action::InstanceInfo => return Ok(self.instance.info("Not started")),
            Action::Version => return Ok(Instance::version()),
            Action::FullConfig => return Answer::of(&resources.full_config()),
            Action::MachineConfig => return Answer::of(&resources.machine),
            Action::UpdateMachine(update) => resources.update_machine(&update)?,
            Action::BootSource(boot) => resources.set_boot(boot)?,
            Action::Drive(drive) => resources.set_drive(drive)?,
            Action::Network(network) => resources.set_network(network)?,
            Action::Vsock(vsock) => resources.set_vsock(vsock)?,
            Action::Entropy(entropy) => resources.set_entropy(entropy),
            Action::Serial(serial) => resources.serial = serial,
            Action::CpuConfig(cpu) => resources.cpu = cpu,
            Action::SetBalloon(balloon) => resources.set_balloon(balloon)?,
            Action::Balloon => match &resources.balloon {
                Some(balloon) => return Answer::of(balloon),
                None => {
                    return Err(Fault::new("Balloon config error: No balloon device found."));
                }
            },
            Action::Logger(logger) => {
                log.configure(logger, self.instance.set_log_filter).map_err(|error| {
                    Fault::new(format!("Logger error: Failed to open target file: {error}"))
                })?;
            }
            Action::Metrics(MetricsConfig { metrics_path }) => {
                metrics.open(&metrics_path).map_err(|problem| {
                    Fault::new(format!(
                        "Metrics error: Cannot initialize the metrics system due to bad user \
                         input: {problem}"
                    ))
                })?;
            }
            Action::Mmds => return Ok(Answer::Document(resources.mmds.lock().store.get())),
            Action::PutMmds(value) => {
                resources.mmds.lock().store.put(value).map_err(Fault::of_store)?;
            }
            Action::PatchMmds(value) => {
                resources.mmds.lock().store.patch(value).map_err(Fault::of_store)?;
            }
            Action::MmdsConfig(config) => resources.set_mmds_config(config)?,
            Action::Start => {
                *wish = Some(Wish::Boot(Box::new(machine::build(resources, &self.host)?)));
            }
            Action::LoadSnapshot(load) => {
                *wish = Some(Wish::Load(Box::new(self.load(resources, load)?)));
            }
            Action::Absent(Absent::SetPmem) => {
                return Err(Fault::not_served("a machine of Ebb has no pmem devices"));
            }
            Action::Absent(Absent::SetMemoryHotplug) => {
                return Err(Fault::not_served("a machine of Ebb has no memory hotplug"));
            }
            Action::CreateSnapshot(_)
            | Action::FlushMetrics
            | Action::CtrlAltDel
            | Action::Pause
            | Action::Resume
            | Action::Statistics
            | Action::Hinting(_)
            | Action::UpdateBalloon(_)
            | Action::UpdateStatistics(_)
            | Action::UpdateDrive(_)
            | Action::UpdateNetwork(_)
            | Action::Absent(_)
            | Action::Unplug => return Err(Fault::new(PRE_BOOT)),
        }
        Ok(Answer::Empty)
    }

    fn load(&self, resources: &mut Resources, load: LoadSnapshotConfig) -> Result<Loaded, Fault> {
        let fault = |message: String| Fault::new(message).within("Load snapshot error");
        if resources.is_configured {
            return Err(fault(
                "Loading a microVM snapshot not allowed after configuring boot-specific \
                 resources."
                    .to_owned(),
            ));
        }
        snapshot::load(resources, load, &self.host)
            .map_err(|problem| fault(format!("Failed to restore from snapshot: {problem}")))
    }
}

impl Door for PreBoot {
    fn serve(&self, request: &Request<'_>, _: Vec<OwnedFd>) -> Served {
        let routed = route(request);
        let form = routed.as_ref().map_or(Use::Current, |(_, form)| *form);
        let is_load = matches!(routed, Ok((Action::LoadSnapshot(_), _)));
        let result = routed.and_then(|(action, _)| self.execute(action));
        let (method, name) = counted(request);
        lock(&self.state).metrics.count(method, name, result.is_err());
        if result.is_ok() && self.is_done() {
            let started = self.started.clone();
            let part = if is_load { "Load snapshot error" } else { "Start microvm error" };
            return Served::Await(Pending::new(move || {
                let started = lock(&started).clone()?;
                let result = started.map(|()| Answer::Empty);
                let result = result.map_err(|problem| Fault::new(problem).within(part));
                Some(Reply { use_of: form, ..fault::reply(result) })
            }));
        }
        Served::Done(Reply { use_of: form, ..fault::reply(result) })
    }

    fn refuse(&self, problem: Problem) -> Reply {
        refuse(&problem)
    }

    fn max_body_bytes(&self) -> usize {
        self.instance.max_body_bytes
    }
}

/// The reply to what is not HTTP as Firecracker knows it, or is too large: its own text is longer.
pub(super) fn refuse(problem: &Problem) -> Reply {
    let status = match problem.status {
        Status::ServiceUnavailable => Status::ServiceUnavailable,
        _ => Status::BadRequest,
    };
    Reply::json(status, &json!({ "error": problem.detail.message }))
}

/// The names under which a request is counted: Firecracker's.
pub(super) fn counted(request: &Request<'_>) -> (&'static str, &'static str) {
    let method = match request.method {
        "GET" => "get_api_requests",
        "PUT" => "put_api_requests",
        "PATCH" => "patch_api_requests",
        _ => "other_api_requests",
    };
    let first = request.path.trim_start_matches('/').split('/').next().unwrap_or_default();
    let name = match first {
        "" => "instance_info",
        "actions" => "actions",
        "balloon" => "balloon",
        "boot-source" => "boot_source",
        "cpu-config" => "cpu_cfg",
        "drives" => "drive",
        "logger" => "logger",
        "machine-config" => "machine_cfg",
        "metrics" => "metrics",
        "mmds" => "mmds",
        "network-interfaces" => "network",
        "serial" => "serial",
        "version" => "vmm_version",
        "vsock" => "vsock",
        _ => "other",
    };
    (method, name)
}

impl Instance {
    /// `GET /`.
    pub(super) fn info(&self, state: &str) -> Answer {
        Answer::Document(json!({
            "id": self.id,
            "state": state,
            "vmm_version": super::VERSION,
            "app_name": "Firecracker",
        }))
    }

    /// `GET /version`.
    pub(super) fn version() -> Answer {
        Answer::Document(json!({ "firecracker_version": super::VERSION }))
    }
}

/// A document without the members that are null.
pub(super) fn without_null(document: &impl Serialize) -> Value {
    let mut value = serde_json::to_value(document).unwrap_or_default();
    if let Some(members) = value.as_object_mut() {
        members.retain(|_, member| !member.is_null());
    }
    value
}
