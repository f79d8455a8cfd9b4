//! A Debian on a disk, whose programs work in guests with an agent. The guests only read the disk,
//! so that several can share it, and write to memory.

use std::time::Duration;

use ebb_agent::protocol::Command;

use crate::LabError;
use crate::error::GuestProblem;
use crate::harness::experiment::Needed;
use crate::harness::guest::Guest;

/// Where guests have their shell.
const BUSYBOX: &str = "/bin/busybox";
/// What the guests' image needs.
pub const SHELL: Needed = Needed { path: BUSYBOX, remedy: "apt-get install busybox-static" };

/// Makes the disk's Debian usable to programs, which write to memory.
const ENTER: &str = "mkdir -p /debian && mount -t ext4 -o ro,noload /dev/vda /debian && \
                     mount -t tmpfs tmpfs /debian/tmp && mount -o bind /proc /debian/proc && \
                     mount -o bind /dev /debian/dev";
/// Time limit for the work; a host that swaps may be slow.
const WORK_LIMIT: Duration = Duration::from_secs(300);

/// Mounts the Debian of a guest's disk.
///
/// # Errors
/// [`LabError::Guest`].
pub fn enter(guest: &mut Guest) -> Result<(), LabError> {
    shell(guest, ENTER).map(drop)
}

/// Runs a script in it, in `/tmp`; returns the time by the guest's clock.
///
/// # Errors
/// [`LabError::Guest`].
pub fn run(guest: &mut Guest, script: &str) -> Result<Duration, LabError> {
    shell(
        guest,
        &format!("PATH=/usr/bin:/bin chroot /debian sh -c 'cd /tmp && {script}' >/dev/null"),
    )
}

/// Runs a script in a guest.
fn shell(guest: &mut Guest, script: &str) -> Result<Duration, LabError> {
    let argv = [BUSYBOX, "sh", "-c", script].map(str::to_owned).to_vec();
    let answer = guest.command(Command::Exec { argv }, WORK_LIMIT, &mut || {})?;
    if answer.result["code"] == 0 {
        return Ok(answer.elapsed);
    }
    Err(guest.failed(GuestProblem::Failed(format!("{script}: {}", answer.result))))
}
