//! Kernels, vCPUs and memory maps as seen by the guest.

use std::fs;
use std::path::Path;

use ebb_agent::protocol::{Command, Event};
use ebb_vmm::api::VmState;
use ebb_vmm::config::Backing;

use crate::guest::{GIB, Guest, MIB};
use crate::harness::{Scene, Test, eventually, when};
use crate::setup::Setup;

/// The tests.
pub const TESTS: &[Test] = &[
    Test::new("boot::bzimage_on_one_vcpu", 180, bzimage_on_one_vcpu),
    Test::new("boot::vmlinux_on_two_vcpus", 180, vmlinux_on_two_vcpus),
    Test::new("boot::memory_above_4_gib", 240, memory_above_4_gib),
    Test::new("boot::numa_nodes", 180, numa_nodes),
];

/// Memory that the kernel uses of 512 MiB: page structures, its image, the initramfs.
const KERNEL_SHARE: u64 = 80 * MIB;

/// Checks the properties of every guest in the agent's first message.
fn greeting(guest: &Guest) -> (u32, u64) {
    match guest.wait_ready(1) {
        Event::Ready { cpus, memory, warnings, .. } => {
            assert_eq!(warnings, [] as [String; 0]);
            (cpus, memory.total_bytes)
        }
        other => panic!("{other:?}"),
    }
}

fn bzimage_on_one_vcpu(scene: &Scene) {
    let guest = Setup::new(scene).kernel(&scene.world.bzimage).words("ebb.word=\"a b\"").start();
    let (cpus, total_bytes) = greeting(&guest);
    assert_eq!(cpus, 1);
    assert!((512 * MIB - KERNEL_SHARE..=512 * MIB).contains(&total_bytes), "{total_bytes}");
    assert!(guest.read_file("/proc/cmdline").trim_end().ends_with("ebb.word=\"a b\""));
    let vm = guest.vm();
    assert_eq!((vm.state, vm.cpus, vm.memory_bytes), (VmState::Running, 1, 512 * MIB));
    assert_eq!((vm.backing, vm.pid), (Backing::Anonymous, guest.pid()));
    assert_eq!(vm.kernel, scene.world.bzimage.to_str().unwrap());
    assert!(vm.resident_bytes > 16 * MIB && vm.resident_bytes < 512 * MIB, "{vm:?}");
    // The stock driver is bound to the balloon.
    assert!(guest.read_file("/proc/interrupts").contains("virtio0"));
}

fn vmlinux_on_two_vcpus(scene: &Scene) {
    let guest = Setup::new(scene).args(["--cpus", "2"]).start();
    assert_eq!(greeting(&guest).0, 2);
    assert_eq!(guest.read_file("/sys/devices/system/cpu/online"), "0-1\n");
    assert!(guest.read_file("/proc/cpuinfo").contains("hypervisor"), "the hypervisor flag is set");
    let sources =
        guest.read_file("/sys/devices/system/clocksource/clocksource0/available_clocksource");
    assert!(sources.contains("kvm-clock"), "{sources}");
    // Both vCPUs work at the same time: each command is a separate process.
    let both = [(); 2].map(|()| guest.send(Command::AllocTouchExit { bytes: 100 * MIB }));
    for id in both {
        guest.outcome(id).unwrap();
    }
    interrupts_without_exits(&guest);
}

/// At an interrupt a driver reads one register, which is mapped, and writes another one, which KVM
/// takes: neither wakes the monitor.
fn interrupts_without_exits(guest: &Guest) {
    let exits = || {
        ["mmio_read", "mmio_write"]
            .map(|kind| guest.metric(&format!("ebb_vcpu_exits_total{{kind=\"{kind}\"}}")))
    };
    let before = exits();
    for _ in 0..20 {
        guest.statistics().unwrap();
    }
    assert_eq!(exits(), before);
}

/// Free pages of the guest's zone Normal, which begins at 4 GiB on x86-64.
fn free_pages_above_4_gib(guest: &Guest) -> u64 {
    let text = guest.read_file("/proc/zoneinfo");
    let zone = text
        .split("Node 0, zone")
        .find(|zone| zone.trim_start().starts_with("Normal"))
        .expect("zone Normal");
    let field = |name: &str| {
        let rest = zone.split_once(name).unwrap_or_else(|| panic!("no {name} in {zone}")).1;
        rest.split_ascii_whitespace().find_map(|word| word.parse::<u64>().ok()).expect("a number")
    };
    assert_eq!(field("start_pfn:"), 4 * GIB / 4096);
    field("pages free")
}

fn memory_above_4_gib(scene: &Scene) {
    let guest = Setup::new(scene).memory("size=4G").start();
    let total_bytes = greeting(&guest).1;
    assert!(total_bytes > 4 * GIB - 256 * MIB, "{total_bytes}");
    let before = free_pages_above_4_gib(&guest);
    guest.run(Command::Hold { bytes: 256 * MIB, pattern: 7 });
    let taken = (before - free_pages_above_4_gib(&guest)) * 4096;
    assert!(taken > 200 * MIB, "{taken} bytes came from above 4 GiB");
    assert_eq!(guest.wrong_pages(), 0);
    assert!(guest.resident() > 256 * MIB);
    // The balloon has nearly all pages above the hole below 4 GiB, which Linux takes first.
    guest.run(Command::Release);
    let before = guest.resident();
    guest.inflate_to((free_pages_above_4_gib(&guest) * 4096 - 32 * MIB) / MIB * MIB);
    eventually("the pages above 4 GiB are returned to the host", 20, || {
        let now = guest.resident();
        when(now + 200 * MIB < before, || format!("{before} bytes before, {now} now"))
    });
}

fn numa_nodes(scene: &Scene) {
    let two_host_nodes = Path::new("/sys/devices/system/node/node1").exists();
    let bind =
        |node: u32| if two_host_nodes { format!(",host_node={node}") } else { String::new() };
    let nodes = [
        format!("size=512M,cpus=0,distances=10:30{}", bind(1)),
        format!("size=256M,cpus=1,distances=30:10{}", bind(0)),
    ];
    let guest = Setup::new(scene)
        .memory("size=768M")
        .args(["--cpus", "2", "--numa", &nodes[0], "--numa", &nodes[1]])
        .start();
    let file =
        |name: &str| guest.read_file(&format!("/sys/devices/system/node/{name}")).trim().to_owned();
    assert_eq!(file("online"), "0-1");
    assert_eq!((file("node0/cpulist").as_str(), file("node1/cpulist").as_str()), ("0", "1"));
    assert_eq!(
        (file("node0/distance").as_str(), file("node1/distance").as_str()),
        ("10 30", "30 10")
    );
    let total = |node: u32| {
        let text = file(&format!("node{node}/meminfo"));
        let line = text.lines().find(|line| line.contains("MemTotal:")).expect("MemTotal");
        line.split_ascii_whitespace()
            .nth_back(1)
            .and_then(|number| number.parse::<u64>().ok())
            .unwrap()
            * 1024
    };
    assert!(total(0) > 512 * MIB - KERNEL_SHARE && total(0) <= 512 * MIB, "{}", total(0));
    assert!(total(1) > 256 * MIB - KERNEL_SHARE && total(1) <= 256 * MIB, "{}", total(1));
    if two_host_nodes {
        let maps = fs::read_to_string(format!("/proc/{}/numa_maps", guest.pid())).unwrap();
        for (policy, only) in [("bind:1", " N0="), ("bind:0", " N1=")] {
            let bound: Vec<_> = maps.lines().filter(|line| line.contains(policy)).collect();
            assert!(!bound.is_empty(), "no memory with policy {policy} in:\n{maps}");
            assert!(!bound.iter().any(|line| line.contains(only)), "{bound:?}");
        }
    }
}
