use super::*;
use crate::harness::driver::{Blocks, Module};
use crate::harness::merging::Nodes;

const SIZE: GuestSize = GuestSize { memory_mib: 512, cpus: 2 };

fn assets() -> Assets {
    Assets {
        ebb: "/bin/ebb".into(),
        qemu: Some("/usr/bin/qemu-system-x86_64".into()),
        bzimage: "/ebb/vmlinuz".into(),
        elf: Some("/ebb/vmlinux".into()),
        initrd: "/ebb/guest.cpio".into(),
        module: Presence::Present,
        debian: Some(GuestFiles { kernel: "/debian/vmlinux".into(), root: "/dev/vdb".into() }),
        work_disks: WorkDisks::Fresh(vec!["/dev/vdb".into()]),
    }
}

fn line(setup: &Setup) -> String {
    let command = assets().command(setup, SIZE, Some(Path::new("/tmp/c"))).unwrap();
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| word.to_str().unwrap()).collect::<Vec<_>>().join(" ")
}

#[test]
fn ebb_gets_the_setup_as_options() {
    let line = line(&Setup::EBB);
    assert!(line.starts_with("/bin/ebb run --serial stdio "), "{line}");
    assert!(
        line.contains("--cpus 2 --memory size=512M,backing=anon --balloon size=0,reporting=on"),
        "{line}"
    );
    assert!(
        line.contains("--kernel /ebb/vmlinuz --initrd /ebb/guest.cpio --cmdline console=ttyS0"),
        "{line}"
    );
}

#[test]
fn each_setting_of_a_series_reaches_the_command() {
    let off = line(&Setup { reporting: false, ..Setup::EBB });
    assert!(off.contains("reporting=off") && !off.contains("reporting=on"));
    assert!(
        line(&Setup { huge_pages: false, ..Setup::EBB }).contains("size=512M,backing=anon,thp=off")
    );
    assert!(
        line(&Setup { uncompressed_kernel: true, ..Setup::EBB }).contains("--kernel /ebb/vmlinux ")
    );
    let merged = line(&Setup { merging: Merging::Kernel(Nodes::Apart), ..Setup::EBB });
    assert!(merged.contains("backing=anon,merge=kernel,"), "{merged}");
    let lean = line(&Setup { bounce_buffer: false, ..Setup::EBB });
    assert!(lean.contains("reboot=t swiotlb=noforce"), "{lean}");
    let late = line(&Setup { clock: ClockPolicy::CatchUp, ..Setup::EBB });
    assert!(late.contains(" --clock catch-up "), "{late}");
    let seed = Driver::Module(Module { blocks: Blocks::SinglePages, ..Module::DEFAULT });
    let single = line(&Setup { driver: seed, clearing: false, ..Setup::EBB });
    assert!(
        single.contains("init_on_alloc=0 ebb.balloon=ebb_balloon ebb_balloon.tracker="),
        "{single}"
    );
    let plain = line(&Setup { extension: false, ..Setup::EBB });
    assert!(plain.contains(",page_bitmap=off,page_ranges=off,host_requests=off "), "{plain}");
    let ordered = line(&Setup { reporting_order: Some(4), ..Setup::EBB });
    assert!(ordered.ends_with(" page_reporting.page_reporting_order=4 --api /tmp/c"), "{ordered}");
}

#[test]
fn both_monitors_give_lean_words_to_the_kernel() {
    let setup = Setup { lean: true, ..Setup::EBB };
    assert!(line(&setup).contains(" --lean "), "{}", line(&setup));
    let qemu = line(&Setup { monitor: MonitorKind::Qemu, ..setup });
    assert!(qemu.contains("-append cryptomgr.notests swiotlb=noforce 8250.nr_uarts=1 console="));
    assert!(!qemu.contains("--lean"), "{qemu}");
}

#[test]
fn a_restored_guest_has_the_console_and_the_clock_of_its_series() {
    let setup = Setup { clock: ClockPolicy::CatchUp, ..Setup::EBB };
    let command = assets().restore_command(&setup, Path::new("/tmp/s"), Path::new("/tmp/c"));
    let words: Vec<_> = command.get_args().map(|word| word.to_str().unwrap()).collect();
    let expected = "restore /tmp/s --serial stdio --on-reboot exit --clock catch-up --api /tmp/c";
    assert_eq!(words.join(" "), expected);
}

#[test]
fn a_guest_is_received_by_a_monitor_of_its_kind() {
    let line = |setup: &Setup| {
        let command =
            assets().receive_command(setup, SIZE, "198.18.0.2:4444", Path::new("/tmp/c")).unwrap();
        command.get_args().map(|word| word.to_str().unwrap()).collect::<Vec<_>>().join(" ")
    };
    assert_eq!(
        line(&Setup::EBB),
        "receive --listen tcp:198.18.0.2:4444 --insecure --serial stdio --on-reboot exit --clock \
         continue --api /tmp/c"
    );
    let qemu = Setup { monitor: MonitorKind::Qemu, hinting: true, ..Setup::EBB };
    let hinted = line(&qemu);
    assert!(hinted.starts_with("-object iothread,id=hints "), "{hinted}");
    assert!(hinted.contains("deflate-on-oom=on,free-page-hint=on,iothread=hints "), "{hinted}");
    assert!(hinted.ends_with(" -incoming tcp:198.18.0.2:4444"), "{hinted}");
}

#[test]
fn qemu_gets_the_same_guest() {
    let line = line(&Setup { monitor: MonitorKind::Qemu, ..Setup::EBB });
    assert!(
        line.contains("-smp 2 -m 512M -device virtio-balloon-pci,free-page-reporting=on"),
        "{line}"
    );
    assert!(
        line.contains("-kernel /ebb/vmlinuz -initrd /ebb/guest.cpio -append console=ttyS0"),
        "{line}"
    );
    assert!(line.ends_with("-qmp unix:/tmp/c,server=on,wait=off"), "{line}");
}

#[test]
fn missing_files_are_reported() {
    let bare = Assets { qemu: None, elf: None, module: Presence::Absent, ..assets() };
    let module = Setup { driver: Driver::Module(Module::DEFAULT), ..Setup::EBB };
    assert_eq!(bare.missing(&module), Some(Missing::Module));
    assert_eq!(assets().missing(&module), None);
    let qemu = Setup { monitor: MonitorKind::Qemu, ..Setup::EBB };
    let elf = Setup { uncompressed_kernel: true, ..Setup::EBB };
    assert_eq!(bare.missing(&Setup::EBB), None);
    assert_eq!(bare.missing(&qemu), Some(Missing::Qemu));
    assert_eq!(bare.command(&qemu, SIZE, None).unwrap_err(), Missing::Qemu);
    assert_eq!(bare.command(&elf, SIZE, None).unwrap_err(), Missing::Elf);
}

#[test]
fn setups_are_described_by_their_differences() {
    let text = Setup { huge_pages: false, reporting_order: Some(0), ..Setup::EBB }.describe();
    assert_eq!(
        text,
        "ebb run, free page reporting on, guest reports blocks of order 0 and up, guest memory \
         without transparent huge pages"
    );
}

#[test]
fn a_debian_guest_has_a_root_on_a_disk_and_no_initramfs() {
    for monitor in [MonitorKind::Ebb, MonitorKind::Qemu] {
        let setup = Setup { system: System::DebianWithSsh, monitor, ..Setup::EBB };
        let line = line(&setup);
        assert!(line.contains("kernel /debian/vmlinux ") && !line.contains("initrd"), "{line}");
        assert!(line.contains("root=/dev/vda rw ip=198.18.1.2::198.18.1.1:"), "{line}");
        let without = Assets { debian: None, ..assets() };
        assert_eq!(without.missing(&setup), Some(Missing::Debian));
    }
}

#[test]
fn a_guest_that_reads_a_debian_stays_in_its_initramfs() {
    let setup = Setup { system: System::AgentWithDebian, ..Setup::EBB };
    let words = line(&setup);
    assert!(words.contains("guest.cpio") && !words.contains("root="), "{words}");
    assert!(setup.describe().ends_with("Debian on a disk that it reads"));
    let without = Assets { work_disks: WorkDisks::None, ..assets() };
    assert_eq!(without.missing(&setup), Some(Missing::Work));
}

#[test]
fn a_debian_guest_with_an_agent_continues_from_the_initramfs() {
    for monitor in [MonitorKind::Ebb, MonitorKind::Qemu] {
        let setup = Setup { system: System::DebianWithAgent, monitor, ..Setup::EBB };
        let line = line(&setup);
        assert!(line.contains("kernel /ebb/vmlinuz -") && line.contains("guest.cpio"), "{line}");
        assert!(line.contains(" ebb.root=/dev/vda systemd.show_status=no"), "{line}");
        let without = Assets { work_disks: WorkDisks::None, ..assets() };
        assert_eq!(without.missing(&setup), Some(Missing::Work));
    }
}
