//! The namespace (DSDT): devices that cannot be found by probing.

use acpi_tables::Aml;
use acpi_tables::aml::{
    And, Device, EISAName, Field, FieldAccessType, FieldEntry, FieldLockRule, FieldUpdateRule, IO,
    If, Interrupt, Local, Memory32Fixed, Method, Name, Notify, OpRegion, OpRegionSpace, Package,
    Path, ResourceTemplate, Scope, Store, ZERO,
};

use super::{EVENT_GENERATION, EVENT_POWER_BUTTON, EVENT_STATUS, MmioDevice, SLEEP_TYPE_S5};
use crate::layout;

/// Value of `Notify` for a pressed button (ACPI 4.8.2.2.1.1).
const NOTIFY_BUTTON_PRESSED: u8 = 0x80;
/// Value of `Notify` for a new generation id (Microsoft, "Virtual Machine Generation ID").
const NOTIFY_GENERATION_CHANGED: u8 = 0x80;
/// `_STA`/`_CCA` style small integers are plain bytes.
const ONE: u8 = 1;

/// The body of the DSDT as AML.
pub(super) fn namespace(devices: &[MmioDevice]) -> Vec<u8> {
    let mut aml = Vec::new();
    soft_off(&mut aml);
    serial(&mut aml);
    generation_id(&mut aml);
    events(&mut aml);
    panic_notifier(&mut aml);
    for (index, device) in devices.iter().enumerate() {
        virtio_mmio(&mut aml, index, *device);
    }
    aml
}

/// `\_S5_`: the value to write to the sleep control register for power-off.
fn soft_off(aml: &mut Vec<u8>) {
    Name::new("_S5_".into(), &Package::new(vec![&SLEEP_TYPE_S5])).to_aml_bytes(aml);
}

fn in_system_bus(aml: &mut Vec<u8>, children: Vec<&dyn Aml>) {
    Scope::new("_SB_".into(), children).to_aml_bytes(aml);
}

fn serial(aml: &mut Vec<u8>) {
    let interrupt = edge_interrupt(layout::SERIAL_GSI);
    let ports = IO::new(layout::SERIAL_PORT, layout::SERIAL_PORT, 1, 8);
    let resources = ResourceTemplate::new(vec![&ports, &interrupt]);
    let (id, crs) = (EISAName::new("PNP0501"), Name::new("_CRS".into(), &resources));
    let (hid, uid) = (Name::new("_HID".into(), &id), Name::new("_UID".into(), &ONE));
    in_system_bus(aml, vec![&Device::new("COM1".into(), vec![&hid, &uid, &crs])]);
}

/// The address of the VM generation id (Microsoft, "Virtual Machine Generation ID"; Linux
/// `drivers/virt/vmgenid.c`), which differs between machines that come from one snapshot.
fn generation_id(aml: &mut Vec<u8>) {
    let hid = Name::new("_HID".into(), &"EBBVGID0");
    // The first is Microsoft's, the second Linux's own.
    let ids = Package::new(vec![&"VM_Gen_Counter", &"VMGENCTR"]);
    let cid = Name::new("_CID".into(), &ids);
    let ddn = Name::new("_DDN".into(), &"VM_Gen_Counter");
    let low = layout::GENERATION_ID as u32;
    let parts = Package::new(vec![&low, &ZERO]);
    let address = Name::new("ADDR".into(), &parts);
    in_system_bus(aml, vec![&Device::new("VGEN".into(), vec![&hid, &cid, &ddn, &address])]);
}

/// A power button, and the event device (`ACPI0013`) whose interrupt makes the guest read the event
/// status register.
fn events(aml: &mut Vec<u8>) {
    let id = EISAName::new("PNP0C0C");
    let hid = Name::new("_HID".into(), &id);
    in_system_bus(aml, vec![&Device::new("PWRB".into(), vec![&hid])]);

    let port = layout::ACPI_PORT + EVENT_STATUS;
    let hid = Name::new("_HID".into(), &"ACPI0013");
    let uid = Name::new("_UID".into(), &ONE);
    let interrupt = edge_interrupt(layout::EVENT_DEVICE_GSI);
    let resources = ResourceTemplate::new(vec![&interrupt]);
    let crs = Name::new("_CRS".into(), &resources);
    let region = OpRegion::new("EREG".into(), OpRegionSpace::SystemIO, &port, &ONE);
    let field = Field::new(
        "EREG".into(),
        FieldAccessType::Byte,
        FieldLockRule::NoLock,
        FieldUpdateRule::WriteAsZeroes,
        vec![FieldEntry::Named(*b"EVST", 8)],
    );
    let (status, events, event) = (Path::new("EVST"), Local(0), Local(1));
    let read = Store::new(&events, &status);
    let pressed = And::new(&event, &events, &EVENT_POWER_BUTTON);
    let button = Path::new("\\_SB_.PWRB");
    let notify = Notify::new(&button, &NOTIFY_BUTTON_PRESSED);
    let press = If::new(&event, vec![&notify]);
    let changed = And::new(&event, &events, &EVENT_GENERATION);
    let generation = Path::new("\\_SB_.VGEN");
    let notify = Notify::new(&generation, &NOTIFY_GENERATION_CHANGED);
    let change = If::new(&event, vec![&notify]);
    let body: Vec<&dyn Aml> = vec![&read, &pressed, &press, &changed, &change];
    let method = Method::new("_EVT".into(), 1, true, body);
    in_system_bus(
        aml,
        vec![&Device::new("EVT0".into(), vec![&hid, &uid, &crs, &region, &field, &method])],
    );
}

/// QEMU's pvpanic interface (QEMU docs/specs/pvpanic.rst): a panic of the guest becomes an exit
/// code of its own.
fn panic_notifier(aml: &mut Vec<u8>) {
    let hid = Name::new("_HID".into(), &"QEMU0001");
    let port = IO::new(layout::PANIC_PORT, layout::PANIC_PORT, 1, 1);
    let resources = ResourceTemplate::new(vec![&port]);
    let crs = Name::new("_CRS".into(), &resources);
    in_system_bus(aml, vec![&Device::new("PANC".into(), vec![&hid, &crs])]);
}

fn virtio_mmio(aml: &mut Vec<u8>, index: usize, device: MmioDevice) {
    let hid = Name::new("_HID".into(), &"LNRO0005");
    let number = index as u8;
    let uid = Name::new("_UID".into(), &number);
    let coherent = Name::new("_CCA".into(), &ONE);
    let bytes = layout::VIRTIO_MMIO_WINDOW_BYTES as u32;
    let window = Memory32Fixed::new(true, device.address as u32, bytes);
    let interrupt = edge_interrupt(device.gsi);
    let resources = ResourceTemplate::new(vec![&window, &interrupt]);
    let crs = Name::new("_CRS".into(), &resources);
    let name = format!("V{index:03}");
    in_system_bus(aml, vec![&Device::new(name.as_str().into(), vec![&hid, &uid, &coherent, &crs])]);
}

fn edge_interrupt(gsi: u32) -> Interrupt {
    Interrupt::new(true, true, false, false, gsi)
}
