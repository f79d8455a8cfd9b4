//! Routes: a pure function from a request to an [`Action`].

use serde_json::Value;

use super::documents::{
    ActionBody, ActionType, BalloonDeviceConfig, BalloonUpdateConfig, BalloonUpdateStatsConfig,
    BlockDeviceConfig, BlockDeviceUpdateConfig, BootSourceConfig, CreateSnapshotParams,
    CustomCpuTemplate, EntropyDeviceConfig, LoadSnapshotConfig, LoggerConfig, MachineConfig,
    MachineConfigUpdate, MemoryHotplugConfig, MemoryHotplugSizeUpdate, MetricsConfig, MmdsConfig,
    MmdsVersion, NetworkInterfaceConfig, NetworkInterfaceUpdateConfig, PmemConfig,
    PmemDeviceUpdateConfig, SerialConfig, StartHintingCmd, Vm, VmState, VsockDeviceConfig, parse,
};
use super::fault::{EMPTY_ID, Fault};
use crate::api::balloon::{AfterHints, HintRun};
use crate::api::http::Request;
use crate::api::reply::Use;

/// What a request asks for.
#[derive(Debug)]
pub(super) enum Action {
    InstanceInfo,
    Version,
    FullConfig,
    MachineConfig,
    UpdateMachine(MachineConfigUpdate),
    BootSource(BootSourceConfig),
    Drive(BlockDeviceConfig),
    UpdateDrive(BlockDeviceUpdateConfig),
    Network(NetworkInterfaceConfig),
    UpdateNetwork(NetworkInterfaceUpdateConfig),
    Vsock(VsockDeviceConfig),
    Entropy(EntropyDeviceConfig),
    Serial(SerialConfig),
    Logger(LoggerConfig),
    Metrics(MetricsConfig),
    CpuConfig(CustomCpuTemplate),
    Balloon,
    SetBalloon(BalloonDeviceConfig),
    UpdateBalloon(BalloonUpdateConfig),
    Statistics,
    UpdateStatistics(BalloonUpdateStatsConfig),
    Hinting(HintRun),
    Mmds,
    PutMmds(Value),
    PatchMmds(Value),
    MmdsConfig(MmdsConfig),
    Start,
    FlushMetrics,
    CtrlAltDel,
    Pause,
    Resume,
    CreateSnapshot(CreateSnapshotParams),
    LoadSnapshot(LoadSnapshotConfig),
    /// A device that this monitor does not have: what Firecracker calls it.
    Absent(Absent),
    /// Removal of a device.
    Unplug,
}

/// A request about a device that this monitor does not have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Absent {
    SetPmem,
    UpdatePmem,
    SetMemoryHotplug,
    UpdateMemoryHotplug,
    MemoryHotplug,
}

/// Why a document for `/snapshot/load` is not one.
const NO_MEMORY: &str = "missing field: either `mem_backend` or `mem_file_path` is required";
const TWO_MEMORIES: &str =
    "too many fields: either `mem_backend` or `mem_file_path` exclusively is required";

/// The action of `request`, and whether its form is deprecated.
pub(super) fn route(request: &Request<'_>) -> Result<(Action, Use), Fault> {
    let whole = match request.query {
        // Firecracker does not know queries.
        Some(query) => format!("{}?{query}", request.path),
        None => request.path.to_owned(),
    };
    let mut path = whole.trim_start_matches('/').split_terminator('/');
    let first = path.next().unwrap_or_default();
    let body = Some(request.body).filter(|body| !body.is_empty());
    let current = |action| Ok((action, Use::Current));
    match (request.method, first, body) {
        ("GET", _, None) => current(get(first, &mut path)?),
        ("GET", _, Some(_)) => Err(Fault::new("GET request cannot have a body.")),
        ("PUT", _, Some(body)) => put(first, &mut path, body),
        ("PUT", _, None) => Err(Fault::new("Empty PUT request.")),
        ("PATCH", "balloon", body) => current(patch_balloon(&mut path, body)?),
        ("PATCH", _, Some(body)) => patch(first, &mut path, body),
        ("PATCH", _, None) => Err(Fault::new("Empty PATCH request.")),
        ("DELETE", "drives" | "pmem" | "network-interfaces", None) => {
            checked_id(path.next())?;
            current(Action::Unplug)
        }
        ("DELETE", _, Some(_)) => Err(Fault::new("Empty Delete request.")),
        (method, first, _) => Err(Fault::invalid_path(method, first)),
    }
}

fn get<'a>(first: &str, path: &mut impl Iterator<Item = &'a str>) -> Result<Action, Fault> {
    Ok(match first {
        "" => Action::InstanceInfo,
        "balloon" => match path.next() {
            None => Action::Balloon,
            Some("statistics") => Action::Statistics,
            Some("hinting") => match path.next() {
                Some("status") => Action::Hinting(HintRun::Describe),
                other => return Err(unrecognized("GET", &hinting(other))),
            },
            Some(other) => return Err(unrecognized("GET", other)),
        },
        "version" => Action::Version,
        "vm" if path.next() == Some("config") => Action::FullConfig,
        "machine-config" => Action::MachineConfig,
        "mmds" => Action::Mmds,
        "hotplug" if path.next() == Some("memory") => Action::Absent(Absent::MemoryHotplug),
        first => return Err(Fault::invalid_path("GET", first)),
    })
}

fn put<'a>(
    first: &str,
    path: &mut impl Iterator<Item = &'a str>,
    body: &[u8],
) -> Result<(Action, Use), Fault> {
    let mut form = Use::Current;
    let mut deprecated = |is: bool| {
        if is {
            form = Use::Deprecated;
        }
    };
    let action = match first {
        "actions" => match parse::<ActionBody>(body)?.action_type {
            ActionType::FlushMetrics => Action::FlushMetrics,
            ActionType::InstanceStart => Action::Start,
            ActionType::SendCtrlAltDel => Action::CtrlAltDel,
        },
        "balloon" => Action::SetBalloon(parse(body)?),
        "boot-source" => Action::BootSource(parse(body)?),
        "cpu-config" => Action::CpuConfig(parse(body)?),
        "drives" => {
            let id = checked_id(path.next())?;
            let drive: BlockDeviceConfig = parse(body)?;
            same_id(id, &drive.drive_id)?;
            Action::Drive(drive)
        }
        "pmem" => {
            let id = checked_id(path.next())?;
            same_id(id, &parse::<PmemConfig>(body)?.id)?;
            Action::Absent(Absent::SetPmem)
        }
        "logger" => Action::Logger(parse(body)?),
        "serial" => Action::Serial(parse(body)?),
        "machine-config" => {
            let config: MachineConfig = parse(body)?;
            deprecated(config.cpu_template.is_some());
            Action::UpdateMachine(config.into())
        }
        "metrics" => Action::Metrics(parse(body)?),
        "mmds" => match path.next() {
            None => Action::PutMmds(parse(body)?),
            Some("config") => {
                let config: MmdsConfig = parse(body)?;
                deprecated(config.version == MmdsVersion::V1);
                Action::MmdsConfig(config)
            }
            Some(other) => return Err(unrecognized("PUT", other)),
        },
        "network-interfaces" => {
            let id = checked_id(path.next())?;
            let network: NetworkInterfaceConfig = parse(body)?;
            same_interface(id, &network.iface_id)?;
            Action::Network(network)
        }
        "snapshot" => match path.next() {
            Some("create") => Action::CreateSnapshot(parse(body)?),
            Some("load") => {
                let load: LoadSnapshotConfig = parse(body)?;
                match (&load.mem_backend, &load.mem_file_path) {
                    (Some(_), Some(_)) => return Err(Fault::json(&TWO_MEMORIES)),
                    (None, None) => return Err(Fault::json(&NO_MEMORY)),
                    _ => deprecated(load.mem_file_path.is_some() || load.enable_diff_snapshots),
                }
                Action::LoadSnapshot(load)
            }
            Some(other) => {
                return Err(Fault::invalid_path("PUT", &format!("/snapshot/{other}")));
            }
            None => return Err(Fault::new("Missing snapshot operation type.")),
        },
        "vsock" => {
            let vsock: VsockDeviceConfig = parse(body)?;
            deprecated(vsock.vsock_id.is_some());
            Action::Vsock(vsock)
        }
        "entropy" => Action::Entropy(parse(body)?),
        "hotplug" if path.next() == Some("memory") => {
            parse::<MemoryHotplugConfig>(body)?;
            Action::Absent(Absent::SetMemoryHotplug)
        }
        first => return Err(Fault::invalid_path("PUT", first)),
    };
    Ok((action, form))
}

fn patch<'a>(
    first: &str,
    path: &mut impl Iterator<Item = &'a str>,
    body: &[u8],
) -> Result<(Action, Use), Fault> {
    let mut form = Use::Current;
    let action = match first {
        "drives" => {
            let id = checked_id(path.next())?;
            let drive: BlockDeviceUpdateConfig = parse(body)?;
            same_id(id, &drive.drive_id)?;
            Action::UpdateDrive(drive)
        }
        "machine-config" => {
            let update: MachineConfigUpdate = parse(body)?;
            if update == MachineConfigUpdate::default() {
                return Err(Fault::new("Empty PATCH request."));
            }
            if update.cpu_template.is_some() {
                form = Use::Deprecated;
            }
            Action::UpdateMachine(update)
        }
        "mmds" => Action::PatchMmds(parse(body)?),
        "network-interfaces" => {
            let id = checked_id(path.next())?;
            let network: NetworkInterfaceUpdateConfig = parse(body)?;
            same_interface(id, &network.iface_id)?;
            Action::UpdateNetwork(network)
        }
        "pmem" => {
            let id = checked_id(path.next())?;
            same_id(id, &parse::<PmemDeviceUpdateConfig>(body)?.id)?;
            Action::Absent(Absent::UpdatePmem)
        }
        "vm" => match parse::<Vm>(body)?.state {
            VmState::Paused => Action::Pause,
            VmState::Resumed => Action::Resume,
        },
        "hotplug" if path.next() == Some("memory") => {
            parse::<MemoryHotplugSizeUpdate>(body)?;
            Action::Absent(Absent::UpdateMemoryHotplug)
        }
        first => return Err(Fault::invalid_path("PATCH", first)),
    };
    Ok((action, form))
}

fn patch_balloon<'a>(
    path: &mut impl Iterator<Item = &'a str>,
    body: Option<&[u8]>,
) -> Result<Action, Fault> {
    match (path.next(), body) {
        (Some("statistics"), Some(body)) => Ok(Action::UpdateStatistics(parse(body)?)),
        (Some("hinting"), body) => match path.next() {
            Some("start") => {
                let start = body.map(parse::<StartHintingCmd>).transpose()?.unwrap_or_default();
                let after =
                    if start.acknowledge_on_stop { AfterHints::Release } else { AfterHints::Keep };
                Ok(Action::Hinting(HintRun::Start(after)))
            }
            Some("stop") => Ok(Action::Hinting(HintRun::Stop)),
            other => Err(unrecognized("PATCH", &hinting(other))),
        },
        (_, Some(body)) => Ok(Action::UpdateBalloon(parse(body)?)),
        (_, None) => Err(Fault::new("Empty PATCH request.")),
    }
}

fn hinting(rest: Option<&str>) -> String {
    format!("/hinting/{}", rest.unwrap_or_default())
}

fn unrecognized(method: &str, path: &str) -> Fault {
    Fault::new(format!("Unrecognized {method} request path `{path}`."))
}

fn checked_id(id: Option<&str>) -> Result<&str, Fault> {
    let id = id.filter(|id| !id.is_empty()).ok_or_else(|| Fault::new(EMPTY_ID))?;
    if id.chars().all(|letter| letter == '_' || letter.is_alphanumeric()) {
        return Ok(id);
    }
    Err(Fault::new("API Resource IDs can only contain alphanumeric characters and underscores."))
}

fn same_id(path: &str, body: &str) -> Result<(), Fault> {
    if path == body {
        return Ok(());
    }
    Err(Fault::new("The id from the path does not match the id from the body!"))
}

fn same_interface(path: &str, body: &str) -> Result<(), Fault> {
    if path == body {
        return Ok(());
    }
    let message =
        format!("The id from the path [{path}] does not match the id from the body [{body}]!");
    Err(Fault::new(message))
}
