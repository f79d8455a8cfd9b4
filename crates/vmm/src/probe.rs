//! Measures whether this machine's KVM can run guests, by running one, and whether a monitor of
//! this user could merge pages, by trying.
//!
//! The existence of `/dev/kvm` proves little: some machines have a KVM that emulates every
//! instruction of an ordinary guest, at 0.1 to 2 million instructions a second, with which Linux
//! does not boot in reasonable time. A loop of ten thousand iterations in 64-bit mode takes 2 to 30
//! microseconds on hardware and 10 to 100 milliseconds there, a difference that the cost of
//! entering and leaving a guest, some microseconds, does not hide. The measurement is cheaper than
//! a file that would cache its result.

use std::ffi::CString;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::time::Duration;

pub use ebb_guest_ram::single_pages_bytes;
use ebb_guest_ram::{
    Backing, GuestRam, HugePages, MergeUnavailable, Populate, RegionSpec, StableSegments,
};
use kvm_ioctls::{Cap, Kvm};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use vm_memory::GuestAddress;

mod guest;

/// Iterations of the guest's loop; each is two instructions.
pub const ITERATIONS: u64 = 10_000;

/// Time of an iteration, in nanoseconds, from which KVM counts as emulated. Hardware takes 0.2 to 3
/// ns, emulation over 1000 ns.
pub const EMULATED_FROM_NS: f64 = 100.0;

/// Most runs. The scheduler of a busy machine may preempt a run, which then looks slow.
const RUNS: u32 = 5;

/// Most time for all of them. An emulating KVM takes less than a second.
const TIME_LIMIT: Duration = Duration::from_secs(30);

/// The smallest guest memory that the monitor can merge, in bytes.
const LEAST_MERGED_BYTES: u64 = 2 << 20;

/// The only KVM API version (Linux Documentation/virt/kvm/api.rst, section 4.1).
const API_VERSION: i32 = 12;

/// KVM capabilities that the monitor needs.
const NEEDED: [(Cap, &str); 10] = [
    (Cap::UserMemory, "KVM_CAP_USER_MEMORY"),
    (Cap::Irqchip, "KVM_CAP_IRQCHIP"),
    (Cap::Pit2, "KVM_CAP_PIT2"),
    (Cap::SetTssAddr, "KVM_CAP_SET_TSS_ADDR"),
    (Cap::ExtCpuid, "KVM_CAP_EXT_CPUID"),
    (Cap::MpState, "KVM_CAP_MP_STATE"),
    (Cap::Ioeventfd, "KVM_CAP_IOEVENTFD"),
    (Cap::ImmediateExit, "KVM_CAP_IMMEDIATE_EXIT"),
    (Cap::AdjustClock, "KVM_CAP_ADJUST_CLOCK"),
    (Cap::ReadonlyMem, "KVM_CAP_READONLY_MEM"),
];

/// Remedy for a KVM without a needed capability.
pub(crate) const KERNEL_REMEDY: &str = "use a Linux kernel of version 5.10 or later as the host";

/// Names of the needed capabilities that this KVM lacks.
pub(crate) fn missing_capabilities(kvm: &Kvm) -> Vec<String> {
    NEEDED
        .iter()
        .filter(|(capability, _)| !kvm.check_extension(*capability))
        .map(|(_, name)| (*name).to_owned())
        .collect()
}

/// Suitability of KVM on this machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum KvmQuality {
    /// The processor runs guests (or a fast emulator of a whole machine does, underneath).
    Fast {
        /// Time of one iteration of the loop, in the best run.
        ns_per_iteration: f64,
    },
    /// Every guest instruction is emulated: Linux does not boot in reasonable time.
    Emulated {
        /// Time of one iteration of the loop, in the best run.
        ns_per_iteration: f64,
        /// Iterations completed.
        iterations: u64,
    },
    /// No usable KVM.
    Unavailable {
        /// What is missing.
        reason: String,
        /// What to do.
        remedy: String,
    },
    /// KVM exists, but this user may not use it.
    PermissionDenied {
        /// What was refused.
        reason: String,
        /// What to do.
        remedy: String,
    },
}

impl KvmQuality {
    /// The quality that follows from a run of `iterations` iterations in `elapsed`.
    pub fn from_run(iterations: u64, elapsed: Duration) -> Self {
        if iterations == 0 {
            // Not even one iteration: too slow to measure.
            return Self::Emulated { ns_per_iteration: elapsed.as_nanos() as f64, iterations };
        }
        let ns_per_iteration = elapsed.as_nanos() as f64 / iterations as f64;
        if ns_per_iteration < EMULATED_FROM_NS {
            Self::Fast { ns_per_iteration }
        } else {
            Self::Emulated { ns_per_iteration, iterations }
        }
    }

    /// Whether Linux guests run on it.
    pub fn runs_linux(&self) -> bool {
        matches!(self, Self::Fast { .. })
    }
}

/// The result of a probe.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct KvmProbe {
    /// The device that was examined.
    pub device: String,
    /// Its suitability.
    pub quality: KvmQuality,
    /// Its API version; `None` if it could not be opened.
    pub api_version: Option<i32>,
    /// Capabilities that the monitor needs and this KVM lacks; empty if it was not opened.
    pub missing_capabilities: Vec<String>,
}

/// Examines `/dev/kvm`. Takes about a millisecond where KVM is fast, most of it to set up a virtual
/// machine, and some hundred milliseconds where it is emulated.
pub fn probe() -> KvmProbe {
    probe_device(Path::new("/dev/kvm"))
}

/// Like [`probe`], for another path.
pub fn probe_device(device: &Path) -> KvmProbe {
    let mut result = KvmProbe {
        device: device.display().to_string(),
        quality: KvmQuality::Unavailable { reason: String::new(), remedy: String::new() },
        api_version: None,
        missing_capabilities: Vec::new(),
    };
    result.quality = match examine(device, &mut result) {
        Ok(run) => KvmQuality::from_run(run.iterations, run.elapsed),
        Err(quality) => quality,
    };
    result
}

fn examine(device: &Path, result: &mut KvmProbe) -> Result<guest::Run, KvmQuality> {
    let name =
        CString::new(device.as_os_str().as_bytes()).map_err(|_| KvmQuality::Unavailable {
            reason: format!("'{}' has a zero byte", device.display()),
            remedy: "give the path of a KVM device".to_owned(),
        })?;
    let kvm = Kvm::new_with_path(name).map_err(|error| {
        cannot_open(device, Errno::from_raw_os_error(error.errno()), processor())
    })?;
    let version = kvm.get_api_version();
    if version != API_VERSION {
        return Err(KvmQuality::Unavailable {
            reason: format!("{} is not a KVM device of version {API_VERSION}", device.display()),
            remedy: "check /dev/kvm (ls -l /dev/kvm): it must be a character device, major 10"
                .to_owned(),
        });
    }
    result.api_version = Some(version);
    result.missing_capabilities = missing_capabilities(&kvm);
    if !result.missing_capabilities.is_empty() {
        return Err(KvmQuality::Unavailable {
            reason: format!("this KVM lacks {}", result.missing_capabilities.join(", ")),
            remedy: KERNEL_REMEDY.to_owned(),
        });
    }
    guest::best_run(&kvm, RUNS, TIME_LIMIT).map_err(|error| KvmQuality::Unavailable {
        reason: error.to_string(),
        remedy: "see the kernel's log (dmesg); another hypervisor may be using the \
                     processor's virtualization"
            .to_owned(),
    })
}

/// Enables merging by the monitor (merge=owner) on a small region, as for a machine.
///
/// # Errors
/// Why merging is not possible, with a remedy.
pub fn probe_merging() -> Result<(), MergeUnavailable> {
    let spec =
        RegionSpec { start: GuestAddress(0), size_bytes: LEAST_MERGED_BYTES, host_node: None };
    let ram = GuestRam::new(&[spec], Backing::Anonymous, HugePages::Off, Populate::Lazy)?;
    ram.enable_merging(StableSegments::new())
}

/// The processor's virtualization extension, from its feature flags.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Processor {
    /// Intel VT-x.
    Vmx,
    /// AMD-V.
    Svm,
    /// Neither, or disabled, or hidden by the hypervisor that this machine runs on.
    Neither,
}

fn processor() -> Processor {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    processor_of(&text)
}

fn processor_of(cpuinfo: &str) -> Processor {
    let flags = cpuinfo.lines().find(|line| line.starts_with("flags")).unwrap_or_default();
    let has = |flag| flags.split_whitespace().any(|word| word == flag);
    if has("vmx") {
        Processor::Vmx
    } else if has("svm") {
        Processor::Svm
    } else {
        Processor::Neither
    }
}

/// Interprets a failure to open the device.
fn cannot_open(device: &Path, errno: Errno, processor: Processor) -> KvmQuality {
    let device = device.display();
    match errno {
        Errno::ACCESS | Errno::PERM => KvmQuality::PermissionDenied {
            reason: format!("this user may not open {device}"),
            remedy: format!(
                "join the group that owns {device}, usually kvm, and log in again: \
                 sudo usermod -aG kvm $USER"
            ),
        },
        Errno::NOENT | Errno::NODEV | Errno::NXIO => KvmQuality::Unavailable {
            reason: format!("there is no {device}"),
            remedy: match processor {
                Processor::Vmx => "load the module: sudo modprobe kvm_intel".to_owned(),
                Processor::Svm => "load the module: sudo modprobe kvm_amd".to_owned(),
                Processor::Neither => {
                    "switch on virtualization in the firmware's setup, or nested virtualization \
                     in the hypervisor that this machine runs on; without it guests run in the \
                     virtual host"
                        .to_owned()
                }
            },
        },
        errno => KvmQuality::Unavailable {
            reason: format!("{device} cannot be opened: {errno}"),
            remedy: "see the kernel's log (dmesg) for what KVM says".to_owned(),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn speed_decides() {
        let run = |iterations, us| KvmQuality::from_run(iterations, Duration::from_micros(us));
        assert_eq!(run(ITERATIONS, 10), KvmQuality::Fast { ns_per_iteration: 1.0 });
        assert!(run(ITERATIONS, 999).runs_linux());
        assert!(!run(ITERATIONS, 1000).runs_linux());
        assert_eq!(
            run(ITERATIONS, 15_000),
            KvmQuality::Emulated { ns_per_iteration: 1500.0, iterations: ITERATIONS }
        );
        assert!(!run(0, 2_000_000).runs_linux());
        assert!(!run(0, 0).runs_linux());
    }

    #[test]
    fn each_obstacle_has_its_remedy() {
        let open = |errno, processor| cannot_open(Path::new("/dev/kvm"), errno, processor);
        match open(Errno::ACCESS, Processor::Vmx) {
            KvmQuality::PermissionDenied { reason, remedy } => {
                assert!(reason.contains("/dev/kvm"));
                assert!(remedy.contains("usermod -aG kvm"));
            }
            other => panic!("{other:?}"),
        }
        for (errno, processor, part) in [
            (Errno::NOENT, Processor::Vmx, "kvm_intel"),
            (Errno::NODEV, Processor::Svm, "kvm_amd"),
            (Errno::NOENT, Processor::Neither, "virtual host"),
            (Errno::BUSY, Processor::Vmx, "dmesg"),
        ] {
            match open(errno, processor) {
                KvmQuality::Unavailable { remedy, .. } => {
                    assert!(remedy.contains(part), "{remedy}");
                }
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn processor_flags_are_whole_words() {
        assert_eq!(processor_of("model : vmx\nflags\t\t: fpu vmx_thing lm\n"), Processor::Neither);
        assert_eq!(processor_of("flags\t\t: fpu vmx lm\n"), Processor::Vmx);
        assert_eq!(processor_of("flags\t\t: fpu svm\n"), Processor::Svm);
        assert_eq!(processor_of(""), Processor::Neither);
    }

    #[test]
    fn paths_without_kvm_are_unavailable() {
        for path in ["/dev/null", "/nonexistent/kvm", "/dev", "/dev/kv\0m"] {
            let result = probe_device(Path::new(path));
            assert!(matches!(result.quality, KvmQuality::Unavailable { .. }), "{path}: {result:?}");
            assert_eq!(result.api_version, None);
        }
    }

    #[test]
    fn results_round_trip_through_json() {
        let probe = KvmProbe {
            device: "/dev/kvm".into(),
            quality: KvmQuality::Fast { ns_per_iteration: 0.5 },
            api_version: Some(12),
            missing_capabilities: vec!["KVM_CAP_IOEVENTFD".into()],
        };
        let text = serde_json::to_string(&probe).unwrap();
        assert!(text.contains(r#""quality":{"kind":"fast","ns_per_iteration":0.5}"#), "{text}");
        assert_eq!(serde_json::from_str::<KvmProbe>(&text).unwrap(), probe);
    }

    #[test]
    fn this_machine_is_judged_by_running_a_guest() {
        let result = probe();
        match result.quality {
            KvmQuality::Fast { ns_per_iteration } => assert!(ns_per_iteration < EMULATED_FROM_NS),
            KvmQuality::Emulated { ns_per_iteration, iterations } => {
                assert!(ns_per_iteration >= EMULATED_FROM_NS);
                assert!(iterations > 0, "the guest got nowhere");
            }
            // A machine without KVM, or a user without permission: no more to check here.
            KvmQuality::Unavailable { reason, remedy }
            | KvmQuality::PermissionDenied { reason, remedy } => {
                assert!(!reason.is_empty() && !remedy.is_empty());
            }
        }
    }

    #[test]
    fn concurrent_probes_do_not_interfere() {
        let kinds: Vec<_> = std::thread::scope(|scope| {
            let threads = [scope.spawn(probe), scope.spawn(probe)];
            threads.map(|thread| std::mem::discriminant(&thread.join().unwrap().quality)).to_vec()
        });
        assert_eq!(kinds[0], kinds[1]);
    }
}
