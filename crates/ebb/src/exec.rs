//! `ebb exec`: runs a command in a guest.

use std::io::{self, IsTerminal as _, Write as _};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, bail};
use ebb_guest_agent::channel::Channel;
use ebb_guest_agent::wire::{
    Control, DATA_BYTES, Ended, Exec, FailureKind, Frame, INPUT_WINDOW_BYTES, Request, TerminalSize,
};
use ebb_vmm::vm::Signals;
use ebb_vmm::vm::terminal::{Output, RawTerminal};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::Signal;
use serde::Serialize;

use crate::guest::{self, GuestArgs};

const EXAMPLES: &str = "\
Examples:
  ebb exec /run/vm.sock -- uname -a
  ebb exec -t /run/vm.sock -- bash
  echo text | ebb exec /run/vm.sock -- sh -c 'cat > /tmp/file'
  ebb exec --wait 30 --user web --env LANG=C.UTF-8 /run/vm.sock -- make -C /src

Exit codes: the command's; 128 and the signal's number for a command that a signal ended; 125 if
Ebb or the guest's agent failed, 126 if the command cannot be executed, 127 if it was not found.";

/// With `--json`, output beyond this is dropped.
const JSON_BYTES: usize = 16 << 20;
/// Exit code for failures of this program.
const FAILED: u8 = 125;

/// Runs a command in a guest.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES, after_long_help = EXAMPLES)]
pub struct Args {
    /// The machine's API socket (ebb run --api PATH)
    #[arg(value_name = "SOCKET")]
    socket: PathBuf,
    /// The command and its arguments, after --
    #[arg(value_name = "COMMAND", required = true, last = true)]
    command: Vec<String>,
    /// Run it on a terminal, which follows the size of this one
    #[arg(short, long, conflicts_with_all = ["detach", "json"])]
    terminal: bool,
    /// Run it as this user of the guest: USER or USER:GROUP, names or numbers [default: root]
    #[arg(short, long, value_name = "USER")]
    user: Option<String>,
    /// Set a variable; may be given several times
    #[arg(short, long, value_name = "NAME=VALUE", value_parser = variable)]
    env: Vec<(String, String)>,
    /// Working directory in the guest [default: the user's home directory]
    #[arg(short = 'C', long, value_name = "PATH")]
    directory: Option<String>,
    /// Start it and do not wait for it; its output is dropped
    #[arg(short, long)]
    detach: bool,
    /// Do not read standard input
    #[arg(short = 'n', long)]
    no_stdin: bool,
    /// Print one JSON document with the exit code and the output when it has ended
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    guest: GuestArgs,
}

fn variable(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or("write NAME=VALUE")?;
    if name.is_empty() {
        return Err("the variable has no name".to_owned());
    }
    Ok((name.to_owned(), value.to_owned()))
}

/// The command's JSON output. Text that is not UTF-8 is given with replacement characters.
#[derive(Debug, Default, Serialize)]
struct Outcome {
    /// The guest's process id.
    pid: u32,
    /// Null if a signal ended the command, or if it was detached.
    exit_code: Option<i32>,
    /// Number of the signal that ended it.
    signal: Option<i32>,
    stdout: String,
    stderr: String,
    /// Whether output was dropped.
    truncated: bool,
}

/// Runs the command; returns its exit code.
pub fn run(args: Args) -> ExitCode {
    execute(args).unwrap_or_else(|error| {
        eprintln!("ebb exec: {}", ebb_program::printable(&ebb_program::describe(&error)));
        ExitCode::from(FAILED)
    })
}

fn execute(args: Args) -> anyhow::Result<ExitCode> {
    let reads = !args.detach && !args.no_stdin;
    let terminal = if args.terminal {
        if !reads || !io::stdin().is_terminal() {
            bail!("standard input is no terminal; leave out -t");
        }
        Some(terminal_size())
    } else {
        None
    };
    let mut channel = guest::connect(&args.socket, &args.guest)?;
    // Before the command starts: a signal is for it from now on.
    let signals = Signals::block_these(&FORWARDED.map(Signal::as_raw)).context("signals")?;
    channel.queue_control(Control::Request(Request::Exec(Exec {
        argv: args.command,
        env: args.env,
        directory: args.directory,
        user: args.user,
        terminal,
        detach: args.detach,
    })));
    channel.send_rest()?;
    let raw =
        terminal.map(|_| RawTerminal::enter(Output::Raw)).transpose().context("the terminal")?;
    let mut session = Session {
        channel,
        signals,
        input: if reads { Input::Open } else { Input::Ended },
        window: INPUT_WINDOW_BYTES,
        collected: args.json.then(Collected::default),
        detach: args.detach,
        pid: 0,
    };
    if !reads {
        session.channel.queue_control(Control::InputEnd);
    }
    let last = session.serve();
    drop(raw);
    let (ended, failure) = match last? {
        Control::Ended(ended) => (Some(ended), None),
        Control::Failed(failure) => (None, Some(failure)),
        _ => (None, None),
    };
    if let Some(failure) = failure {
        eprintln!("ebb exec: {}", ebb_program::printable(&failure.message));
        return Ok(ExitCode::from(match failure.kind {
            FailureKind::NotFound => 127,
            FailureKind::NotExecutable => 126,
            FailureKind::Other => FAILED,
        }));
    }
    let pid = session.pid;
    if let Some(collected) = session.collected {
        println!("{}", serde_json::to_string_pretty(&collected.outcome(pid, ended))?);
    } else if args.detach {
        println!("{pid}");
    }
    Ok(match ended {
        None => ExitCode::SUCCESS,
        // The guest may send any number; an exit code has eight bits.
        Some(Ended::Code(code)) => ExitCode::from(code as u8),
        Some(Ended::Signal(signal)) => ExitCode::from(128_u8.wrapping_add(signal as u8)),
    })
}

/// Signals that the command gets in place of this program. Ctrl-C on a raw terminal is a byte.
const FORWARDED: [Signal; 7] = [
    Signal::WINCH,
    Signal::INT,
    Signal::TERM,
    Signal::HUP,
    Signal::QUIT,
    Signal::USR1,
    Signal::USR2,
];

/// Whether standard input goes on.
#[derive(PartialEq, Eq)]
enum Input {
    Open,
    Ended,
}

struct Session {
    channel: Channel,
    signals: Signals,
    input: Input,
    /// Bytes of input that the agent still accepts.
    window: usize,
    collected: Option<Collected>,
    detach: bool,
    pid: u32,
}

/// Output for `--json`.
#[derive(Default)]
struct Collected {
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    truncated: bool,
}

impl Session {
    /// Moves data until the last message, which it returns.
    fn serve(&mut self) -> anyhow::Result<Control> {
        loop {
            while let Some(frame) = self.channel.next_frame()? {
                match frame {
                    Frame::Output(data) => self.output(&data)?,
                    Frame::Errors(data) => self.errors(&data)?,
                    Frame::Control(Control::Started { pid }) => {
                        self.pid = pid;
                        if self.detach {
                            return Ok(Control::Started { pid });
                        }
                    }
                    Frame::Control(Control::Taken { bytes }) => {
                        let window = self.window.saturating_add(bytes as usize);
                        self.window = window.min(INPUT_WINDOW_BYTES);
                    }
                    Frame::Control(last @ (Control::Ended(_) | Control::Failed(_))) => {
                        return Ok(last);
                    }
                    _ => bail!("the agent does not keep to the protocol"),
                }
            }
            self.channel.flush()?;
            let reads = self.input == Input::Open && self.window > 0 && self.channel.has_room();
            let mut fds = vec![
                PollFd::new(&self.channel, self.channel.wanted()),
                PollFd::new(&self.signals, PollFlags::IN),
            ];
            let stdin = io::stdin();
            if reads {
                fds.push(PollFd::new(&stdin, PollFlags::IN));
            }
            match poll(&mut fds, None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(error).context("cannot wait for events"),
            }
            let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
            if ready[0] {
                self.channel.receive()?;
            }
            if ready[1] {
                self.forward_signal();
            }
            if ready.get(2) == Some(&true) {
                self.read_input();
            }
        }
    }

    fn forward_signal(&mut self) {
        let Some(number) = self.signals.take_number() else { return };
        self.channel.queue_control(if number == Signal::WINCH.as_raw() {
            Control::Resize(terminal_size())
        } else {
            Control::Signal(number)
        });
    }

    fn read_input(&mut self) {
        let mut buffer = vec![0; self.window.min(DATA_BYTES)];
        match rustix::io::read(io::stdin().as_fd(), &mut buffer) {
            Ok(length) if length > 0 => {
                buffer.truncate(length);
                self.window -= length;
                self.channel.queue(&Frame::Input(buffer));
            }
            Err(Errno::INTR | Errno::AGAIN) => {}
            // A terminal that is gone, a closed descriptor: there is no more input.
            Ok(_) | Err(_) => {
                self.input = Input::Ended;
                self.channel.queue_control(Control::InputEnd);
            }
        }
    }

    fn output(&mut self, data: &[u8]) -> anyhow::Result<()> {
        match &mut self.collected {
            Some(collected) => collected.truncated |= !keep(&mut collected.stdout, data),
            None => io::stdout()
                .write_all(data)
                .and_then(|()| io::stdout().flush())
                .context("cannot write to standard output")?,
        }
        Ok(())
    }

    fn errors(&mut self, data: &[u8]) -> anyhow::Result<()> {
        match &mut self.collected {
            Some(collected) => collected.truncated |= !keep(&mut collected.stderr, data),
            None => io::stderr().write_all(data).context("cannot write to standard error")?,
        }
        Ok(())
    }
}

/// Adds `data`, as far as there is room; returns whether all of it is kept.
fn keep(kept: &mut Vec<u8>, data: &[u8]) -> bool {
    let length = data.len().min(JSON_BYTES - kept.len());
    kept.extend_from_slice(&data[..length]);
    length == data.len()
}

impl Collected {
    fn outcome(self, pid: u32, ended: Option<Ended>) -> Outcome {
        let text = |bytes: Vec<u8>| match String::from_utf8(bytes) {
            Ok(text) => text,
            Err(error) => String::from_utf8_lossy(error.as_bytes()).into_owned(),
        };
        let (exit_code, signal) = match ended {
            Some(Ended::Code(code)) => (Some(code), None),
            Some(Ended::Signal(signal)) => (None, Some(signal)),
            None => (None, None),
        };
        let (stdout, stderr) = (text(self.stdout), text(self.stderr));
        Outcome { pid, exit_code, signal, stdout, stderr, truncated: self.truncated }
    }
}

fn terminal_size() -> TerminalSize {
    let size = rustix::termios::tcgetwinsize(rustix::stdio::stdin());
    size.map_or(TerminalSize { rows: 24, columns: 80 }, |size| TerminalSize {
        rows: size.ws_row,
        columns: size.ws_col,
    })
}
