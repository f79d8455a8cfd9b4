//! The API of Firecracker, for its clients: a second door to the same machine.
//!
//! Before the start, one thread with the rights of the user who started the program serves the API
//! and collects documents; nothing of a guest exists. `InstanceStart` or `/snapshot/load` makes a
//! [`VmConfig`](crate::config::VmConfig) of them, and the machine starts as that of `ebb run` does,
//! with the same socket and the clients who are connected. From then on each request becomes an
//! operation of [`Machine`](crate::api::control::Machine).
//!
//! | module | contents |
//! | --- | --- |
//! | `documents` | the JSON documents, pure |
//! | `request` | a request -> an action, pure |
//! | `fault` | replies and refusals |
//! | `resources` | what was configured, and its checks |
//! | `machine` | from documents to a configuration of a machine |
//! | `snapshot` | the two files of a snapshot |
//! | `metrics` | the metrics file |
//! | `door`, `running` | the API before and after the start |

mod documents;
mod door;
mod fault;
mod machine;
mod metrics;
mod request;
mod resources;
mod running;
mod snapshot;

use std::fs::OpenOptions;
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use thiserror::Error;

use crate::api::ApiSocket;
use crate::api::door::Door;
use crate::api::server::{Clients, Limits};
use crate::config::{SerialConfig, Switch};
use crate::exit::GuestExit;
use crate::isolation::IsolationConfig;
use crate::vm::{Front, Signals, VmError, boot_behind, restore_behind};

use documents::{LogLevel, LoggerConfig, VmmConfig};
use door::{PreBoot, Started, Wish};
use machine::Host;
use metrics::MetricsFile;
use resources::Resources;
use running::{Running, State};

/// The version of Firecracker whose API is served.
pub const VERSION: &str = "1.16.1";
/// Longest body of a request, in bytes, as Firecracker has it.
pub const MAX_PAYLOAD_BYTES: usize = 51_200;
/// The largest value that `--http-api-max-payload-size` may have here, in bytes.
pub const MOST_PAYLOAD_BYTES: usize = 16 << 20;

/// What the command line says.
#[derive(Debug, Clone)]
pub struct Options {
    /// Path of the API's socket; `None` for a machine without an API.
    pub api_sock: Option<PathBuf>,
    /// A file with the configuration of a machine, which is then started at once.
    pub config_file: Option<PathBuf>,
    /// A file with the first metadata.
    pub metadata: Option<PathBuf>,
    /// Name of the machine.
    pub id: String,
    /// File of the log.
    pub log_path: Option<PathBuf>,
    /// File of the metrics.
    pub metrics_path: Option<PathBuf>,
    /// Longest body of a request, in bytes.
    pub max_payload_bytes: usize,
    /// Longest metadata, in bytes.
    pub mmds_bytes: usize,
    /// Whether a client expects a PCI bus: it changes only the kernel's command line.
    pub pci: Switch,
    /// The guest's first serial line, if no client names a file.
    pub serial: SerialConfig,
    /// Whether system calls are filtered.
    pub seccomp: Switch,
    /// The rights that the monitor gives up.
    pub isolation: IsolationConfig,
    /// Changes what is logged.
    pub set_log_filter: SetLogFilter,
}

/// Changes what is logged; the filter is as in [`log_filter`]. An error describes what is wrong
/// with it.
pub type SetLogFilter = fn(&str) -> Result<(), String>;

/// Why a machine could not be started from the command line.
#[derive(Debug, Error)]
pub enum FirecrackerError {
    /// A file of the command line cannot be used.
    #[error("cannot use {} ({option}): {problem}", path.display())]
    File {
        /// The option.
        option: &'static str,
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// The machine failed.
    #[error(transparent)]
    Vm(#[from] VmError),
}

/// Facts about the process that documents report.
#[derive(Debug, Clone)]
struct Instance {
    id: String,
    max_body_bytes: usize,
    set_log_filter: SetLogFilter,
}

/// The level of Ebb's log for a word of Firecracker's, in lower case.
pub fn log_level(word: &str) -> Option<&'static str> {
    Some(match word {
        "off" => "off",
        "trace" => "trace",
        "debug" => "debug",
        "info" => "info",
        "warn" | "warning" => "warn",
        "error" => "error",
        _ => return None,
    })
}

/// The filter of Ebb's log for a level and a module of Firecracker's options: its own modules do
/// not exist here, and those of Ebb begin with `ebb`.
pub fn log_filter(level: Option<&str>, module: Option<&str>) -> Option<String> {
    let is_path = |module: &&str| {
        let is_letter = |letter: char| letter.is_ascii_alphanumeric() || "_:".contains(letter);
        module.starts_with("ebb") && module.chars().all(is_letter)
    };
    match (level, module.filter(is_path)) {
        (level, Some(module)) => Some(format!("off,{module}={}", level.unwrap_or("info"))),
        (level, None) => level.map(str::to_owned),
    }
}

/// What clients have said about the log.
#[derive(Debug, Default)]
struct Log {
    level: Option<&'static str>,
    module: Option<String>,
}

impl Log {
    /// Takes what a document has: a file, which is opened, and what is logged.
    fn configure(&mut self, logger: LoggerConfig, set: SetLogFilter) -> io::Result<()> {
        if let Some(path) = &logger.log_path {
            redirect_log(path)?;
        }
        self.level = logger.level.map(|LogLevel(level)| level).or(self.level);
        self.module = logger.module.or(self.module.take());
        let filter = log_filter(self.level, self.module.as_deref());
        filter.map_or(Ok(()), |filter| set(&filter)).map_err(io::Error::other)
    }
}

/// Writes the log to a file or a pipe from now on, instead of standard error.
fn redirect_log(path: &Path) -> io::Result<()> {
    let mut options = OpenOptions::new();
    options.create(true).read(true).append(true).custom_flags(libc::O_NONBLOCK);
    let file = options.open(path)?;
    Ok(rustix::stdio::dup2_stderr(&file)?)
}

/// Runs a machine behind Firecracker's API, or from a configuration file, until its guest ends.
///
/// # Errors
/// A file of the options is invalid, the socket cannot be opened, or the machine cannot be started.
pub fn run(options: Options) -> Result<GuestExit, FirecrackerError> {
    let directory = std::env::current_dir().unwrap_or_else(|_| "/".into());
    let file = |option: &'static str, path: &Path, problem: String| FirecrackerError::File {
        option,
        path: path.to_owned(),
        problem,
    };
    if let Some(path) = &options.log_path {
        redirect_log(path).map_err(|error| file("--log-path", path, error.to_string()))?;
    }
    let mut metrics = MetricsFile::default();
    if let Some(path) = &options.metrics_path {
        metrics.open(path).map_err(|problem| file("--metrics-path", path, problem))?;
    }
    let mut resources = Resources::new(options.mmds_bytes);
    let host = Host {
        api: options.api_sock.clone(),
        seccomp: options.seccomp,
        isolation: options.isolation,
        serial: options.serial,
        pci: options.pci,
    };
    let mut config = None;
    if let Some(path) = &options.config_file {
        let invalid = |problem: String| file("--config-file", path, problem);
        let text = std::fs::read(path).map_err(|error| invalid(error.to_string()))?;
        let described: VmmConfig =
            serde_json::from_slice(&text).map_err(|error| invalid(error.to_string()))?;
        if let Some(logger) = &described.logger {
            Log::default()
                .configure(logger.clone(), options.set_log_filter)
                .map_err(|error| invalid(error.to_string()))?;
        }
        if let Some(described) = &described.metrics {
            metrics.open(&described.metrics_path).map_err(invalid)?;
        }
        resources.configure(described).map_err(|fault| invalid(fault.message().to_owned()))?;
        let built = machine::build(&resources, &host);
        config = Some(built.map_err(|fault| invalid(fault.message().to_owned()))?);
    }
    if let Some(path) = &options.metadata {
        let invalid = |problem: String| file("--metadata", path, problem);
        let text = std::fs::read_to_string(path).map_err(|error| invalid(error.to_string()))?;
        resources.set_metadata(&text).map_err(|fault| invalid(fault.message().to_owned()))?;
    }
    let instance = Instance {
        id: options.id,
        max_body_bytes: options.max_payload_bytes,
        set_log_filter: options.set_log_filter,
    };
    let Some(path) = &host.api else {
        return match config {
            Some(config) => Ok(crate::vm::run(config)?),
            None => Err(file("--no-api", Path::new(""), "it needs --config-file".to_owned())),
        };
    };
    let (listener, name) = ApiSocket::bind(path).map_err(VmError::from)?.into_parts();
    let signals = Signals::block().map_err(VmError::host("take over signals"))?;
    let mut clients = Clients::new(listener, Limits::default());
    let started = Started::default();
    let door = PreBoot::new(instance.clone(), host.clone(), resources, metrics, started.clone());
    if config.is_none() {
        clients
            .serve_until(&door, signals.as_fd(), &|| door.is_done())
            .map_err(VmError::host("wait for clients"))?;
    }
    let (wish, resources, metrics) = door.take();
    let wish = match (config, wish) {
        (Some(config), _) => Wish::Boot(Box::new(config)),
        (None, Some(wish)) => wish,
        (None, None) => {
            return Ok(GuestExit::Signal { name: signals.take().unwrap_or("a signal") });
        }
    };
    let state = State { resources, metrics };
    let front = Front {
        clients,
        name: Some(name),
        signals: Some(signals),
        pre_boot: Arc::new(door),
        door: Box::new(move |vm, companion| -> Arc<dyn Door> {
            Arc::new(Running::new(vm, companion, instance, directory, state))
        }),
        started: Box::new(move |result| *door::lock(&started) = Some(result)),
    };
    Ok(match wish {
        Wish::Boot(config) => boot_behind(*config, front)?,
        Wish::Load(loaded) => {
            let snapshot::Loaded { snapshot, overrides, start } = *loaded;
            restore_behind(snapshot, overrides, start, front)?
        }
    })
}

/// Fuzz target: requests before the start, each a byte for method and path, a byte for the length
/// of the body, and the body. No path that they name exists.
#[cfg(any(test, feature = "testing"))]
pub fn fuzz_request(data: &[u8]) {
    use crate::api::http::Request;
    use crate::api::reply::Persistence;

    const METHODS: [&str; 4] = ["PUT", "GET", "PATCH", "DELETE"];
    const PATHS: [&str; 24] = [
        "/",
        "/version",
        "/vm/config",
        "/machine-config",
        "/drives/a",
        "/network-interfaces/a",
        "/vsock",
        "/balloon",
        "/balloon/statistics",
        "/balloon/hinting/start",
        "/entropy",
        "/serial",
        "/cpu-config",
        "/mmds",
        "/mmds/config",
        "/actions",
        "/vm",
        "/snapshot/create",
        "/pmem/a",
        "/hotplug/memory",
        "/boot-source",
        "/snapshot/load",
        "",
        "//\u{e9}/a-b/?x",
    ];
    let host = Host {
        api: None,
        seccomp: Switch::Off,
        isolation: IsolationConfig::default(),
        serial: SerialConfig::Null,
        pci: Switch::Off,
    };
    let instance = Instance {
        id: "fuzz".to_owned(),
        max_body_bytes: MAX_PAYLOAD_BYTES,
        set_log_filter: |_| Ok(()),
    };
    let (resources, started) = (Resources::new(256), Started::default());
    let door = PreBoot::new(instance, host, resources, MetricsFile::default(), started);
    let mut rest = data;
    while let [choice, length, following @ ..] = rest {
        let (body, next) = following.split_at(usize::from(*length).min(following.len()));
        rest = next;
        let request = Request {
            method: METHODS[usize::from(*choice) % METHODS.len()],
            path: PATHS[usize::from(*choice) / METHODS.len() % PATHS.len()],
            query: None,
            body,
            persistence: Persistence::KeepAlive,
        };
        drop(door.serve(&request, Vec::new()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_and_modules_become_a_filter() {
        let of = |level, module| log_filter(level, module);
        assert_eq!(of(None, None), None);
        assert_eq!(of(Some("debug"), Some("api_server")).as_deref(), Some("debug"));
        let module = Some("ebb_vmm::api");
        assert_eq!(of(Some("debug"), module).as_deref(), Some("off,ebb_vmm::api=debug"));
        assert_eq!(of(None, module).as_deref(), Some("off,ebb_vmm::api=info"));
        assert_eq!(of(None, Some("ebb_vmm=trace,ebb")), None);
    }

    #[test]
    fn what_clients_say_about_the_log_adds_up() {
        let set = |filter: &str| match filter {
            "off,ebb_vmm=warn" | "warn" => Ok(()),
            other => Err(other.to_owned()),
        };
        let mut log = Log::default();
        let document = |text: &str| serde_json::from_str::<LoggerConfig>(text).unwrap();
        log.configure(document("{}"), |_| Err("nothing was said".to_owned())).unwrap();
        log.configure(document(r#"{"level": "Warning", "show_level": true}"#), set).unwrap();
        log.configure(document(r#"{"module": "ebb_vmm"}"#), set).unwrap();
        log.configure(document("{}"), set).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("none/log");
        let wrong = format!(r#"{{"log_path": {path:?}}}"#);
        assert!(log.configure(document(&wrong), set).is_err());
    }
}
