//! Builds a virtual machine of its configuration and its sources ([`super::origin`]).

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

use ebb_guest_ram::{GuestMemory, GuestRam};
use ebb_kvm_clock::Kilohertz;
use kvm_bindings::{
    CpuId, KVM_MEM_READONLY, KVM_PIT_SPEAKER_DUMMY, kvm_pit_config, kvm_userspace_memory_region,
};
use kvm_ioctls::{IoEventAddress, Kvm, VmFd};
use virtio_bindings::virtio_mmio::{VIRTIO_MMIO_INTERRUPT_ACK, VIRTIO_MMIO_QUEUE_NOTIFY};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::control::ProcessMemory;
use super::disks::NamedDisk;
use super::fork::Forkable;
use super::generation::Generation;
use super::limits::Throttled;
use super::merge::Merging;
use super::migration::description::capabilities;
use super::net::NetDevice;
use super::origin::{Origin, Resources, guest_ram, open_image};
use super::save::{UserfaultfdBy, prepare_for_copies};
use super::snapshot::capture_interrupts;
use super::vsock::VsockHandle;
use super::{Vm, VmError, fork};
use crate::acpi::{MmioDevice, NumaNode, Platform};
use crate::api::vm::{ClockInfo, VmState};
use crate::clock::{GuestClockError, TscFrequencies};
use crate::config::{MacAddress, NetConfig, VmConfig};
use crate::cpu::threads::{Buses, ExitCounters, VcpuThreads};
use crate::cpu::{self, Vcpu};
use crate::devices::console::ConsoleOutput;
use crate::devices::interrupt::InterruptLine;
use crate::devices::platform::{AcpiRegisters, KeyboardReset, PanicNotifier};
use crate::devices::serial::Serial;
use crate::devices::virtio::VirtioDevice;
use crate::devices::virtio::balloon::BalloonDevice;
use crate::devices::virtio::block::Block;
use crate::devices::virtio::mmio::{
    INTERRUPT_USED, ManagedDevice, MmioTransport, MmioWindow, RegisterPage, Wires,
};
use crate::devices::virtio::net::{Net, OpenNet};
use crate::devices::virtio::rng::Rng;
use crate::devices::virtio::worker::Worker;
use crate::exit::{ExitSignal, GuestExit};
use crate::isolation::IsolationInfo;
use crate::layout;
use crate::probe;
use crate::seccomp::{Filters, ThreadKind};
use crate::snapshot::SnapshotError;
use crate::snapshot::processor::Processor;

/// The machine and what the event loop needs besides it.
pub(super) struct Built {
    pub vm: Vm,
    /// Signalled when the guest has read all console input.
    pub input_read: EventFd,
    /// When everything was built, and its memory began to be filled.
    pub ready_at: Instant,
}

/// Collects devices while they are connected.
struct Assembly<'a> {
    vm_fd: &'a Arc<VmFd>,
    memory: GuestMemory,
    /// KVM's memory slots that guest memory uses.
    memory_slots: usize,
    /// Takes acknowledgements of used buffers, of all devices: see
    /// [`MmioWindow`]. KVM alone keeps it.
    acknowledged: EventFd,
    filters: &'a Filters,
    exit: &'a Arc<ExitSignal>,
    buses: Buses,
    devices: Vec<MmioDevice>,
    workers: Vec<Worker>,
    managed: Vec<Arc<Mutex<dyn ManagedDevice>>>,
    throttled: Vec<Throttled>,
}

/// Checks a configuration for contradictions, and makes its paths absolute: later the monitor has
/// no working directory.
pub(super) fn prepare(config: &mut VmConfig) -> Result<(), VmError> {
    config.validate()?;
    config.make_paths_absolute().map_err(VmError::host("find its working directory"))
}

/// Builds a machine that boots its kernel or continues. `exit` receives the reason of its end.
pub(super) fn build(
    mut config: VmConfig,
    mut origin: Origin,
    resources: Resources,
    filters: &Filters,
    exit: &Arc<ExitSignal>,
) -> Result<Built, VmError> {
    let Resources { disks: disk_files, nets, vsock, broker } = resources;
    // The cheapest checks first: files, then KVM, then memory.
    let image = open_image(&config, &mut origin)?;
    let forkable = match &mut origin {
        Origin::Fork(inherited) => inherited.forkable.take(),
        _ => None,
    };
    let (kvm, forkable) = match forkable {
        Some(forkable) => (None, Some(forkable)),
        None if config.forkable.is_on() => (None, Some(Forkable::new(open_kvm()?, filters)?)),
        None => (Some(open_kvm()?), None),
    };
    let kvm = kvm.as_ref().or(forkable.as_ref().map(Forkable::kvm));
    let kvm = kvm.ok_or_else(|| VmError::host("open KVM")(std::io::ErrorKind::NotFound))?;
    let cpuid = processor(kvm, config.cpus, origin.processor())?;
    let vm_fd = create_vm(kvm)?;
    let ram = guest_ram(&config, &mut origin)?;
    let restored_from = origin.snapshot().map(|snapshot| snapshot.header.state_checksum);
    register_memory(&vm_fd, &ram)?;
    let merging = match &mut origin {
        Origin::Fork(inherited) => inherited.merging.take(),
        _ => None,
    };
    let start_merging = || Merging::start(&config.memory.merge, &ram, broker, filters, exit);
    let merging = merging.unwrap_or_else(start_merging);
    let userfaultfd = match &mut origin {
        Origin::Fork(inherited) => UserfaultfdBy::Client(inherited.userfaultfd.take()),
        _ => UserfaultfdBy::Monitor,
    };
    let copies_stopped = prepare_for_copies(&config, &ram, userfaultfd).err();

    let mut assembly = Assembly {
        vm_fd: &vm_fd,
        memory: ram.memory().clone(),
        memory_slots: ram.regions().len(),
        acknowledged: event()?,
        filters,
        exit,
        buses: Buses::default(),
        devices: Vec::new(),
        workers: Vec::new(),
        managed: Vec::new(),
        throttled: Vec::new(),
    };
    let input_read = event()?;
    let serial = assembly.add_serial(&config, &input_read)?;
    let acpi = assembly.add_platform()?;
    let balloon = match &config.balloon {
        None => None,
        Some(balloon) => {
            Some(assembly.add_virtio("balloon", BalloonDevice::new(balloon, ram.clone())?)?)
        }
    };
    let mut disks = Vec::new();
    for (index, (disk, files)) in config.disks.iter().zip(disk_files).enumerate() {
        let mut block = Block::of(disk, files, index, ram.memory().clone(), origin.disk_lock())?;
        let name = format!("disk{index}");
        block
            .start_threads(&name, filters, exit)
            .map_err(VmError::host("start the threads of a disk"))?;
        let transport = assembly.add_virtio(&name, block)?;
        disks.push(NamedDisk { device: name, transport });
    }
    if let Some(limits) = config.rng {
        assembly.add_virtio("rng", Rng::new(ram.memory().clone(), limits))?;
    }
    // A device's address stays the same from now on, also in its snapshots.
    for net in &mut config.nets {
        net.mac.get_or_insert_with(MacAddress::random);
    }
    let mut net_devices = Vec::new();
    for (index, (net, opened)) in config.nets.iter().zip(nets).enumerate() {
        net_devices.push(assembly.add_net(index, net, opened)?);
    }
    let add_vsock = |sockets| {
        let memory = ram.memory().clone();
        VsockHandle::build(sockets, memory, |device| assembly.add_virtio("vsock", device))
    };
    let vsock = vsock.map(add_vsock).transpose()?;
    let Assembly { buses, devices, workers, managed, throttled, .. } = assembly;

    let msrs = match &origin {
        Origin::Fork(inherited) => Some(Arc::clone(&inherited.msrs)),
        _ => None,
    };
    let mut vcpus = Vcpu::create_all(kvm, &vm_fd, &cpuid, config.cpus, msrs)?;
    if config.forkable.is_on() {
        vcpus.iter_mut().try_for_each(|vcpu| fork::keep_to_process(vcpu, kvm))?;
    }
    let tsc = set_tsc_frequency(kvm, &vcpus, &Processor::of(&cpuid).vendor(), origin.tsc_khz())?;
    let msrs = vcpus.first().map(Vcpu::msrs).unwrap_or_default();
    let interrupt_controllers = capture_interrupts(&vm_fd)?;
    let counters = Arc::new(ExitCounters::default());
    let vcpus = VcpuThreads::spawn(vcpus, &Arc::new(buses), exit, &counters, filters)
        .map_err(VmError::host("start the vCPU threads"))?;
    let capabilities = capabilities(kvm);
    let process_memory = match &mut origin {
        Origin::Fork(inherited) => std::mem::take(&mut inherited.process_memory),
        _ => ProcessMemory::open(),
    };
    let policy = config.clock;
    let state =
        if matches!(origin, Origin::Migration(_)) { VmState::Receiving } else { VmState::Starting };
    let platform = Platform { cpus: config.cpus, devices, nodes: numa_nodes(&config) };
    let vm = Vm {
        config,
        ram,
        merging,
        kvm: vm_fd,
        interrupt_controllers,
        platform,
        image: image.map(Mutex::new),
        balloon,
        vsock,
        workers,
        devices: managed,
        disks,
        nets: net_devices,
        throttled,
        cpuid,
        msrs,
        capabilities,
        tsc,
        frozen: Mutex::new(None),
        clock_info: Mutex::new(ClockInfo { policy, ..ClockInfo::default() }),
        serial,
        acpi,
        generation: Generation::new().map_err(VmError::host("make a generation id"))?,
        exit: exit.clone(),
        counters,
        vcpus,
        state: Mutex::new(state),
        migrations: Arc::default(),
        copies_stopped,
        handed_over: Mutex::new(None),
        released_exclusive: AtomicBool::new(false),
        started: Instant::now(),
        start_parts: OnceLock::new(),
        process_memory,
        forkable,
        restored_from,
        isolation: IsolationInfo::default(),
        companion: None,
        parked: Mutex::new(None),
        leases: Mutex::default(),
        trim_cursor: Mutex::new(0),
    };
    let ready_at = Instant::now();
    match origin {
        Origin::Fork(inherited) => {
            vm.restore(inherited.state)?;
            vm.renew_generation()?;
        }
        Origin::Kernel => vm.load_and_enter()?,
        Origin::Snapshot(snapshot) => {
            vm.restore(snapshot.state)?;
            vm.renew_generation()?;
        }
        // Devices must not access memory that has not arrived yet, and must be idle when the state
        // arrives.
        Origin::Migration(_) => vm.workers.iter().for_each(Worker::pause),
    }
    Ok(Built { vm, input_read, ready_at })
}

/// The processor for the guest: this host's, or the one that the guest was given, if this host can
/// provide it.
fn processor(kvm: &Kvm, cpus: u8, saved: Option<&Processor>) -> Result<CpuId, VmError> {
    let host = cpu::host_cpuid(kvm, cpus)?;
    let Some(saved) = saved else { return Ok(host) };
    saved.check(&Processor::of(&host))?;
    saved.to_cpuid().ok_or_else(|| {
        let missing = format!("{} CPUID leaves", saved.cpuid.len());
        SnapshotError::Processor { missing }.into()
    })
}

fn set_tsc_frequency(
    kvm: &Kvm,
    vcpus: &[Vcpu],
    vendor: &str,
    wanted: Option<Kilohertz>,
) -> Result<Option<TscFrequencies>, VmError> {
    let mut frequencies = None;
    for vcpu in vcpus {
        match TscFrequencies::set(kvm, &vcpu.fd, vendor, wanted) {
            Ok(set) => frequencies = Some(set),
            // A KVM that does not report its counter's frequency can run guests, but not set their
            // clocks.
            Err(GuestClockError::NoFrequency) if wanted.is_none() => return Ok(None),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(frequencies)
}

/// What a thread that writes the console's output or the log does first.
pub(super) fn restrict_writer(
    filters: &Filters,
    exit: &Arc<ExitSignal>,
) -> impl FnOnce() + Send + 'static {
    let (filter, exit) = (filters.for_thread(ThreadKind::Console), exit.clone());
    move || {
        if let Err(error) = filter.apply() {
            exit.raise(GuestExit::Monitor { message: error.to_string() });
        }
    }
}

fn event() -> Result<EventFd, VmError> {
    EventFd::new(EFD_NONBLOCK).map_err(VmError::host("create an event"))
}

fn clone(event: &EventFd) -> Result<EventFd, VmError> {
    event.try_clone().map_err(VmError::host("duplicate an event"))
}

fn open_kvm() -> Result<Kvm, VmError> {
    let kvm = Kvm::new().map_err(|error| match error.errno() {
        libc::EACCES | libc::EPERM => VmError::NoKvm {
            problem: "no permission to open /dev/kvm".to_owned(),
            remedy: "run as root or add your user to the group `kvm`".to_owned(),
        },
        libc::ENOENT | libc::ENODEV | libc::ENXIO => VmError::NoKvm {
            problem: "this machine has no /dev/kvm".to_owned(),
            remedy: "load kvm_intel or kvm_amd; `ebb doctor` prints details, and \
                     `ebb-lab virtual-host` provides a KVM of its own"
                .to_owned(),
        },
        _ => VmError::NoKvm {
            problem: format!("/dev/kvm cannot be opened: {error}"),
            remedy: "run `ebb doctor`".to_owned(),
        },
    })?;
    let missing = probe::missing_capabilities(&kvm);
    if !missing.is_empty() {
        return Err(VmError::NoKvm {
            problem: format!("this KVM lacks {}", missing.join(", ")),
            remedy: probe::KERNEL_REMEDY.to_owned(),
        });
    }
    Ok(kvm)
}

fn create_vm(kvm: &Kvm) -> Result<Arc<VmFd>, VmError> {
    let vm = kvm.create_vm().map_err(VmError::kvm("create a virtual machine"))?;
    vm.set_identity_map_address(layout::KVM_IDENTITY_MAP)
        .map_err(VmError::kvm("place its identity map"))?;
    vm.set_tss_address(layout::KVM_TSS as usize)
        .map_err(VmError::kvm("place its task state segment"))?;
    vm.create_irq_chip().map_err(VmError::kvm("create interrupt controllers"))?;
    let timer = kvm_pit_config { flags: KVM_PIT_SPEAKER_DUMMY, ..Default::default() };
    vm.create_pit2(timer).map_err(VmError::kvm("create a timer"))?;
    Ok(Arc::new(vm))
}

fn numa_nodes(config: &VmConfig) -> Vec<NumaNode> {
    let sizes: Vec<u64> = config.numa.iter().map(|node| node.size.bytes()).collect();
    let pieces = layout::node_ranges(&sizes);
    let default =
        |node: usize| (0..sizes.len()).map(|other| if other == node { 10 } else { 20 }).collect();
    config
        .numa
        .iter()
        .enumerate()
        .map(|(node, config)| NumaNode {
            cpus: config.cpus.clone(),
            ranges: pieces
                .iter()
                .filter(|(owner, _)| *owner == node)
                .map(|(_, range)| range.clone())
                .collect(),
            distances: config.distances.clone().unwrap_or_else(|| default(node)),
        })
        .collect()
}

fn register_memory(vm: &VmFd, ram: &GuestRam) -> Result<(), VmError> {
    for (slot, region) in ram.regions().iter().enumerate() {
        let slot = kvm_userspace_memory_region {
            slot: slot as u32,
            flags: 0,
            guest_phys_addr: region.start.0,
            memory_size: region.size_bytes,
            userspace_addr: region.host_address,
        };
        // SAFETY: the region is mapped for as long as the `GuestRam` lives, which `Vm` keeps until
        // after its `VmFd` and vCPU threads are gone; regions do not overlap, as `GuestRam::new`
        // has checked.
        unsafe { vm.set_user_memory_region(slot) }.map_err(|source| VmError::MemorySlot {
            start: region.start.0,
            size_bytes: region.size_bytes,
            source,
        })?;
    }
    Ok(())
}

/// Lets the guest read a device's registers.
fn register_page(vm: &VmFd, slot: usize, address: u64, page: &RegisterPage) -> Result<(), VmError> {
    let slot = kvm_userspace_memory_region {
        slot: slot as u32,
        flags: KVM_MEM_READONLY,
        guest_phys_addr: address,
        memory_size: layout::VIRTIO_MMIO_PAGE_BYTES,
        userspace_addr: std::ptr::from_ref(page).addr() as u64,
    };
    // SAFETY: the page holds nothing else, and the guest cannot write to it. Each vCPU's thread
    // holds the buses and with them the page, for as long as it can run the guest.
    unsafe { vm.set_user_memory_region(slot) }.map_err(VmError::kvm("map a device's registers"))
}

impl Assembly<'_> {
    fn interrupt(&self, gsi: u32) -> Result<InterruptLine, VmError> {
        InterruptLine::new(self.vm_fd, gsi).map_err(VmError::kvm("set an interrupt line"))
    }

    fn add_serial(
        &mut self,
        config: &VmConfig,
        input_read: &EventFd,
    ) -> Result<Arc<Mutex<Serial>>, VmError> {
        let opened = ConsoleOutput::open(&config.serial).and_then(|(output, writer)| {
            let restrict = restrict_writer(self.filters, self.exit);
            writer.map_or(Ok(()), |writer| writer.spawn("console", restrict)).map(|()| output)
        });
        let output = opened.map_err(|source| VmError::Console {
            console: format!("{:?}", config.serial),
            source,
        })?;
        let output = output.keeping(clone(input_read)?);
        if let Some(throttle) = output.throttle() {
            let output = output.clone();
            self.throttled.push(Throttled {
                device: "serial".to_owned(),
                throttle: throttle.clone(),
                wake: Box::new(move || output.wake()),
            });
        }
        let interrupt = self.interrupt(layout::SERIAL_GSI)?;
        let input_read = clone(input_read)?;
        let serial = Arc::new(Mutex::new(Serial::new(interrupt, input_read, output)));
        let start = u64::from(layout::SERIAL_PORT);
        self.buses.ports.insert(start..start + 8, serial.clone())?;
        Ok(serial)
    }

    fn add_platform(&mut self) -> Result<Arc<Mutex<AcpiRegisters>>, VmError> {
        let interrupt = self.interrupt(layout::EVENT_DEVICE_GSI)?;
        let acpi = Arc::new(Mutex::new(AcpiRegisters::new(self.exit.clone(), interrupt)));
        let start = u64::from(layout::ACPI_PORT);
        self.buses.ports.insert(start..start + 4, acpi.clone())?;
        let keyboard = Arc::new(Mutex::new(KeyboardReset::new(self.exit.clone())));
        self.buses.ports.insert(0x64..0x65, keyboard)?;
        let panic = Arc::new(Mutex::new(PanicNotifier::new(self.exit.clone())));
        let start = u64::from(layout::PANIC_PORT);
        self.buses.ports.insert(start..start + 1, panic)?;
        Ok(acpi)
    }

    fn add_net(
        &mut self,
        index: usize,
        config: &NetConfig,
        mut opened: OpenNet,
    ) -> Result<NetDevice, VmError> {
        let name = format!("net{index}");
        let mac = config.mac.unwrap_or_else(MacAddress::random);
        opened.wait_ready(&name, mac, restrict_writer(self.filters, self.exit))?;
        let net = Net::new(&name, config, mac, opened, self.memory.clone());
        let counters = net.counters().clone();
        let transport = self.add_virtio(&name, net)?;
        Ok(NetDevice { name, backend: config.backend.to_string(), counters, transport })
    }

    /// Gives `device` a register window, an interrupt line, notification events and a thread.
    fn add_virtio<D: VirtioDevice + 'static>(
        &mut self,
        name: &str,
        device: D,
    ) -> Result<Arc<Mutex<MmioTransport<D>>>, VmError> {
        let slot = self.devices.len();
        let limit = (layout::VIRTIO_LAST_GSI - layout::VIRTIO_FIRST_GSI + 1) as usize;
        if slot >= limit {
            return Err(VmError::TooManyDevices { count: slot + 1, limit });
        }
        let gsi = layout::VIRTIO_FIRST_GSI + slot as u32;
        let page = layout::VIRTIO_MMIO_START + slot as u64 * layout::VIRTIO_MMIO_STRIDE;
        let address = page + layout::VIRTIO_MMIO_OFFSET;
        let wires = Wires::new(device.queue_sizes().len(), self.interrupt(gsi)?)
            .map_err(VmError::host("create device events"))?;
        for (suffix, throttle) in device.throttles() {
            let wake = wires.wake.clone();
            self.throttled.push(Throttled {
                device: format!("{name}{suffix}"),
                throttle,
                // A full counter has woken the thread already.
                wake: Box::new(move || drop(wake.write(1))),
            });
        }
        let register = |offset: u32| IoEventAddress::Mmio(address + u64::from(offset));
        for (queue, kick) in wires.kicks.iter().enumerate() {
            self.vm_fd
                .register_ioevent(kick, &register(VIRTIO_MMIO_QUEUE_NOTIFY), queue as u32)
                .map_err(VmError::kvm("wire a queue notification"))?;
        }
        let acknowledge = register(VIRTIO_MMIO_INTERRUPT_ACK);
        self.vm_fd
            .register_ioevent(&self.acknowledged, &acknowledge, INTERRUPT_USED)
            .map_err(VmError::kvm("wire an acknowledgement of interrupts"))?;
        let window =
            Arc::new(MmioWindow::new(MmioTransport::new(device, self.memory.clone(), wires)));
        let transport = window.transport().clone();
        let registers = window.registers().clone();
        self.buses.memory.insert(address..address + layout::VIRTIO_MMIO_WINDOW_BYTES, window)?;
        register_page(self.vm_fd, self.memory_slots + slot, page, &registers)?;
        let worker = Worker::spawn(name, transport.clone(), self.filters, self.exit.clone())
            .map_err(VmError::host("start a device thread"))?;
        self.workers.push(worker);
        self.managed.push(transport.clone());
        self.devices.push(MmioDevice { address, gsi });
        Ok(transport)
    }
}
