//! `ebb console`: connects with a machine's serial line.

use std::io::{self, IsTerminal as _, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, bail};
use ebb_vmm::api::{Client, ConsoleInfo};
use ebb_vmm::vm::Signals;
use ebb_vmm::vm::terminal::{EscapeSequence, Output, RawTerminal, Typed};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use rustix::process::Signal;

const EXAMPLES: &str = "\
Examples:
  ebb console /run/vm.sock
  ebb console /run/vm.sock < /dev/null > boot.log

Recent output comes first. On a terminal, Ctrl-A x leaves the console, and Ctrl-A twice types one
Ctrl-A; the machine goes on. A later client takes the console over.";

/// Time for the monitor to answer.
const PATIENCE: Duration = Duration::from_secs(10);
const CHUNK_BYTES: usize = 4096;

/// Connects with the serial line of a machine.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES, after_long_help = EXAMPLES)]
pub struct Args {
    /// The machine's API socket (ebb run --api PATH)
    #[arg(value_name = "SOCKET")]
    socket: PathBuf,
}

/// Why the console has ended.
enum End {
    Left,
    Signal,
    /// The monitor has closed it.
    Closed,
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let (socket, theirs) = UnixStream::pair().context("cannot create a socket pair")?;
    let signals = Signals::block_these(&ENDING.map(Signal::as_raw)).context("signals")?;
    let client = Client::new(&args.socket, PATIENCE);
    let _: ConsoleInfo =
        client.put_json_with("/console", &serde_json::json!({}), &[theirs.as_fd()])?;
    drop(theirs);
    let raw = if io::stdin().is_terminal() {
        eprintln!("connected with {}; press Ctrl-A x to leave", args.socket.display());
        Some(RawTerminal::enter(Output::Raw).context("the terminal")?)
    } else {
        None
    };
    let escape = raw.is_some().then(EscapeSequence::default);
    let end = Session { socket, signals, escape }.serve();
    drop(raw);
    match end? {
        End::Left => eprintln!(),
        End::Signal => return Ok(ExitCode::FAILURE),
        End::Closed => eprintln!(
            "ebb console: the monitor has closed the console: the machine has ended or moved, or \
             another client has taken it over"
        ),
    }
    Ok(ExitCode::SUCCESS)
}

/// Signals that leave the console. Ctrl-C on a raw terminal is a byte.
const ENDING: [Signal; 3] = [Signal::INT, Signal::TERM, Signal::HUP];

struct Session {
    socket: UnixStream,
    signals: Signals,
    escape: Option<EscapeSequence>,
}

impl Session {
    fn serve(mut self) -> anyhow::Result<End> {
        let mut input_ended = false;
        let mut unsent = Vec::new();
        loop {
            let stdin = io::stdin();
            let mut wanted = PollFlags::IN;
            wanted.set(PollFlags::OUT, !unsent.is_empty());
            let mut fds =
                vec![PollFd::new(&self.socket, wanted), PollFd::new(&self.signals, PollFlags::IN)];
            if !input_ended && unsent.is_empty() {
                fds.push(PollFd::new(&stdin, PollFlags::IN));
            }
            match poll(&mut fds, None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(error).context("cannot wait for events"),
            }
            let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
            if ready[1] {
                return Ok(End::Signal);
            }
            if ready[0] && !self.show_output()? {
                return Ok(End::Closed);
            }
            if ready.get(2) == Some(&true) {
                match self.read_input()? {
                    Some(Typed::Quit) => return Ok(End::Left),
                    Some(Typed::Input(bytes)) => unsent = bytes,
                    None => input_ended = true,
                }
            }
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match rustix::net::send(&self.socket, &unsent, flags) {
                Ok(sent) => drop(unsent.drain(..sent)),
                // Seen as the end of the output.
                Err(Errno::AGAIN | Errno::INTR | Errno::PIPE | Errno::CONNRESET) => {}
                Err(error) => return Err(error).context("cannot send input"),
            }
        }
    }

    /// Returns whether there may be more.
    fn show_output(&self) -> anyhow::Result<bool> {
        let mut buffer = [0; CHUNK_BYTES];
        match rustix::net::recv(&self.socket, &mut buffer, RecvFlags::DONTWAIT) {
            Ok((_, 0)) | Err(Errno::CONNRESET) => Ok(false),
            Ok((_, length)) => {
                let mut stdout = io::stdout();
                stdout
                    .write_all(&buffer[..length])
                    .and_then(|()| stdout.flush())
                    .context("cannot write to standard output")?;
                Ok(true)
            }
            Err(Errno::AGAIN | Errno::INTR) => Ok(true),
            Err(error) => bail!("cannot receive output: {error}"),
        }
    }

    /// What was typed; nothing at the end.
    fn read_input(&mut self) -> anyhow::Result<Option<Typed>> {
        let mut buffer = [0; CHUNK_BYTES];
        match rustix::io::read(io::stdin().as_fd(), &mut buffer) {
            Ok(0) => Ok(None),
            Ok(length) => Ok(Some(match &mut self.escape {
                Some(escape) => escape.filter(&buffer[..length]),
                None => Typed::Input(buffer[..length].to_vec()),
            })),
            Err(Errno::AGAIN | Errno::INTR) => Ok(Some(Typed::Input(Vec::new()))),
            Err(error) => Err(error).context("cannot read standard input"),
        }
    }
}
