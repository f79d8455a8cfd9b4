//! The command line.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::Context as _;
use clap::{CommandFactory as _, Parser};
use ebb_local_io::SocketFile;
use ebb_program::LogArgs;
use rustix::fs::Mode;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::{MissedTickBehavior, interval};

use crate::api::{self, Shared, lock};
use crate::clock::now_ms;
use crate::config::Config;
use crate::engine::Engine;
use crate::service::{self, Service};
use crate::store::Store;
use crate::watchdog::{self, Watchdog};
use crate::web::{self, Loopback};

/// The configuration that is read if none is given.
const CONFIG: &str = "/etc/ebb/ebbd.toml";
/// How often the loop runs.
const TICK: Duration = Duration::from_millis(100);
/// How long monitors have for the last orders.
const END_LIMIT: Duration = Duration::from_secs(1);
/// Clients that wait to be accepted.
const BACKLOG: i32 = 64;

/// Decides what a host does about the memory of its virtual machines
///
/// Each socket in a directory of sockets is a machine's. Its memory is reclaimed when the host
/// needs it and the guest does not, and everything that was taken is given back when this daemon
/// ends, however it ends. `ebb host` shows what is decided, and why.
#[derive(Debug, Parser)]
#[command(version, name = "ebbd")]
pub struct Args {
    /// Configuration file [default: /etc/ebb/ebbd.toml, if it exists]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Check the configuration and end
    #[arg(long)]
    check: bool,
    /// The socket for `ebb host`
    #[arg(long, value_name = "PATH", default_value = "/run/ebb/ebbd.sock")]
    socket: PathBuf,
    /// Group whose members may use the socket, too
    #[arg(long, value_name = "NAME")]
    group: Option<String>,
    /// Directory of what is remembered
    #[arg(long, value_name = "DIR", default_value = "/var/lib/ebbd")]
    state: PathBuf,
    /// Also serve a page and metrics over TCP, read-only, at this loopback address
    ///
    /// The page is at `/`, metrics for Prometheus are at `/metrics`. All users of this host can
    /// read them.
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen: Option<Loopback>,
    #[command(flatten)]
    log: LogArgs,
}

/// The definition of the command line.
pub fn command() -> clap::Command {
    Args::command()
}

/// Runs the program. `words` run it: the path of a file, and what comes before its own arguments.
pub fn main(words: &[&str], arguments: Vec<OsString>) -> ExitCode {
    if arguments.first().is_some_and(|first| first == watchdog::ARGUMENT) {
        return watchdog::main();
    }
    let args = Args::parse_from([OsString::from("ebbd")].into_iter().chain(arguments));
    let log = args.log.clone();
    ebb_program::run("ebbd", &log, std::io::stderr, || run(&args, words))
}

fn run(args: &Args, words: &[&str]) -> anyhow::Result<ExitCode> {
    let default = PathBuf::from(CONFIG);
    let path = match &args.config {
        Some(path) => Some(path.clone()),
        None => default.exists().then_some(default),
    };
    let config = match &path {
        Some(path) => Config::read(path)?,
        None => Config::default(),
    };
    if args.check {
        let name = path.map_or_else(|| "the defaults".to_owned(), |it| it.display().to_string());
        println!("{name}: nothing is wrong");
        return Ok(ExitCode::SUCCESS);
    }
    use_all_descriptors();
    let store = Store::open(&args.state)?;
    let group = args.group.as_deref().map(service::group).transpose()?;
    let owner = Mode::RUSR | Mode::WUSR;
    let mode = group.map_or(owner, |_| owner | Mode::RGRP | Mode::WGRP);
    let (name, listener) = SocketFile::listen(&args.socket, mode, BACKLOG)?;
    group.map(|group| service::give(&args.socket, group)).transpose()?;
    let browsers = args.listen.map(Loopback::bind).transpose()?;
    let words = words.iter().map(OsString::from).collect();
    let watchdog = Watchdog::new(words, &args.state);
    let engine = Arc::new(Mutex::new(Engine::new(config, path, store, watchdog)));
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start")?;
    runtime.block_on(async {
        let signals = Signals::take().context("cannot take over signals")?;
        tokio::spawn(api::serve(listener, engine.clone()));
        if let Some(browsers) = browsers {
            tokio::spawn(web::serve(browsers, engine.clone()));
        }
        decide_until_ended(&engine, signals).await;
        anyhow::Ok(())
    })?;
    drop(name);
    Ok(ExitCode::SUCCESS)
}

/// Each machine takes three descriptors; the usual limit is 1024, and the highest one much higher.
fn use_all_descriptors() {
    let limit = getrlimit(Resource::Nofile);
    // Otherwise there is room for fewer machines.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

struct Signals {
    terminate: Signal,
    interrupt: Signal,
    reload: Signal,
}

impl Signals {
    fn take() -> std::io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            reload: signal(SignalKind::hangup())?,
        })
    }
}

/// Decides until a signal ends it, and then gives everything back.
async fn decide_until_ended(engine: &Shared, mut signals: Signals) {
    let mut ticks = interval(TICK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let mut service = Service::of_environment();
    loop {
        tokio::select! {
            _ = ticks.tick() => {
                let summary = {
                    let mut engine = lock(engine);
                    engine.tick(now_ms());
                    engine.summary()
                };
                service.ran(now_ms(), &summary);
            }
            _ = signals.terminate.recv() => break,
            _ = signals.interrupt.recv() => break,
            _ = signals.reload.recv() => {
                service.reloading();
                if let Err(error) = lock(engine).reload() {
                    tracing::warn!("{error}; the old configuration is still in force");
                }
                service.reloaded();
            }
        }
    }
    service.stopping();
    lock(engine).release();
    tokio::time::sleep(END_LIMIT).await;
}
