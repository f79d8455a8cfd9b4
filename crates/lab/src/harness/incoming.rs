//! Machines of QEMU that continue from one file of memory and one of state, as its users make many
//! machines of one: memory is a file that the template shares and the others map privately, and the
//! migration's stream leaves it out (`x-ignore-shared`, QEMU migration/options.h). Their first answer
//! is that of the same service in the guest as of [forked ones](super::forks).

use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::Command as Program;
use std::thread;
use std::time::{Duration, Instant};

use ebb_agent::protocol::Command;
use ebb_agent::vsock::Service;
use serde_json::json;
use tempfile::TempDir;
use vsock::VsockStream;

use crate::LabError;
use crate::harness::devices::Device;
use crate::harness::forks::{PORT, TEMPLATE};
use crate::harness::guest::Guest;
use crate::harness::monitor::MonitorKind;
use crate::harness::qmp::{Qmp, QmpError};
use crate::harness::size::GuestSize;
use crate::harness::testbed::Testbed;

/// A file system in memory, if the host has it.
const IN_MEMORY: &str = "/dev/shm";
/// Time limit for a template's boot; an emulated host may be slow.
const BOOT_LIMIT: Duration = Duration::from_secs(240);
/// Time limit for a migration to or from a file, and for an answer.
const LIMIT: Duration = Duration::from_secs(60);
/// Addresses of the guests are these and their number.
const FIRST_CID: u32 = 1000;
/// Module of the host for their sockets.
pub const HOST_SOCKET_MODULE: &str = "vhost_vsock";
/// Interval of attempts to connect, and of looking for a migration's end.
const RETRY: Duration = Duration::from_millis(1);

/// A guest whose memory is a file.
pub struct Template {
    /// The guest.
    pub guest: Guest,
    size: GuestSize,
    disk: PathBuf,
    directory: TempDir,
}

impl Template {
    /// Boots it, with a disk that it only reads.
    ///
    /// # Errors
    /// Those of a guest's start.
    pub fn start(testbed: &Testbed<'_>, size: GuestSize, disk: &Path) -> Result<Self, LabError> {
        let place = if Path::new(IN_MEMORY).is_dir() { IN_MEMORY } else { "/tmp" };
        let directory = tempfile::tempdir_in(place).map_err(LabError::of_file(place))?;
        testbed.events().step(TEMPLATE, "starts");
        let control = directory.path().join("template.qmp");
        let mut command = testbed.command(size, Some(&control))?;
        let memory = directory.path().join("memory");
        add_devices(&mut command, TEMPLATE, size, disk, &memory, "on");
        let mut guest = Guest::start(TEMPLATE, command)?;
        testbed.show(&[guest.pid()]);
        guest.wait_ready(BOOT_LIMIT)?;
        guest.begin(Command::VsockServe { port: PORT, service: Service::Echo })?;
        Ok(Self { guest, size, disk: disk.to_owned(), directory })
    }

    fn state(&self) -> PathBuf {
        self.directory.path().join("state")
    }

    /// Writes its state and ends it; its memory stays in the file.
    ///
    /// # Errors
    /// [`LabError::Guest`].
    pub fn save(&mut self) -> Result<(), LabError> {
        let save = || -> Result<(), QmpError> {
            let mut qmp = Qmp::connect(&self.directory.path().join("template.qmp"))?;
            ignore_shared(&mut qmp)?;
            let uri = format!("exec:cat > {}", self.state().display());
            qmp.call("migrate", &json!({ "uri": uri }))?;
            wait_completed(&mut qmp, "migrate")
        };
        save().map_err(|error| LabError::unexpected(TEMPLATE, error))?;
        self.guest.kill();
        let deadline = Instant::now() + LIMIT;
        while self.guest.ended_by_itself().is_none() && Instant::now() < deadline {
            thread::sleep(RETRY);
        }
        Ok(())
    }

    /// Makes a machine of the files, and waits until a program of its guest has answered.
    ///
    /// # Errors
    /// [`LabError::Guest`].
    pub fn continue_in(&self, testbed: &Testbed<'_>, number: u32) -> Result<Guest, LabError> {
        let control = self.directory.path().join(format!("{number}.qmp"));
        let mut command = testbed.command(self.size, Some(&control))?;
        let memory = self.directory.path().join("memory");
        add_devices(&mut command, number, self.size, &self.disk, &memory, "off");
        command.args(["-incoming", "defer"]);
        let mut guest = self.guest.forked(number, command)?;
        let deadline = Instant::now() + LIMIT;
        let mut qmp = loop {
            match Qmp::connect(&control) {
                Ok(qmp) => break qmp,
                Err(error) if Instant::now() > deadline => {
                    return Err(LabError::unexpected(number, error));
                }
                Err(_not_yet) => thread::sleep(RETRY),
            }
            if let Some(error) = guest.ended_by_itself() {
                return Err(error);
            }
        };
        let begin = |qmp: &mut Qmp| -> Result<(), QmpError> {
            ignore_shared(qmp)?;
            let uri = format!("exec:cat {}", self.state().display());
            qmp.call("migrate-incoming", &json!({ "uri": uri }))?;
            wait_completed(qmp, "migrate-incoming")
        };
        begin(&mut qmp).map_err(|error| LabError::unexpected(number, error))?;
        answer(&mut guest)?;
        Ok(guest)
    }
}

/// Waits until a program of a guest answers.
///
/// # Errors
/// [`LabError::Guest`].
pub fn answer(guest: &mut Guest) -> Result<(), LabError> {
    let cid = FIRST_CID + guest.number();
    let deadline = Instant::now() + LIMIT;
    while let Err(error) = exchange(cid) {
        if let Some(error) = guest.ended_by_itself() {
            return Err(error);
        }
        if Instant::now() > deadline {
            return Err(LabError::unexpected(guest.number(), error));
        }
        thread::sleep(RETRY);
    }
    Ok(())
}

/// Sends a byte to the service of a guest, which sends it back.
fn exchange(cid: u32) -> io::Result<()> {
    let mut stream = VsockStream::connect_with_cid_port(cid, PORT)?;
    stream.set_read_timeout(Some(LIMIT))?;
    stream.write_all(b"?")?;
    let mut answer = [0];
    stream.read_exact(&mut answer)?;
    if &answer == b"?" { Ok(()) } else { Err(io::ErrorKind::InvalidData.into()) }
}

/// Adds memory, disk and socket device of a machine.
fn add_devices(
    command: &mut Program,
    number: u32,
    size: GuestSize,
    disk: &Path,
    memory: &Path,
    share: &str,
) {
    let object = format!(
        "memory-backend-file,id=memory,mem-path={},size={}M,share={share}",
        memory.display(),
        size.memory_mib
    );
    command.args(["-object", &object, "-machine", "memory-backend=memory"]);
    command.args(Device::SharedDisk { path: disk }.arguments(MonitorKind::Qemu));
    let socket = format!("vhost-vsock-pci,guest-cid={}", FIRST_CID + number);
    command.args(["-device", &socket]);
}

/// Leaves memory that is a shared file out of the stream.
fn ignore_shared(qmp: &mut Qmp) -> Result<(), QmpError> {
    let capability = json!({ "capability": "x-ignore-shared", "state": true });
    qmp.call("migrate-set-capabilities", &json!({ "capabilities": [capability] })).map(drop)
}

fn wait_completed(qmp: &mut Qmp, command: &'static str) -> Result<(), QmpError> {
    let deadline = Instant::now() + LIMIT;
    loop {
        let answer = qmp.call("query-migrate", &json!({}))?;
        match answer["status"].as_str() {
            Some("completed") => return Ok(()),
            Some("failed" | "cancelled") => {
                return Err(QmpError::Refused { command, answer: answer.to_string() });
            }
            _ if Instant::now() > deadline => {
                let answer = format!("no end after {} s: {answer}", LIMIT.as_secs());
                return Err(QmpError::Refused { command, answer });
            }
            _ => thread::sleep(RETRY),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::qmp::tests::peer;

    #[test]
    fn a_migration_that_fails_is_reported_with_the_answer() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("qmp");
        let active = "{\"return\": {\"status\": \"active\"}}\n";
        let failed = "{\"return\": {\"status\": \"failed\", \"error-desc\": \"no space\"}}\n";
        let nothing = "{\"return\": {}}\n";
        let peer = peer(&socket, vec![nothing, nothing, active, failed]);
        let mut qmp = Qmp::connect(&socket).unwrap();
        ignore_shared(&mut qmp).unwrap();
        let error = wait_completed(&mut qmp, "migrate").unwrap_err().to_string();
        assert!(error.contains("migrate with") && error.contains("no space"), "{error}");
        let sent = peer.join().unwrap();
        let capability = &sent[1]["arguments"]["capabilities"][0];
        assert_eq!(capability["capability"], "x-ignore-shared");
    }
}
