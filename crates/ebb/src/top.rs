//! `ebb top`: a live view of a host's machines.

mod act;
mod bar;
mod documents;
mod frame;
mod growth;
mod keys;
mod model;
mod poll;
mod screen;
mod table;
#[cfg(test)]
mod tests;

use std::io::{IsTerminal as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use ebb_vmm::api::{Client, ClientError};
use ebb_vmm::vm::Signals;
use ratatui::crossterm::event::{self, KeyEvent, KeyEventKind};
use rustix::event::{PollFd, PollFlags, poll as wait};
use rustix::io::Errno;
use rustix::process::Signal;
use rustix::termios::tcgetwinsize;
use serde_json::json;

use act::Act;
use documents::{Documents, Report};
use frame::Colours;
use keys::Effect;
use model::{Model, Source};
use screen::Screen;

const AFTER_HELP: &str = "\
Examples:
  ebb top
  ebb top --machine /run/ebb/web-1.sock --machine /run/ebb/web-2.sock
  ebb top --once

Keys: arrows or j and k select a machine, s changes the order, / filters by name, Enter shows all
that is known of a machine, h holds or releases it; without a daemon p parks it and r reclaims its
free pages. ? shows help, q ends. NO_COLOR=1 in the environment turns colours off.";

/// Width of lines that are not for a terminal.
const USUAL_WIDTH: u16 = 100;
/// The longest time between two pictures: ages are shown in seconds.
const TICK: Duration = Duration::from_secs(1);
/// Signals that end the program. Ctrl-C in raw mode is a key.
const ENDING: [Signal; 3] = [Signal::INT, Signal::TERM, Signal::HUP];

/// Watches a host's machines, and what their memory is used for.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER_HELP, after_long_help = AFTER_HELP)]
pub struct Args {
    /// The daemon's socket
    #[arg(long, value_name = "PATH", default_value = crate::host::SOCKET)]
    socket: PathBuf,
    /// Show the machine behind this API socket, without a daemon; may be repeated
    #[arg(long, value_name = "SOCKET", conflicts_with = "socket")]
    machine: Vec<PathBuf>,
    /// Seconds between two questions
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = 1,
        value_parser = clap::value_parser!(u64).range(1..=3600)
    )]
    interval: u64,
    /// Print all machines once, as text
    #[arg(long)]
    once: bool,
    /// Print once what a picture is made from, as one JSON document
    #[arg(long)]
    json: bool,
}

/// What the program waits for.
enum Event {
    Key(KeyEvent),
    /// The terminal has another size.
    Resized,
    Report(Box<Report>),
    Signal,
    /// A thread cannot go on.
    Failed(String),
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let interval = Duration::from_secs(args.interval);
    let mut sockets = args.machine.clone();
    sockets.sort();
    sockets.dedup();
    if args.json || args.once {
        let text = once(args, &sockets, interval)?;
        std::io::stdout().lock().write_all(text.as_bytes()).context("cannot write")?;
        return Ok(ExitCode::SUCCESS);
    }
    if !std::io::stdout().is_terminal() {
        bail!(
            "standard output is no terminal: ebb top --once prints a picture as text, and \
             ebb host status --json the daemon's document"
        );
    }
    live(&args.socket, &sockets, interval)
}

/// The text of one picture, or its documents.
fn once(args: &Args, sockets: &[PathBuf], interval: Duration) -> anyhow::Result<String> {
    let mut model;
    if sockets.is_empty() {
        let status = poll::daemon(&poll::client(&args.socket))?;
        if args.json {
            return Ok(format!("{}\n", serde_json::to_string_pretty(&status)?));
        }
        model = Model::new(Source::Daemon);
        model.receive(Report::Daemon(Ok(status)));
    } else {
        let answers = ask_all(sockets, interval);
        if args.json {
            let documents: Vec<_> = sockets.iter().zip(&answers).map(document).collect();
            return Ok(format!("{}\n", serde_json::to_string_pretty(&documents)?));
        }
        model = Model::new(Source::Monitors(sockets.to_vec()));
        if let Some(host) = poll::host() {
            model.receive(Report::Host(host));
        }
        for (index, answer) in answers.into_iter().enumerate() {
            let answer = answer.map(Box::new).map_err(|error| error.to_string());
            model.receive(Report::Monitor(index, answer));
        }
    }
    let columns = tcgetwinsize(std::io::stdout()).ok().map(|size| size.ws_col);
    let width = columns.filter(|columns| *columns > 0).unwrap_or(USUAL_WIDTH);
    Ok(frame::plain(&model, width))
}

/// The answers of all monitors, which are asked at the same time.
fn ask_all(sockets: &[PathBuf], max_age: Duration) -> Vec<Result<Documents, ClientError>> {
    let mut answers = Vec::new();
    thread::scope(|scope| {
        let ask = |socket: &PathBuf| {
            let client = poll::client(socket);
            scope.spawn(move || poll::monitor(&client, max_age))
        };
        let asked: Vec<_> = sockets.iter().map(ask).collect();
        for thread in asked {
            // A panic goes on here.
            answers.push(thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        }
    });
    answers
}

fn document((socket, answer): (&PathBuf, &Result<Documents, ClientError>)) -> serde_json::Value {
    match answer {
        Ok(documents) => json!({ "socket": socket, "documents": documents }),
        Err(error) => json!({ "socket": socket, "error": error.to_string() }),
    }
}

/// Shows pictures until a key or a signal ends it.
fn live(socket: &Path, sockets: &[PathBuf], interval: Duration) -> anyhow::Result<ExitCode> {
    let signals = Signals::block_these(&ENDING.map(Signal::as_raw)).context("signals")?;
    let source =
        if sockets.is_empty() { Source::Daemon } else { Source::Monitors(sockets.to_vec()) };
    let (sender, events) = channel();
    let mut screen = Screen::enter(Colours::of_environment()).context("the terminal")?;
    start(&sender, move |events| watch_signals(&signals, events));
    start(&sender, read_keys);
    let daemon = poll::client(socket);
    if sockets.is_empty() {
        let client = daemon.clone();
        let ask =
            move || Some(Report::Daemon(poll::daemon(&client).map_err(|error| error.to_string())));
        start(&sender, move |events| poll::repeat(interval, ask, |it| send(events, it)));
    } else {
        let ask = || poll::host().map(Report::Host);
        start(&sender, move |events| poll::repeat(interval, ask, |it| send(events, it)));
    }
    for (index, socket) in sockets.iter().enumerate() {
        let client = poll::client(socket);
        let ask = move || {
            let answer = poll::monitor(&client, interval).map(Box::new);
            Some(Report::Monitor(index, answer.map_err(|error| error.to_string())))
        };
        start(&sender, move |events| poll::repeat(interval, ask, |it| send(events, it)));
    }
    serve(Model::new(source), &mut screen, &daemon, &sender, &events)
}

fn serve(
    mut model: Model,
    screen: &mut Screen,
    daemon: &Client,
    sender: &Sender<Event>,
    events: &Receiver<Event>,
) -> anyhow::Result<ExitCode> {
    let begin = Instant::now();
    loop {
        screen.draw(&model).context("cannot draw")?;
        let first = match events.recv_timeout(TICK) {
            Ok(event) => Some(event),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => bail!("all threads have ended"),
        };
        model.tick(begin.elapsed());
        // All that has happened meanwhile is in one picture.
        for event in first.into_iter().chain(events.try_iter()) {
            match event {
                Event::Resized => {}
                Event::Report(report) => model.receive(*report),
                Event::Signal => return Ok(ExitCode::FAILURE),
                Event::Failed(why) => bail!("{why}"),
                Event::Key(key) => match model.press(key) {
                    Effect::None => {}
                    Effect::End => return Ok(ExitCode::SUCCESS),
                    Effect::Act(act) => perform(act, daemon, sender),
                },
            }
        }
    }
}

/// Has something done while keys work.
fn perform(act: Act, daemon: &Client, sender: &Sender<Event>) {
    let client = daemon.clone();
    start(sender, move |events| {
        let result = act.perform(&client);
        send(events, Report::Done(act, result));
    });
}

fn send(events: &Sender<Event>, report: Report) -> bool {
    events.send(Event::Report(Box::new(report))).is_ok()
}

/// Tells of a panic, with which the program ends.
struct Watched(Sender<Event>);

impl Drop for Watched {
    fn drop(&mut self) {
        if thread::panicking() {
            let _ = self.0.send(Event::Failed("a thread has ended by a mistake".to_owned()));
        }
    }
}

fn start(sender: &Sender<Event>, work: impl FnOnce(&Sender<Event>) + Send + 'static) {
    let watched = Watched(sender.clone());
    thread::spawn(move || work(&watched.0));
}

fn watch_signals(signals: &Signals, events: &Sender<Event>) {
    while let Err(Errno::INTR) = wait(&mut [PollFd::new(signals, PollFlags::IN)], None) {}
    let _ = events.send(Event::Signal);
}

fn read_keys(events: &Sender<Event>) {
    loop {
        let event = match event::read() {
            Ok(event::Event::Key(key)) if key.kind != KeyEventKind::Release => Event::Key(key),
            Ok(event::Event::Resize(..)) => Event::Resized,
            Ok(_) => continue,
            Err(error) => Event::Failed(format!("cannot read keys: {error}")),
        };
        let is_last = matches!(event, Event::Failed(_));
        if events.send(event).is_err() || is_last {
            return;
        }
    }
}
