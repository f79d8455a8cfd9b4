//! Runs a command for a session.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Child, Command, ExitStatus, Stdio};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Gid, Pid, PidfdFlags, Signal, Uid, kill_process_group, pidfd_open};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};
use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};

use crate::account::Account;
use crate::channel::{Channel, ChannelError};
use crate::wire::{
    Control, DATA_BYTES, Ended, Exec, Failure, FailureKind, Frame, INPUT_WINDOW_BYTES, TerminalSize,
};

/// Most output that is passed on after the command has ended: its own output is in the kernel by
/// then, and processes that it left behind may write for ever.
const LAST_OUTPUT_BYTES: usize = 1 << 20;

/// Runs `request` until its command or the session ends.
///
/// # Errors
/// The session has failed; the command, if there is one, was told so by SIGHUP.
pub fn run(channel: &mut Channel, request: Exec) -> Result<(), ChannelError> {
    let detached = request.detach;
    let mut running = match Running::start(request) {
        Ok(running) => running,
        Err(failure) => {
            channel.queue_control(Control::Failed(failure));
            return channel.send_rest();
        }
    };
    channel.queue_control(Control::Started { pid: running.child.id() });
    if detached {
        // It is reaped when it ends; the host does not wait for that.
        let sent = channel.send_rest();
        let _ = running.child.wait();
        return sent;
    }
    let served = running.serve(channel);
    if served.is_err() {
        running.hang_up();
    }
    served
}

/// A command and its streams.
struct Running {
    child: Child,
    /// Readable when the command has ended.
    end: OwnedFd,
    streams: Streams,
    /// Input that the command has not read yet.
    pending: VecDeque<u8>,
    input_ended: bool,
}

/// The command's standard streams.
enum Streams {
    Terminal(Option<OwnedFd>),
    Pipes { input: Option<OwnedFd>, output: Option<OwnedFd>, errors: Option<OwnedFd> },
}

/// Where output comes from.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Source {
    Output,
    Errors,
}

impl Running {
    fn start(request: Exec) -> Result<Self, Failure> {
        let other = |message: String| Failure { kind: FailureKind::Other, message };
        let io = |what: &'static str| {
            move |error: io::Error| Failure {
                kind: FailureKind::Other,
                message: format!("cannot {what}: {error}"),
            }
        };
        let Some((program, arguments)) = request.argv.split_first() else {
            return Err(other("there is no command".to_owned()));
        };
        if request.argv.iter().any(|text| text.contains('\0')) {
            return Err(other("an argument contains a zero byte".to_owned()));
        }
        let account = Account::find(request.user.as_deref()).map_err(other)?;
        let directory = match request.directory {
            Some(directory) if !std::path::Path::new(&directory).is_dir() => {
                return Err(other(format!("the guest has no directory {directory}")));
            }
            Some(directory) => directory,
            None if std::path::Path::new(&account.home).is_dir() => account.home.clone(),
            None => "/".to_owned(),
        };
        let mut command = Command::new(program);
        command.args(arguments).env_clear().envs(account.environment()).current_dir(directory);
        if request.terminal.is_some() {
            command.env("TERM", "xterm");
        }
        let valid = |name: &str| !name.is_empty() && !name.contains(['=', '\0']);
        for (name, value) in &request.env {
            if !valid(name) || value.contains('\0') {
                return Err(other(format!("{name:?} is not the name of a variable")));
            }
            command.env(name, value);
        }
        let terminal = request.terminal.map(open_terminal).transpose();
        let terminal = terminal.map_err(io("open a terminal"))?;
        match &terminal {
            Some((_, inner)) => {
                let copy = || inner.try_clone().map(Stdio::from).map_err(io("copy a terminal"));
                command.stdin(copy()?).stdout(copy()?).stderr(copy()?);
            }
            None if request.detach => {
                command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
            }
            None => {
                command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
            }
        }
        let (uid, gid) = (Uid::from_raw(account.uid), Gid::from_raw(account.gid));
        let groups: Vec<Gid> = account.groups.iter().map(|group| Gid::from_raw(*group)).collect();
        let has_terminal = terminal.is_some();
        let become_user = move || enter(uid, gid, &groups, has_terminal);
        // SAFETY: the closure makes system calls only, with memory that was allocated before, so it
        // may run between fork and exec.
        unsafe { command.pre_exec(become_user) };
        let spawned = command.spawn();
        // The terminal's inner end belongs to the command alone.
        drop(command);
        let mut child = spawned.map_err(|error| Failure {
            kind: match error.kind() {
                io::ErrorKind::NotFound => FailureKind::NotFound,
                io::ErrorKind::PermissionDenied => FailureKind::NotExecutable,
                _ if Errno::from_io_error(&error) == Some(Errno::NOEXEC) => {
                    FailureKind::NotExecutable
                }
                _ => FailureKind::Other,
            },
            message: format!("cannot run {program}: {error}"),
        })?;
        let pid = Pid::from_child(&child);
        let end = pidfd_open(pid, PidfdFlags::empty());
        let end = end.map_err(|error| io("watch the command")(error.into()))?;
        let streams = match terminal {
            Some((outer, _)) => Streams::Terminal(Some(outer)),
            None => Streams::Pipes {
                input: child.stdin.take().map(OwnedFd::from),
                output: child.stdout.take().map(OwnedFd::from),
                errors: child.stderr.take().map(OwnedFd::from),
            },
        };
        for stream in streams.all() {
            rustix::io::ioctl_fionbio(stream, true)
                .map_err(|error| io("use the command's streams")(error.into()))?;
        }
        Ok(Self { child, end, streams, pending: VecDeque::new(), input_ended: false })
    }

    /// Moves data until the command has ended and its output is sent.
    fn serve(&mut self, channel: &mut Channel) -> Result<(), ChannelError> {
        let mut status = None;
        let mut left = LAST_OUTPUT_BYTES;
        loop {
            while let Some(frame) = channel.next_frame()? {
                self.accept(frame)?;
            }
            self.write_input(channel);
            channel.flush()?;
            if let Some(status) = status
                && channel.has_room()
            {
                // Without waiting: what the command wrote is there.
                let moved = self.move_output(channel, Source::Output)
                    + self.move_output(channel, Source::Errors);
                left = left.saturating_sub(moved);
                if moved == 0 || left == 0 {
                    channel.queue_control(Control::Ended(status));
                    return channel.send_rest();
                }
                continue;
            }
            let ready = self.wait(channel, status.is_none())?;
            if ready.channel {
                channel.receive()?;
            }
            if ready.output {
                self.move_output(channel, Source::Output);
            }
            if ready.errors {
                self.move_output(channel, Source::Errors);
            }
            if ready.end && status.is_none() {
                status = self.child.try_wait()?.map(ended);
            }
        }
    }

    fn accept(&mut self, frame: Frame) -> Result<(), ChannelError> {
        match frame {
            Frame::Input(data) => {
                self.pending.extend(data);
                if self.pending.len() > INPUT_WINDOW_BYTES {
                    return Err(ChannelError::Protocol("more input than its window"));
                }
            }
            Frame::Control(Control::InputEnd) => self.input_ended = true,
            Frame::Control(Control::Resize(size)) => {
                if let Streams::Terminal(Some(terminal)) = &self.streams {
                    let _ = tcsetwinsize(terminal, winsize(size));
                }
            }
            Frame::Control(Control::Signal(number)) => {
                if let Some(signal) = Signal::from_named_raw(number) {
                    // It may have ended already.
                    let _ = kill_process_group(Pid::from_child(&self.child), signal);
                }
            }
            Frame::Control(_) | Frame::Output(_) | Frame::Errors(_) => {
                return Err(ChannelError::Protocol("a message out of turn"));
            }
        }
        Ok(())
    }

    /// Writes input to the command; ends it when the host did.
    fn write_input(&mut self, channel: &mut Channel) {
        let mut taken = 0;
        while let Some(input) = self.streams.input()
            && !self.pending.is_empty()
        {
            let (bytes, _) = self.pending.as_slices();
            match rustix::io::write(input, bytes) {
                Ok(written) => {
                    self.pending.drain(..written);
                    taken += written;
                }
                Err(Errno::AGAIN) => break,
                Err(Errno::INTR) => {}
                // The command does not read its input any more, like a pipe's reader that ended.
                Err(_) => self.streams.close_input(),
            }
        }
        if self.streams.input().is_none() {
            taken += self.pending.len();
            self.pending.clear();
        }
        if taken > 0 {
            channel.queue_control(Control::Taken { bytes: taken as u32 });
        }
        if self.input_ended && self.pending.is_empty() {
            self.streams.close_input();
        }
    }

    /// Passes on what a stream has, up to a frame; returns the number of bytes.
    fn move_output(&mut self, channel: &mut Channel, source: Source) -> usize {
        let slot = self.streams.output(source);
        let Some(stream) = slot else { return 0 };
        let mut buffer = vec![0; DATA_BYTES];
        match rustix::io::read(&*stream, &mut buffer) {
            // A terminal without a process reports EIO.
            Ok(0) | Err(Errno::IO) => *slot = None,
            Ok(length) => {
                buffer.truncate(length);
                channel.queue(&match source {
                    Source::Output => Frame::Output(buffer),
                    Source::Errors => Frame::Errors(buffer),
                });
                return length;
            }
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(_) => *slot = None,
        }
        0
    }

    fn wait(&self, channel: &Channel, watch_end: bool) -> Result<Ready, ChannelError> {
        let reads = if channel.has_room() { PollFlags::IN } else { PollFlags::empty() };
        let writes = if self.pending.is_empty() { PollFlags::empty() } else { PollFlags::OUT };
        let mut watched: Vec<(BorrowedFd<'_>, PollFlags, Mark)> =
            vec![(channel.as_fd(), channel.wanted(), |ready| ready.channel = true)];
        if watch_end {
            watched.push((self.end.as_fd(), PollFlags::IN, |ready| ready.end = true));
        }
        match &self.streams {
            Streams::Terminal(terminal) => {
                if let Some(terminal) = terminal {
                    let output = |ready: &mut Ready| ready.output = true;
                    watched.push((terminal.as_fd(), reads | writes, output));
                }
            }
            Streams::Pipes { input, output, errors } => {
                if let Some(input) = input {
                    watched.push((input.as_fd(), writes, |_| {}));
                }
                if let Some(output) = output {
                    watched.push((output.as_fd(), reads, |ready| ready.output = true));
                }
                if let Some(errors) = errors {
                    watched.push((errors.as_fd(), reads, |ready| ready.errors = true));
                }
            }
        }
        // A stream without a wish would still wake this thread when it fails, again and again.
        watched.retain(|(_, wanted, _)| !wanted.is_empty());
        let mut fds: Vec<PollFd<'_>> =
            watched.iter().map(|(fd, wanted, _)| PollFd::from_borrowed_fd(*fd, *wanted)).collect();
        match poll(&mut fds, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let mut ready = Ready::default();
        for (fd, (_, _, mark)) in fds.iter().zip(&watched) {
            if !fd.revents().is_empty() {
                mark(&mut ready);
            }
        }
        Ok(ready)
    }

    /// The host is gone: ends the command as a terminal's end does, and waits for it.
    fn hang_up(mut self) {
        let _ = kill_process_group(Pid::from_child(&self.child), Signal::HUP);
        self.streams = Streams::Terminal(None);
        let _ = self.child.wait();
    }
}

/// Records that a descriptor is ready.
type Mark = fn(&mut Ready);

/// What [`Running::wait`] has seen.
#[derive(Default)]
struct Ready {
    channel: bool,
    output: bool,
    errors: bool,
    end: bool,
}

impl Streams {
    fn all(&self) -> Vec<BorrowedFd<'_>> {
        match self {
            Self::Terminal(terminal) => terminal.iter().map(AsFd::as_fd).collect(),
            Self::Pipes { input, output, errors } => {
                [input, output, errors].into_iter().flatten().map(AsFd::as_fd).collect()
            }
        }
    }

    fn input(&self) -> Option<&OwnedFd> {
        match self {
            Self::Terminal(terminal) => terminal.as_ref(),
            Self::Pipes { input, .. } => input.as_ref(),
        }
    }

    /// A terminal has no end of input.
    fn close_input(&mut self) {
        if let Self::Pipes { input, .. } = self {
            *input = None;
        }
    }

    fn output(&mut self, source: Source) -> &mut Option<OwnedFd> {
        match (self, source) {
            (Self::Terminal(terminal), _) => terminal,
            (Self::Pipes { output, .. }, Source::Output) => output,
            (Self::Pipes { errors, .. }, Source::Errors) => errors,
        }
    }
}

fn ended(status: ExitStatus) -> Ended {
    match (status.code(), status.signal()) {
        (Some(code), _) => Ended::Code(code),
        (None, signal) => Ended::Signal(signal.unwrap_or_default()),
    }
}

/// A pseudoterminal (pty(7)): the agent's end and the command's.
fn open_terminal(size: TerminalSize) -> io::Result<(OwnedFd, File)> {
    let outer = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
    grantpt(&outer)?;
    unlockpt(&outer)?;
    let name = ptsname(&outer, Vec::new())?;
    let flags = rustix::fs::OFlags::RDWR | rustix::fs::OFlags::NOCTTY | rustix::fs::OFlags::CLOEXEC;
    let inner = rustix::fs::open(name, flags, rustix::fs::Mode::empty())?;
    tcsetwinsize(&outer, winsize(size))?;
    Ok((outer, inner.into()))
}

fn winsize(size: TerminalSize) -> Winsize {
    Winsize { ws_row: size.rows, ws_col: size.columns, ws_xpixel: 0, ws_ypixel: 0 }
}

/// In the new process: a session of its own with the terminal, and the user's rights. The calls
/// change the calling thread, which is the only one.
fn enter(uid: Uid, gid: Gid, groups: &[Gid], terminal: bool) -> io::Result<()> {
    rustix::process::setsid()?;
    reset_signals();
    if terminal {
        rustix::process::ioctl_tiocsctty(rustix::stdio::stdin())?;
    }
    // An agent without root's rights can run commands of its own user only.
    if rustix::process::geteuid().is_root() {
        set_thread_groups(groups)?;
        set_thread_res_gid(gid, gid, gid)?;
        set_thread_res_uid(uid, uid, uid)?;
    } else if rustix::process::geteuid() != uid {
        return Err(Errno::PERM.into());
    }
    Ok(())
}

/// Gives all signals their default effect: a process inherits the ones that the agent ignores or
/// blocks, and those depend on how the agent was started.
fn reset_signals() {
    for signal in 1..=libc::SIGRTMAX() {
        // SAFETY: changes the effect of a signal in this process only, which has one thread and is
        // about to execute another program. For SIGKILL and SIGSTOP the call fails.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
    let mut none = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: initializes the set that it is given.
    unsafe { libc::sigemptyset(none.as_mut_ptr()) };
    // SAFETY: `none` is initialized; the old mask is not requested.
    unsafe { libc::sigprocmask(libc::SIG_SETMASK, none.as_ptr(), std::ptr::null_mut()) };
}
