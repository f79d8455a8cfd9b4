//! Checkpoints in memory: the monitor forks, and the new process holds the machine's memory and
//! state, runs nothing, and forks in turn for each machine that is made from it.
//!
//! A forked process has only the thread that forked, and every lock in the state of that moment. So
//! the thread takes the locks that the new process will need first, and the new process uses
//! nothing else of the old one's [`Vm`]: its memory, the files of its kernel, and its
//! configuration. The rest is never dropped there. KVM serves only the process that has created a
//! virtual machine (Linux virt/kvm/kvm_main.c, `kvm_vm_ioctl`), so each machine gets a new one with
//! the saved state.

mod clone;
mod collapse;
#[cfg(any(test, feature = "testing"))]
mod fuzzing;
mod holder;

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::time::{Duration, Instant};

use ebb_guest_ram::Still;
use ebb_page_merge::{Clock as _, SystemClock};
use kvm_ioctls::Kvm;
use rustix::fs::FileType;
use rustix::net::SocketType;
use rustix::net::sockopt::{socket_acceptconn, socket_type};

use super::disks::NamedDisk;
use super::save::Failure;
use super::task::{Task, TaskKind, Ticket};
use super::{Vm, VmError, lock};
use crate::api::control::{ControlError, Document, Outcome};
use crate::api::vm::{CheckpointReport, CheckpointTarget, VmState};
use crate::config::DiskFormat;
use crate::cpu::Vcpu;
use crate::file::{Completion, copy_data};
use crate::forked::fork_in_new_thread;
use crate::log::Held;
use crate::seccomp::Filters;
pub(super) use collapse::Collapsing;
#[cfg(any(test, feature = "testing"))]
pub use fuzzing::fuzz_fork_requests;
use holder::Template;

/// Longest name of a checkpoint in bytes.
const MOST_NAME_BYTES: usize = 64;

/// How long a guest may stand still for copies of its disks.
const COPY_LIMIT: Duration = Duration::from_secs(1);

/// What a machine has that may be forked.
pub(super) struct Forkable {
    kvm: Kvm,
    /// /dev/null: it takes the place of standard input, output and error.
    null: File,
    /// Compiled once for all processes.
    filters: Filters,
    /// The checkpoint that it was forked from.
    parent: Option<String>,
}

impl Forkable {
    /// Of a machine that this process has started.
    pub(super) fn new(kvm: Kvm, filters: &Filters) -> Result<Self, VmError> {
        // The first read of a clock locates the kernel's vDSO, with calls that the filter of the
        // thread for checkpoints does not allow; forked processes have it done.
        let _ = SystemClock.now();
        let null = File::options().read(true).write(true).open("/dev/null");
        let null = null.map_err(VmError::host("open /dev/null"))?;
        Ok(Self { kvm, null, filters: filters.clone(), parent: None })
    }

    pub(super) fn kvm(&self) -> &Kvm {
        &self.kvm
    }

    /// That of `old`, in a forked process.
    ///
    /// # Safety
    /// Nobody uses or drops `old` from now on.
    unsafe fn taken_over(old: &Self, parent: String) -> Result<Self, VmError> {
        let null = old.null.try_clone().map_err(VmError::host("duplicate a descriptor"))?;
        // SAFETY: the descriptor is open, and `old`, which the caller vouches for, does not close
        // it.
        let kvm = unsafe { Kvm::from_raw_fd(old.kvm.as_raw_fd()) };
        Ok(Self { kvm, null, filters: old.filters.clone(), parent: Some(parent) })
    }
}

/// Leaves the pages that this vCPU shares with the kernel out of forked processes: they would keep
/// KVM's virtual machine alive when this process has ended.
pub(super) fn keep_to_process(vcpu: &mut Vcpu, kvm: &Kvm) -> Result<(), VmError> {
    let bytes = kvm.get_vcpu_mmap_size().map_err(VmError::kvm("report the size of a vCPU"))?;
    let address = std::ptr::from_mut(vcpu.fd.get_kvm_run());
    // SAFETY: the mapping begins there and has this size; the advice changes what a fork copies,
    // and no content.
    match unsafe { libc::madvise(address.cast(), bytes, libc::MADV_DONTFORK) } {
        0 => Ok(()),
        _ => Err(VmError::host("keep a vCPU out of forks")(io::Error::last_os_error())),
    }
}

/// A checkpoint that was asked for.
struct Order {
    name: String,
    socket: OwnedFd,
    /// Empty files for the disks that are written to, or none.
    copies: Vec<File>,
}

/// A disk's image as it was at a checkpoint.
struct DiskCopy {
    format: DiskFormat,
    file: File,
}

impl Order {
    fn new(target: CheckpointTarget, descriptors: Vec<OwnedFd>) -> Result<Self, ControlError> {
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        if target.name.len() > MOST_NAME_BYTES || !target.name.bytes().all(is_plain) {
            return Err(ControlError::Invalid {
                field: "name",
                message: "a name has at most 64 letters, digits, `.`, `_` and `-`".to_owned(),
                remedy: Some("choose another name".to_owned()),
            });
        }
        let mut descriptors = descriptors.into_iter();
        let socket = descriptors.next().ok_or_else(wrong_socket)?;
        Ok(Self { name: target.name, socket, copies: descriptors.map(File::from).collect() })
    }

    /// Whether the socket is one that a checkpoint can serve, and the files are for `disks` images.
    fn check(&self, disks: usize) -> Result<(), ControlError> {
        let is_file = |file: &File| {
            let kind = rustix::fs::fstat(file).map(|stat| FileType::from_raw_mode(stat.st_mode));
            kind == Ok(FileType::RegularFile)
        };
        if !self.copies.is_empty()
            && (self.copies.len() != disks || !self.copies.iter().all(is_file))
        {
            return Err(ControlError::Invalid {
                field: "disks",
                message: format!("one file for each of {disks} disks must follow the socket"),
                remedy: Some(
                    "`ebb ctl SOCKET checkpoint NAME --copy-disks DIR` creates and passes them; \
                     give none for a checkpoint without copies of disks"
                        .to_owned(),
                ),
            });
        }
        let kind = rustix::fs::fstat(&self.socket).map_err(ControlError::failed)?.st_mode;
        if FileType::from_raw_mode(kind) != FileType::Socket {
            return Err(wrong_socket());
        }
        let listens = socket_acceptconn(&self.socket).map_err(ControlError::failed)?;
        let wanted = if listens { SocketType::STREAM } else { SocketType::SEQPACKET };
        if socket_type(&self.socket).map_err(ControlError::failed)? != wanted {
            return Err(wrong_socket());
        }
        rustix::io::ioctl_fionbio(&self.socket, true).map_err(ControlError::failed)
    }
}

fn wrong_socket() -> ControlError {
    ControlError::Invalid {
        field: "socket",
        message: "one socket must come with the request, which listens or is for packets"
            .to_owned(),
        remedy: Some(
            "`ebb ctl SOCKET checkpoint NAME` creates the socket and passes it".to_owned(),
        ),
    }
}

/// The checks of a request, without a machine.
#[cfg(any(test, feature = "testing"))]
pub(super) fn check_request(
    target: CheckpointTarget,
    descriptors: Vec<OwnedFd>,
) -> Result<(), ControlError> {
    Order::new(target, descriptors)?.check(2)
}

impl Vm {
    /// Has a checkpoint made.
    pub(super) fn ask_checkpoint(
        &self,
        target: CheckpointTarget,
        descriptors: Vec<OwnedFd>,
    ) -> Result<Outcome, ControlError> {
        if self.forkable.is_none() {
            return Err(ControlError::wrong_state(
                "checkpoints of this machine are not allowed",
                "start it with --forkable",
            ));
        }
        match self.state() {
            VmState::Running | VmState::Paused => {}
            state => return Err(ControlError::not_running(state)),
        }
        let order = Order::new(target, descriptors)?;
        self.end_leases()?;
        self.migrations.ask_task(Task::new(TaskKind::Checkpoint, move |vm, ticket| {
            vm.make_checkpoint(order, ticket).map(Document::Checkpoint)
        }))
    }

    /// Stops the machine, forks, and continues it. In the new process this does not return.
    fn make_checkpoint(
        &self,
        order: Order,
        ticket: &Ticket,
    ) -> Result<CheckpointReport, ControlError> {
        let forkable = self.forkable.as_ref().ok_or_else(|| TaskKind::Checkpoint.cancelled())?;
        if let Some(reason) = self.ram.why_not_forkable() {
            let message = format!("no checkpoint: {reason}");
            return Err(ControlError::wrong_state(message, "take a snapshot"));
        }
        // Ended checkpoints leave nothing behind; the monitor waits for no process.
        // SAFETY: changes the disposition of a signal that no handler is installed for.
        unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
        let written = self.disks.iter().filter(|disk| !disk.is_readonly()).count();
        order.check(written)?;
        let Order { name, socket, copies } = order;
        let name_there = name.clone();
        let work = || {
            let state = self.capture()?;
            let copies = self.copy_disks(copies, ticket)?;
            let image = self.image.as_ref().map(|image| lock(image).try_clone()).transpose();
            let image = image.map_err(VmError::host("duplicate a descriptor"))?;
            let begun = Instant::now();
            // No other lock is needed in the new process: devices, vCPUs and merging stand still,
            // and what other threads do then concerns this process only.
            let hold = || (self.ram.hold_still(), crate::log::hold());
            let go_on = move |(still, log): (Still<'_>, Held)| {
                drop(still);
                log.forget_thread();
                let parent = forkable.parent.clone();
                Template::new(self, forkable, state, image, copies, name_there, parent).hold(socket)
            };
            // SAFETY: the locks of guest memory and of the log are held then, and nothing that the
            // new process uses has others.
            let new = unsafe { fork_in_new_thread(hold, go_on) };
            Ok((new.map_err(VmError::host("fork the monitor"))?, begun.elapsed()))
        };
        let ((pid, forked), paused) = self.while_stopped(work)?;
        Ok(CheckpointReport {
            name,
            pid: pid.cast_unsigned(),
            paused_us: microseconds(paused),
            forked_us: microseconds(forked),
        })
    }
}

impl Vm {
    /// Copies the images of the disks that are written to. All requests are settled.
    fn copy_disks(
        &self,
        files: Vec<File>,
        ticket: &Ticket,
    ) -> Result<Vec<Option<DiskCopy>>, Failure> {
        let begun = Instant::now();
        let mut files = files.into_iter();
        let copy = |disk: &NamedDisk| {
            if disk.is_readonly() {
                return Ok(None);
            }
            let Some(file) = files.next() else { return Ok(None) };
            let transport = lock(&disk.transport);
            let image = transport.device();
            let is_over = || ticket.is_cancelled() || begun.elapsed() > COPY_LIMIT;
            let copied = copy_data(image.file(), &file, &is_over);
            match copied.map_err(|error| not_copied(&disk.device, &error))? {
                Completion::Done => Ok(Some(DiskCopy { format: image.info().format, file })),
                Completion::Cancelled if ticket.is_cancelled() => Err(Failure::Cancelled),
                Completion::Cancelled => Err(Failure::Refused(too_slow(&disk.device))),
            }
        };
        self.disks.iter().map(copy).collect()
    }
}

/// Most often there is no room for the copy.
fn not_copied(disk: &str, error: &io::Error) -> Failure {
    let message =
        format!("cannot copy the image of {disk}: {error}; the guest goes on without a checkpoint");
    Failure::Refused(ControlError::failed(message))
}

fn too_slow(disk: &str) -> ControlError {
    let message = format!(
        "the guest would stand still for longer than {COPY_LIMIT:?} until {disk} is copied; it goes \
         on without a checkpoint"
    );
    ControlError::wrong_state(
        message,
        "use overlay=, which is small, or a file system whose files can share blocks (XFS, btrfs), \
         with the copies in the image's directory; or pause the machine, make the checkpoint \
         without copies of disks, and copy the image yourself",
    )
}

fn microseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
