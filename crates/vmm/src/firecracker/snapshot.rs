//! Snapshots by Firecracker's two paths.
//!
//! The memory file is a whole snapshot of Ebb's. The state file has the documents of this API,
//! which no machine knows: names of drives, the boot source. It begins with the magic of snapshots, so
//! that the companion lets a later one replace it.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};

use super::documents::{LoadSnapshotConfig, MemBackendType, NetworkOverride, VmmConfig};
use super::machine::{Host, disks, nets};
use super::resources::Resources;
use crate::config::{RebootAction, VsockOption};
use crate::isolation::Companion;
use crate::snapshot::{DescribedPaths, MAGIC, Overrides, SnapshotFile};
use crate::vm::Start;
use ebb_kvm_clock::ClockPolicy;

/// Longest state file that is read, in bytes.
const MOST_STATE_BYTES: u64 = 4 << 20;

/// A snapshot that is about to run.
pub(super) struct Loaded {
    pub snapshot: SnapshotFile,
    pub overrides: Overrides,
    pub start: Start,
}

/// Opens the files of a snapshot. Only images that its state file names are opened.
pub(super) fn load(
    resources: &mut Resources,
    load: LoadSnapshotConfig,
    host: &Host,
) -> Result<Loaded, String> {
    let config = read_state(&load.snapshot_path)?;
    let memory = match (load.mem_backend, load.mem_file_path) {
        (Some(backend), _) if backend.backend_type == MemBackendType::Uffd => {
            return Err(
                "Failed to load guest memory: Ebb has no Uffd backend: it reads the memory \
                        file when the guest touches a page"
                    .to_owned(),
            );
        }
        (Some(backend), _) => backend.backend_path,
        (None, path) => path.unwrap_or_default(),
    };
    let snapshot = SnapshotFile::open(&memory)
        .and_then(|snapshot| snapshot.check_ownership().map(|()| snapshot))
        .map_err(|error| format!("Failed to load guest memory: {error}"))?;
    let mut restored = Resources::new(0);
    restored.mmds = resources.mmds.clone();
    restored.restore(config);
    for NetworkOverride { iface_id, host_dev_name } in load.network_overrides {
        let known = restored.networks.iter_mut().find(|network| network.iface_id == iface_id);
        let known = known.ok_or_else(|| {
            format!("Failed to override the network device {iface_id}: there is no such device")
        })?;
        known.host_dev_name = host_dev_name;
    }
    // What was put there before; a snapshot has no metadata.
    let nets = nets(&restored);
    let vsock = match (load.vsock_override, &restored.vsock) {
        (Some(given), _) => Some(given.uds_path),
        (None, saved) => saved.as_ref().map(|vsock| vsock.uds_path.clone()),
    };
    let clock = load.clock_realtime.then_some(ClockPolicy::CatchUp);
    let overrides = Overrides {
        serial: host.serial(resources),
        api: host.api.clone(),
        seccomp: host.seccomp,
        isolation: host.isolation(&restored),
        clock,
        on_reboot: Some(RebootAction::Exit),
        disks: disks(&restored.drives),
        nets: nets.map_err(|fault| fault.message().to_owned())?,
        vsock: vsock.map(|path| VsockOption { cid: None, path: path.into() }),
        described_paths: DescribedPaths::Ignore,
        ..Overrides::default()
    };
    let machine = snapshot.state.machine.clone().into_vm_config(overrides.clone());
    let machine = machine.map_err(|error| error.to_string())?;
    snapshot.state.check_disks(&machine.disks).map_err(|error| error.to_string())?;
    resources.restore(restored.full_config());
    let start = if load.resume_vm { Start::Running } else { Start::Paused };
    Ok(Loaded { snapshot, overrides, start })
}

fn read_state(path: &Path) -> Result<VmmConfig, String> {
    let part = "Failed to get snapshot state from file";
    let file = File::open(path)
        .map_err(|error| format!("{part}: Failed to open snapshot file: {error}"))?;
    let failed = |problem: String| format!("{part}: Failed to load snapshot state: {problem}");
    let mut text = Vec::new();
    file.take(MOST_STATE_BYTES)
        .read_to_end(&mut text)
        .map_err(|error| failed(error.to_string()))?;
    let state = text.strip_prefix(MAGIC).ok_or_else(|| {
        failed("it is not the state file of a snapshot that `ebb firecracker` has taken".to_owned())
    })?;
    serde_json::from_slice(state).map_err(|error| failed(error.to_string()))
}

/// Writes the state file through the companion.
pub(super) fn write_state(
    companion: &Companion,
    path: &Path,
    resources: &Resources,
) -> Result<(), String> {
    let (file, new) = companion.create(path).map_err(|error| error.to_string())?;
    let mut text = MAGIC.to_vec();
    serde_json::to_writer(&mut text, &resources.full_config())
        .map_err(|error| error.to_string())?;
    File::from(file).write_all(&text).map_err(|error| error.to_string())?;
    new.publish().map_err(|error| error.to_string())
}

/// The path of a file that a client names, from the directory in which the monitor was started.
pub(super) fn absolute(directory: &Path, path: &Path) -> PathBuf {
    directory.join(path)
}
