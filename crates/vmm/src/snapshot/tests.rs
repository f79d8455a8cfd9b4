use std::fs;
use std::path::Path;

use ebb_guest_ram::{Backing, GuestRam, HugePages, Populate, RegionSpec};
use ebb_kvm_clock::{ClockPolicy, Kilohertz, SavedClock};
use kvm_bindings::kvm_pit_state2;
use proptest::prelude::*;
use tempfile::TempDir;
use vm_memory::{Bytes, GuestAddress};

use super::client::NewSnapshot;
use super::file::{FORMAT_VERSION, RAM_OFFSET_BYTES, Sizes, check_target, write_rest};
use super::processor::Processor;
use super::state::InterruptControllers;
use super::*;
use crate::config::{
    BootFiles, DiskConfig, MergeBackend, MergeConfig, NetBackend, NetConfig, RateLimits,
    RebootAction, Switch, VmConfig,
};
use crate::devices::serial::SavedSerial;
use crate::isolation::IsolationConfig;

const RAM_BYTES: u64 = 32 << 20;

fn config() -> VmConfig {
    VmConfig {
        boot: Some(BootFiles {
            kernel: "/boot/vmlinuz".into(),
            initrd: Some("/boot/initrd".into()),
        }),
        cmdline: "quiet".to_owned(),
        cpus: 0,
        memory: "size=32M,thp=off".parse().unwrap(),
        numa: vec![
            "size=16M,cpus=0,host_node=1".parse().unwrap(),
            "size=16M,cpus=1,distances=20:10".parse().unwrap(),
        ],
        balloon: crate::config::options::parse_balloon("hinting=off,poison=off").unwrap(),
        disks: vec!["path=/disk,readonly=on".parse().unwrap()],
        rng: Some(RateLimits::default()),
        nets: Vec::new(),
        vsock: None,
        serial: crate::config::SerialConfig::Null,
        api: Some("/run/api".into()),
        seccomp: Switch::Off,
        isolation: IsolationConfig::default(),
        on_reboot: RebootAction::Exit,
        clock: ClockPolicy::CatchUp,
        forkable: Switch::Off,
    }
}

/// Configuration of the test machine.
pub(crate) fn machine() -> MachineConfig {
    MachineConfig::of(&config())
}

/// Mostly empty guest memory.
pub(crate) fn ram() -> GuestRam {
    let spec = RegionSpec { start: GuestAddress(0), size_bytes: RAM_BYTES, host_node: None };
    let ram = GuestRam::new(&[spec], Backing::Anonymous, HugePages::Off, Populate::Lazy).unwrap();
    ram.memory().write_slice(b"guest memory", GuestAddress(5 << 20)).unwrap();
    ram
}

fn write(path: &Path) -> Result<Sizes, SnapshotError> {
    write_machine(path, &ram())
}

/// A machine without vCPUs, whose state needs no KVM.
pub(crate) fn write_machine(path: &Path, ram: &GuestRam) -> Result<Sizes, SnapshotError> {
    let new = NewSnapshot::create(path)?;
    let sizes = write_into(new.file(), ram)?;
    new.publish()?;
    Ok(sizes)
}

/// The monitor's half.
pub(crate) fn write_into(file: &fs::File, ram: &GuestRam) -> Result<Sizes, SnapshotError> {
    let state = MachineState {
        monitor: "0".to_owned(),
        created_unix_ms: 1,
        machine: MachineConfig::of(&config()),
        processor: Processor { cpuid: Vec::new() },
        vcpus: Vec::new(),
        clock: SavedClock {
            clock_ns: 7,
            host_realtime_ns: None,
            host_tsc: None,
            tsc_khz: Kilohertz::new(2_000_000).unwrap(),
            guest_tsc: Vec::new(),
        },
        interrupts: InterruptControllers { chips: Vec::new(), timer: kvm_pit_state2::default() },
        serial: SavedSerial {
            divisor: [1, 0],
            interrupt_enable: 0,
            interrupt_identification: 1,
            line_control: 3,
            line_status: 0x60,
            modem_control: 8,
            modem_status: 0,
            scratch: 0,
            input: vec![b'x'],
        },
        acpi_events: 0,
        generation_id: true,
        paused: false,
        devices: Vec::new(),
        ram: Some(ram.save(file, RAM_OFFSET_BYTES, &mut |_| {})?),
    };
    write_rest(file, &state, RAM_BYTES).unwrap();
    Ok(Sizes::of(file).unwrap())
}

fn names(directory: &TempDir) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn a_written_snapshot_can_be_read() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a");
    let written = write(&path).unwrap();
    assert_eq!(names(&directory), ["a"]);
    assert_eq!(written.file_bytes, fs::metadata(&path).unwrap().len());
    assert!(written.file_bytes > RAM_OFFSET_BYTES + RAM_BYTES);
    assert!(written.stored_bytes < 1 << 20, "{} bytes", written.stored_bytes);

    let snapshot = SnapshotFile::open(&path).unwrap();
    assert_eq!(snapshot.state.clock.clock_ns, 7);
    assert_eq!(snapshot.state.serial.input, [b'x']);
    let mut done = Vec::new();
    snapshot.verify_ram(&mut |bytes| done.push(bytes)).unwrap();
    assert_eq!(done, [RAM_BYTES]);
    let spec = RegionSpec { start: GuestAddress(0), size_bytes: RAM_BYTES, host_node: None };
    let ram =
        GuestRam::restore(&[spec], HugePages::Off, snapshot.file, RAM_OFFSET_BYTES, &snapshot.ram)
            .unwrap();
    let mut bytes = [0; 12];
    ram.memory().read_slice(&mut bytes, GuestAddress(5 << 20)).unwrap();
    assert_eq!(&bytes, b"guest memory");
}

#[test]
fn a_restore_does_not_add_the_extension_to_an_old_balloon() {
    let mut document = serde_json::to_value(MachineConfig::of(&config())).unwrap();
    let options = document["balloon"].as_object_mut().unwrap();
    for field in ["page_bitmap", "page_ranges", "host_requests"] {
        assert_eq!(options.remove(field), Some(true.into()));
    }
    for field in ["init_reported", "init_on_inflate"] {
        assert_eq!(options.remove(field), Some(false.into()));
    }
    let machine: MachineConfig = serde_json::from_value(document).unwrap();
    let balloon = machine.into_vm_config(trusting()).unwrap().balloon.unwrap();
    let off = [
        balloon.page_bitmap,
        balloon.page_ranges,
        balloon.host_requests,
        balloon.init_reported,
        balloon.init_on_inflate,
    ];
    assert_eq!((off, balloon.reporting), ([Switch::Off; 5], Switch::On));
}

#[test]
fn the_configuration_round_trips() {
    let saved = MachineConfig::of(&config());
    let text = serde_json::to_string(&saved).unwrap();
    let read: MachineConfig = serde_json::from_str(&text).unwrap();
    let config = read.into_vm_config(trusting()).unwrap();
    assert_eq!(MachineConfig::of(&config), saved);
    assert_eq!(config.on_reboot, RebootAction::Exit);

    let disk = |path: &str| DiskConfig { path: path.into(), ..DiskConfig::default() };
    let readonly = |path: &str| DiskConfig { readonly: Switch::On, ..disk(path) };
    let disks = |disks| saved.clone().into_vm_config(Overrides { disks, ..Overrides::default() });
    // A guest with a read-only disk would notice if it became writable.
    assert_eq!(disks(vec![disk("/copy")]).unwrap().disks, [readonly("/copy")]);
    let error = disks(vec![disk("/copy"), disk("/other")]).unwrap_err();
    assert!(error.to_string().contains("1 disks, --disk was given 2 times"), "{error}");
    let overrides = Overrides {
        clock: Some(ClockPolicy::Continue),
        on_reboot: Some(RebootAction::Reset),
        ..trusting()
    };
    let config = saved.into_vm_config(overrides).unwrap();
    assert_eq!((config.clock, config.on_reboot), (ClockPolicy::Continue, RebootAction::Reset));
}

/// Overrides that trust the description.
fn trusting() -> Overrides {
    Overrides { described_paths: DescribedPaths::Trust, ..Overrides::default() }
}

/// A description is untrusted input. With its paths opened, it could make a monitor started by root
/// write to the host's disks.
#[test]
fn no_path_of_a_description_is_opened() {
    let mut evil = config();
    let initrd = Some("/root/key\u{1b}[2J".into());
    evil.boot = Some(BootFiles { kernel: "/etc/shadow".into(), initrd });
    evil.on_reboot = RebootAction::Reset;
    evil.disks = vec!["path=/dev/sda".parse().unwrap(), "path=/dev/sdb".parse().unwrap()];
    evil.memory.merge = merging();
    let evil = MachineConfig::of(&evil);
    let error = |overrides| match evil.clone().into_vm_config(overrides).unwrap_err() {
        error @ SnapshotError::PathsNotNamed(_) => error.to_string(),
        other => panic!("{other:?}"),
    };
    let text = error(Overrides::default());
    for words in [
        "/etc/shadow",
        "/dev/sda",
        "--kernel",
        "--on-reboot exit",
        "--disk",
        "each of its 2",
        "--trust-paths",
    ] {
        assert!(text.contains(words), "{words}: {text}");
    }
    assert!(!text.contains('\u{1b}'), "{text}");

    let disks: Vec<DiskConfig> = ["path=/a", "path=/b"].map(|disk| disk.parse().unwrap()).to_vec();
    let boot = Some(BootFiles { kernel: "/boot/own".into(), initrd: None });
    let text = error(Overrides { boot: boot.clone(), ..Overrides::default() });
    assert!(text.contains("--disk") && !text.contains("--kernel"), "{text}");
    let text = error(Overrides { disks: disks.clone(), ..Overrides::default() });
    assert!(text.contains("--kernel") && !text.contains("--disk"), "{text}");

    let named = Overrides { boot: boot.clone(), disks: disks.clone(), ..Overrides::default() };
    let config = evil.clone().into_vm_config(named).unwrap();
    assert_eq!((config.boot, config.disks), (boot, disks.clone()));
    // No trust domain or broker of the description.
    assert!(config.memory.merge.is_off());
    let ends = Overrides { on_reboot: Some(RebootAction::Exit), disks, ..Overrides::default() };
    let ends = evil.clone().into_vm_config(ends).unwrap();
    assert_eq!((ends.on_reboot, &ends.boot), (RebootAction::Exit, &None));
    // Saved again, it has no kernel, so that even with a trusted description a reboot can only end
    // it.
    let again = MachineConfig::of(&ends);
    let resets = Overrides { on_reboot: Some(RebootAction::Reset), ..trusting() };
    assert!(matches!(again.clone().into_vm_config(resets), Err(SnapshotError::PathsNotNamed(_))));
    assert_eq!(again.into_vm_config(trusting()).unwrap().boot, None);

    let trusted = evil.clone().into_vm_config(trusting()).unwrap();
    assert_eq!(MachineConfig::of(&trusted), evil);
}

/// Devices keep what the guest knows about them, and get the backends that are named here.
#[test]
fn network_devices_get_new_backends() {
    let nets = |texts: &[&str]| -> Vec<NetConfig> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    };
    let (mac, other) = ("mac=02:00:00:00:00:01", "mac=02:00:00:00:00:02");
    let mut saved = config();
    saved.disks.clear();
    saved.nets =
        nets(&[&format!("tap=a,{mac},mtu=1400,rx_ops=5"), &format!("user,ports=1:2,{other}")]);
    let saved = MachineConfig::of(&saved);
    let text = serde_json::to_string(&saved).unwrap();
    let saved: MachineConfig = serde_json::from_str(&text).unwrap();
    let given = |texts: &[&str]| {
        let overrides = Overrides { nets: nets(texts), ..Overrides::default() };
        saved.clone().into_vm_config(overrides).map(|config| config.nets)
    };
    let expected = nets(&[&format!("tap=b,{mac},mtu=1400"), "fd=7,mac=02:00:00:00:00:09"]);
    assert_eq!(given(&["tap=b", "fd=7,mac=02:00:00:00:00:09"]).unwrap(), expected);
    for (wrong, found) in [
        (&[][..], "--net tap=NAME or --net user for each of its 2 network devices"),
        (&["user"], "2 network devices, --net was given 1 times"),
        (&["user,mtu=1500", "user"], "device 0 announces the MTU 1400"),
        (&["user", "user,mtu=1500"], "device 1 announces the MTU none"),
    ] {
        let error = given(wrong).unwrap_err().to_string();
        assert!(error.contains(found), "{wrong:?}: {error}");
    }
    let trusted = saved.clone().into_vm_config(trusting()).unwrap();
    assert_eq!(trusted.nets, saved.nets);
    // A descriptor's number means nothing in another process.
    let mut saved = saved;
    saved.nets[0].backend = NetBackend::Descriptor(5);
    assert!(matches!(saved.into_vm_config(trusting()), Err(SnapshotError::Nets { .. })));
}

#[test]
fn a_description_with_very_many_disks_gets_a_short_error() {
    let mut machine = machine();
    let disk = DiskConfig { path: "x".repeat(5000).into(), ..DiskConfig::default() };
    machine.disks = vec![disk; 10_000];
    let text = machine.into_vm_config(Overrides::default()).unwrap_err().to_string();
    assert!(text.len() < 2000 && text.contains("9996 more disks"), "{text}");
}

#[test]
fn a_snapshot_that_other_users_can_change_is_refused() {
    use std::os::unix::fs::PermissionsExt as _;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a");
    write(&path).unwrap();
    let check = || SnapshotFile::open(&path).unwrap().check_ownership();
    for (mode, sound) in [(0o600, true), (0o644, true), (0o664, false), (0o606, false)] {
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        assert_eq!(check().is_ok(), sound, "{mode:o}");
    }
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    // Only root can give files away.
    if std::os::unix::fs::chown(&path, Some(12_345), None).is_ok() {
        let error = check().unwrap_err().to_string();
        assert!(error.contains("user 12345") && error.contains("--trust"), "{error}");
    }
}

fn merging() -> MergeConfig {
    MergeConfig {
        backend: MergeBackend::Owner,
        domain: Some("red".to_owned()),
        broker: Some("/run/broker".into()),
        across_nodes: Some(false),
    }
}

#[test]
fn merging_continues_as_described_if_trusted_and_not_overridden() {
    let mut config = config();
    config.memory.merge = merging();
    let saved = MachineConfig::of(&config);
    let text = serde_json::to_string(&saved).unwrap();
    let read = || serde_json::from_str::<MachineConfig>(&text).unwrap();
    let restored = read().into_vm_config(trusting()).unwrap();
    assert_eq!(restored.memory.merge, config.memory.merge);
    let with = |merge: &str| Overrides { merge: merge.parse().unwrap(), ..trusting() };
    assert!(read().into_vm_config(with("merge=off")).unwrap().memory.merge.is_off());
    let elsewhere = read().into_vm_config(with("merge_broker=/run/other")).unwrap().memory.merge;
    assert_eq!(elsewhere, MergeConfig { broker: Some("/run/other".into()), ..config.memory.merge });
    let error = read().into_vm_config(with("merge=off,merge_domain=blue")).unwrap_err().to_string();
    assert!(error.contains("--memory") && error.contains("merge_domain"), "{error}");
}

#[test]
fn a_snapshot_without_the_merging_field_is_accepted() {
    let text = serde_json::to_string(&machine()).unwrap();
    assert!(!text.contains("merge"), "the default is not written: {text}");
    let read: MachineConfig = serde_json::from_str(&text).unwrap();
    assert!(read.merge.is_off());
}

#[test]
fn an_unfinished_snapshot_leaves_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let new = NewSnapshot::create(&directory.path().join("a")).unwrap();
    drop(new);
    assert!(names(&directory).is_empty());
}

#[test]
fn files_of_the_wrong_kind_are_refused_as_targets() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a");
    fs::write(&path, "").unwrap();
    let options = || fs::File::options();
    let (reader, writer) = std::os::unix::net::UnixStream::pair().unwrap();
    let (_end, pipe) = std::io::pipe().unwrap();
    drop(reader);
    check_target(&path, &options().write(true).open(&path).unwrap()).unwrap();
    check_target(&path, &options().read(true).write(true).open(&path).unwrap()).unwrap();
    let full = directory.path().join("b");
    fs::write(&full, "x").unwrap();
    let path_only = rustix::fs::open(&path, rustix::fs::OFlags::PATH, 0.into()).unwrap();
    for (file, words) in [
        (fs::File::open(directory.path()).unwrap(), "is a directory"),
        (std::os::fd::OwnedFd::from(pipe).into(), "is a FIFO"),
        (std::os::fd::OwnedFd::from(writer).into(), "is a socket"),
        (options().write(true).open("/dev/null").unwrap(), "is not a regular file"),
        (fs::File::open(&path).unwrap(), "not open for writing"),
        (path_only.into(), "not open for writing"),
        (options().append(true).open(&path).unwrap(), "O_APPEND"),
        (options().write(true).open(&full).unwrap(), "is not empty: it has 1 bytes"),
    ] {
        let error = check_target(Path::new("/name"), &file).unwrap_err().to_string();
        assert!(error.contains(words) && error.contains("/name"), "{words}: {error}");
    }
}

#[test]
fn only_snapshots_are_replaced() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a");
    write(&path).unwrap();
    write(&path).unwrap();
    assert_eq!(names(&directory), ["a"]);
    for precious in ["", "short", "a longer text"] {
        fs::write(&path, precious).unwrap();
        let error = write(&path).unwrap_err();
        assert!(matches!(error, SnapshotError::Exists { .. }), "{error}");
        assert_eq!(fs::read_to_string(&path).unwrap(), precious);
    }
    for path in ["relative", "/", "/nowhere/at/all"] {
        assert!(NewSnapshot::create(Path::new(path)).is_err(), "{path}");
    }
    assert!(NewSnapshot::create(directory.path()).is_err());
}

#[test]
fn a_full_disk_leaves_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let new = NewSnapshot::create(&directory.path().join("a")).unwrap();
    // Every write to /dev/full fails with ENOSPC.
    let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let ram = ram();
    assert!(ram.save(&full, RAM_OFFSET_BYTES, &mut |_| {}).is_err());
    drop(new);
    assert!(names(&directory).is_empty());
}

#[test]
fn another_version_is_refused_with_its_number() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a");
    write(&path).unwrap();
    let mut bytes = fs::read(&path).unwrap();
    bytes[8..12].copy_from_slice(&(FORMAT_VERSION + 1).to_le_bytes());
    fs::write(&path, bytes).unwrap();
    let error = SnapshotFile::open(&path).unwrap_err();
    assert!(
        matches!(error, SnapshotError::Version { found, .. } if found == FORMAT_VERSION + 1),
        "{error}"
    );
}

#[test]
fn files_that_are_no_snapshots_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a");
    let open = || SnapshotFile::open(&path).unwrap_err();
    assert!(matches!(open(), SnapshotError::Read { .. }));
    for content in [
        "",
        "EBB-VM",
        "a text of a certain length that is no snapshot at all, whatever its name says",
    ] {
        fs::write(&path, content).unwrap();
        assert!(matches!(open(), SnapshotError::NotASnapshot { .. }), "{content}");
    }
    let pipe = directory.path().join("pipe");
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, 0o600.into(), 0)
        .unwrap();
    for path in [directory.path(), &pipe, Path::new("/dev/zero")] {
        let error = SnapshotFile::open(path).unwrap_err();
        assert!(matches!(error, SnapshotError::NotASnapshot { .. }), "{error}");
        let error = NewSnapshot::create(path).unwrap_err();
        assert!(matches!(error, SnapshotError::Exists { .. }), "{error}");
    }
}

proptest! {
    /// The body of the fuzz target, on damaged states: single bytes of a real state changed.
    #[test]
    fn no_state_makes_the_reader_fail(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..8)
    ) {
        static STATE: std::sync::OnceLock<Vec<u8>> = std::sync::OnceLock::new();
        let state = STATE.get_or_init(|| {
            let directory = tempfile::tempdir().unwrap();
            let path = directory.path().join("a");
            write(&path).unwrap();
            fs::read(&path).unwrap().split_off((RAM_OFFSET_BYTES + RAM_BYTES) as usize)
        });
        let mut bytes = state.clone();
        for (index, byte) in changes {
            let index = index.index(bytes.len());
            bytes[index] = byte;
        }
        fuzz_snapshot(&bytes);
    }

    /// The same on files of working sets.
    #[test]
    fn no_working_set_makes_the_reader_fail(
        parts in prop::collection::vec((0..40_u32, 0..40_u32, any::<[bool; 2]>()), 0..64)
    ) {
        let number = |bits: u32, last: bool| (1_u64 << bits) - u64::from(last);
        let extents = parts.iter().map(|&(offset, size, [early, short])| {
            let (offset_bytes, size_bytes) = (number(offset, early), number(size, short));
            serde_json::json!({ "offset_bytes": offset_bytes, "size_bytes": size_bytes })
        });
        let extents: Vec<_> = extents.collect();
        let set = serde_json::json!({ "snapshot": "0123456789abcdef", "extents": extents });
        fuzz_snapshot(&serde_json::to_vec(&set).unwrap());
    }

    /// The same on arbitrary headers.
    #[test]
    fn no_header_makes_the_reader_fail(
        bytes in prop::collection::vec(any::<u8>(), 0..128),
        magic: bool
    ) {
        let mut bytes = bytes;
        if magic && bytes.len() > 12 {
            bytes[..12].copy_from_slice(b"EBB-VM\r\n\x01\0\0\0");
        }
        fuzz_snapshot(&bytes);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// A truncated file, or one with a changed bit in header, state or memory, is never accepted.
    #[test]
    fn damage_is_found(
        place in 0usize..3,
        position: prop::sample::Index,
        bit in 0u8..8,
        cut: bool
    ) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a");
        write(&path).unwrap();
        let mut bytes = fs::read(&path).unwrap();
        let state = (RAM_OFFSET_BYTES + RAM_BYTES) as usize;
        let memory = (RAM_OFFSET_BYTES + (5 << 20)) as usize;
        let range = [0..64, state..bytes.len(), memory..memory + 4096][place].clone();
        let position = range.start + position.index(range.len());
        if cut {
            bytes.truncate(position);
        } else {
            bytes[position] ^= 1 << bit;
        }
        fs::write(&path, bytes).unwrap();
        let sound = SnapshotFile::open(&path)
            .is_ok_and(|snapshot| snapshot.verify_ram(&mut |_| {}).is_ok());
        prop_assert!(!sound);
    }
}
