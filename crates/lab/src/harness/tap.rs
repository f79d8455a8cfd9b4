//! A tap interface between the laboratory and a guest.

use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::process::{Command as Program, Stdio};

use crate::LabError;
use crate::harness::devices::Device;
use crate::harness::link::Tools;

/// The interface, and the addresses at its ends, in a block for tests between networks (RFC 2544).
const NAME: &str = "ebb-lab0";
const HOST: Ipv4Addr = Ipv4Addr::new(198, 18, 1, 1);
/// The guest's address.
pub const GUEST: Ipv4Addr = Ipv4Addr::new(198, 18, 1, 2);
/// The guest's MAC address, locally administered.
const MAC: &str = "02:00:c6:12:01:02";

/// The word on a kernel's command line that sets the guest's address (Linux
/// Documentation/admin-guide/nfs/nfsroot.rst).
pub fn kernel_word() -> String {
    format!("ip={GUEST}::{HOST}:255.255.255.0::eth0:off")
}

/// A tap interface with the host's address; removed when dropped.
#[derive(Debug)]
pub struct Tap {
    ip: PathBuf,
}

impl Tap {
    /// The device of a guest on it.
    pub const DEVICE: Device<'static> = Device::Tap { name: NAME, mac: MAC };

    /// Creates it.
    ///
    /// # Errors
    /// [`LabError::Network`].
    pub fn new() -> Result<Self, LabError> {
        let tap = Self { ip: Tools::find()?.ip };
        // Left behind by an earlier run, perhaps.
        let _ = tap.ip("link delete");
        for line in [
            format!("tuntap add {NAME} mode tap"),
            format!("address add {HOST}/24 dev {NAME}"),
            format!("link set {NAME} up"),
            // The guest is found without a question to which it does not answer before it is up.
            format!("neighbour replace {GUEST} lladdr {MAC} dev {NAME} nud permanent"),
        ] {
            tap.ip(&line)?;
        }
        Ok(tap)
    }

    fn ip(&self, line: &str) -> Result<(), LabError> {
        let line = if line == "link delete" { format!("{line} {NAME}") } else { line.to_owned() };
        let words: Vec<&str> = line.split(' ').collect();
        output(Program::new(&self.ip).args(words)).map(drop)
    }
}

impl Drop for Tap {
    fn drop(&mut self) {
        // A destructor cannot report errors.
        let _ = self.ip("link delete");
    }
}

/// The output of a program that must succeed.
///
/// # Errors
/// [`LabError::Network`].
pub fn output(program: &mut Program) -> Result<String, LabError> {
    let command = format!("{program:?}");
    let failed = |reason: String| LabError::Network { command: command.clone(), reason };
    let output =
        program.stdin(Stdio::null()).output().map_err(|error| failed(error.to_string()))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    if output.status.success() {
        return Ok(text);
    }
    Err(failed(text + &String::from_utf8_lossy(&output.stderr)))
}
