//! Choosing where the guests run.

use ebb_vmm::probe::{KvmProbe, KvmQuality, probe};

use crate::LabError;
use crate::report::progress::Progress;
use crate::report::results::Place;

/// The requested place of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Wanted {
    /// Directly if KVM is usable here, else in the virtual host.
    #[default]
    Auto,
    /// Directly, or not at all.
    Direct,
    /// In the virtual host.
    VirtualHost,
}

/// Chooses the place for a run: as requested, or by the probe of KVM.
///
/// # Errors
/// [`LabError::NoDirectKvm`] when direct runs are requested and KVM does not run Linux here.
pub fn choose(wanted: Wanted, progress: &Progress) -> Result<Place, LabError> {
    if wanted == Wanted::VirtualHost {
        return Ok(Place::VirtualHost);
    }
    let obstacle = obstacle_here();
    if let (Wanted::Auto, Some(reason)) = (wanted, &obstacle) {
        progress.say(&format!("guests run in the virtual host: {reason}"));
    }
    decide(wanted, obstacle)
}

/// Why guests cannot run directly on this machine; `None` when they can.
pub fn obstacle_here() -> Option<String> {
    obstacle(&probe())
}

fn decide(wanted: Wanted, obstacle: Option<String>) -> Result<Place, LabError> {
    match (wanted, obstacle) {
        (Wanted::VirtualHost, _) | (Wanted::Auto, Some(_)) => Ok(Place::VirtualHost),
        (Wanted::Auto | Wanted::Direct, None) => Ok(Place::Direct),
        (Wanted::Direct, Some(reason)) => Err(LabError::NoDirectKvm(reason)),
    }
}

/// Why guests cannot run directly; `None` when they can.
fn obstacle(probe: &KvmProbe) -> Option<String> {
    match &probe.quality {
        KvmQuality::Fast { .. } if probe.missing_capabilities.is_empty() => None,
        KvmQuality::Fast { .. } => {
            Some(format!("{} lacks {}", probe.device, probe.missing_capabilities.join(", ")))
        }
        KvmQuality::Emulated { ns_per_iteration, .. } => Some(format!(
            "{} emulates its guests ({ns_per_iteration:.0} ns for an iteration of a loop that \
             takes about 1 ns on hardware)",
            probe.device
        )),
        KvmQuality::Unavailable { reason, remedy }
        | KvmQuality::PermissionDenied { reason, remedy } => Some(format!("{reason} ({remedy})")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn probed(quality: KvmQuality, missing: &[&str]) -> KvmProbe {
        KvmProbe {
            device: "/dev/kvm".to_owned(),
            quality,
            api_version: Some(12),
            missing_capabilities: missing.iter().map(|name| (*name).to_owned()).collect(),
        }
    }

    #[test]
    fn only_a_fast_and_complete_kvm_is_no_obstacle() {
        let fast = KvmQuality::Fast { ns_per_iteration: 1.0 };
        assert_eq!(obstacle(&probed(fast.clone(), &[])), None);
        assert!(
            obstacle(&probed(fast, &["KVM_CAP_IOEVENTFD"])).unwrap().contains("KVM_CAP_IOEVENTFD")
        );
        let emulated = KvmQuality::Emulated { ns_per_iteration: 1500.0, iterations: 10 };
        assert!(obstacle(&probed(emulated, &[])).unwrap().contains("1500 ns"));
        let denied = KvmQuality::PermissionDenied {
            reason: "not readable".to_owned(),
            remedy: "join kvm".to_owned(),
        };
        assert_eq!(obstacle(&probed(denied, &[])).unwrap(), "not readable (join kvm)");
    }

    #[test]
    fn the_virtual_host_is_used_on_request_or_without_usable_kvm() {
        let slow = || Some("it is slow".to_owned());
        assert_eq!(decide(Wanted::Auto, None).unwrap(), Place::Direct);
        assert_eq!(decide(Wanted::Auto, slow()).unwrap(), Place::VirtualHost);
        assert_eq!(decide(Wanted::VirtualHost, None).unwrap(), Place::VirtualHost);
        assert_eq!(decide(Wanted::Direct, None).unwrap(), Place::Direct);
        let message = decide(Wanted::Direct, slow()).unwrap_err().to_string();
        assert!(
            message.contains("it is slow") && message.contains("--where virtual-host"),
            "{message}"
        );
    }
}
