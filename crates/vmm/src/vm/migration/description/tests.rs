use super::*;
use crate::snapshot::tests::machine;

fn disk(bytes: u64) -> DeviceDescription {
    DeviceDescription {
        device_id: 2,
        features: 0b11,
        queue_sizes: vec![128],
        disk_bytes: Some(bytes),
    }
}

fn description() -> Description {
    Description {
        machine: machine(),
        processor: Processor { cpuid: Vec::new() },
        tsc_khz: Kilohertz::new(2_000_000).unwrap(),
        msrs: vec![0x10, 0x174],
        capabilities: vec!["KVM_CAP_XSAVE".to_owned(), "KVM_CAP_XCRS".to_owned()],
        regions: vec![MemoryRegion { start: 0, size_bytes: 32 << 20 }],
        devices: vec![disk(1 << 20)],
        held_bytes: 20 << 20,
        shared: None,
    }
}

fn here() -> Here {
    let Description { msrs, capabilities, regions, devices, .. } = description();
    Here { msrs, capabilities, regions, devices }
}

#[test]
fn a_destination_with_the_same_or_more_is_accepted() {
    assert_eq!(description().check(&here()), Ok(()));
    let mut more = here();
    more.msrs.push(0x175);
    more.capabilities.push("KVM_CAP_NEW".to_owned());
    more.devices[0].features |= 1 << 40;
    assert_eq!(description().check(&more), Ok(()));
}

#[test]
fn every_mismatch_is_named() {
    type Change = fn(&mut Here);
    let cases: [(Change, &str); 8] = [
        (|here| here.capabilities.truncate(1), "KVM_CAP_XCRS"),
        (|here| here.msrs.truncate(1), "0x174"),
        (|here| here.regions[0].size_bytes = 16 << 20, "0x0+0x1000000 instead of 0x0+0x2000000"),
        (|here| here.devices.clear(), "1 virtio devices and would have 0"),
        (
            |here| here.devices[0].device_id = 4,
            "disk in slot 0 differs here: it is the entropy device here",
        ),
        (|here| here.devices[0].features = 0b01, "features 0x2"),
        (|here| here.devices[0].queue_sizes = vec![64], "other queues"),
        (|here| here.devices[0].disk_bytes = Some(512), "512 bytes here and 1048576 at the source"),
    ];
    for (change, words) in cases {
        let mut here = here();
        change(&mut here);
        let error = description().check(&here).unwrap_err().to_string();
        assert!(error.contains(words), "{words}: {error}");
    }
}

#[test]
fn a_very_long_list_gets_a_short_error() {
    let mut machine = description();
    machine.capabilities = vec!["x".repeat(5000); 10_000];
    let error = machine.check(&here()).unwrap_err().to_string();
    assert!(error.len() < 1000 && error.contains("and 9992 more"), "{error}");
    let mut machine = description();
    machine.regions = vec![MemoryRegion { start: 0, size_bytes: 1 }; 10_000];
    let error = machine.check(&here()).unwrap_err().to_string();
    assert!(error.len() < 1000 && error.contains("and 9992 more"), "{error}");
}

#[test]
fn a_full_host_is_refused_unless_memory_is_shared() {
    let mut machine = description();
    assert_eq!(machine.check_memory(20 << 20), Ok(()));
    let error = machine.check_memory(19 << 20).unwrap_err().to_string();
    assert!(error.contains("19M") && error.contains("20M"), "{error}");
    let regions = Vec::new();
    machine.shared =
        Some(SharedLayout { version: 1, backing: ebb_guest_ram::Backing::Memfd, regions });
    assert_eq!(machine.check_memory(0), Ok(()));
}

#[test]
fn it_round_trips_through_json() {
    let text = serde_json::to_string(&description()).unwrap();
    assert_eq!(serde_json::from_str::<Description>(&text).unwrap(), description());
}
