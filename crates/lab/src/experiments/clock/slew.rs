//! Slewing the clock of the virtual host, which only the lab uses.

use std::process::Command;

use rustix::system::uname;

use crate::LabError;

/// How much faster than raw the clock runs. Linux slews by up to 500 ppm.
const SLEW_PPM: i64 = 100;
/// `adjtimex` takes the frequency in ppm with a binary fraction of 16 bits.
const FRACTION_BITS: u32 = 16;

/// Hostname of the virtual host.
const VIRTUAL_HOST: &[u8] = b"ebb-virtual-host";

/// A slew that ends when it is dropped.
#[derive(Debug)]
pub(super) struct Slew;

impl Slew {
    /// Starts slewing `CLOCK_MONOTONIC` against `CLOCK_MONOTONIC_RAW`.
    ///
    /// # Errors
    /// [`LabError::Slew`] outside of the virtual host, where other programs depend on the clock,
    /// and without busybox.
    pub(super) fn start() -> Result<Self, LabError> {
        if uname().nodename().to_bytes() != VIRTUAL_HOST {
            return Err(LabError::Slew("this is not the virtual host".to_owned()));
        }
        set(SLEW_PPM)?;
        Ok(Self)
    }
}

impl Drop for Slew {
    fn drop(&mut self) {
        if let Err(error) = set(0) {
            tracing::warn!("{error}");
        }
    }
}

fn set(ppm: i64) -> Result<(), LabError> {
    let frequency = (ppm << FRACTION_BITS).to_string();
    let output = Command::new("busybox")
        .args(["adjtimex", "-q", "-f", &frequency])
        .output()
        .map_err(|cause| LabError::Slew(format!("busybox: {cause}")))?;
    if output.status.success() {
        return Ok(());
    }
    let message = String::from_utf8_lossy(&output.stderr);
    Err(LabError::Slew(format!("busybox adjtimex: {}: {}", output.status, message.trim())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_virtual_hosts_clock_is_slewed() {
        assert!(matches!(Slew::start(), Err(LabError::Slew(_))));
    }
}
