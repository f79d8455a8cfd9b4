//! Metrics of each machine.

use ebb_host_policy::report::MachineStatus;
use ebb_host_policy::{Balloon, Machine, Statistics};

use super::{ACTIONS, Label, Observed, Text, Value, distinct, statistics};

/// A metric of a machine.
struct Row {
    name: &'static str,
    help: &'static str,
    /// `None` where it is not known.
    value: fn(&MachineStatus) -> Option<Value>,
}

const fn row(
    name: &'static str,
    help: &'static str,
    value: fn(&MachineStatus) -> Option<Value>,
) -> Row {
    Row { name, help, value }
}

fn of(machine: &MachineStatus, value: fn(&Machine) -> Option<u64>) -> Option<Value> {
    machine.machine.as_ref().and_then(value).map(Value::from)
}

fn balloon(machine: &MachineStatus, value: fn(Balloon) -> u64) -> Option<Value> {
    Some(value(machine.machine.as_ref()?.balloon?).into())
}

fn guest(machine: &MachineStatus, value: fn(&Statistics) -> Option<u64>) -> Option<Value> {
    statistics(machine).and_then(value).map(Value::from)
}

/// All but orders. Their names begin with `ebbd_machine_`.
const ROWS: [Row; 13] = [
    row("machine_up", "Whether its monitor answers.", |machine| {
        Some((machine.trouble.is_none() && machine.monitor.is_some()).into())
    }),
    row("machine_held", "Whether an operator holds it.", |machine| Some(machine.is_held.into())),
    row("machine_paused", "Whether its processors stand still by an order.", |machine| {
        machine.machine.as_ref().map(|machine| machine.is_paused.into())
    }),
    row("machine_memory_bytes", "Its size.", |machine| of(machine, |it| Some(it.size_bytes))),
    row(
        "machine_resident_bytes",
        "Host memory that its monitor occupies, what several machines have in common divided.",
        |machine| of(machine, |it| it.resident_bytes),
    ),
    row("machine_swapped_bytes", "What the host has swapped out of it.", |machine| {
        of(machine, |it| it.swapped_bytes)
    }),
    row("machine_balloon_target_bytes", "Size that its balloon is to reach.", |machine| {
        balloon(machine, |balloon| balloon.target_bytes)
    }),
    row("machine_balloon_actual_bytes", "Size that its balloon has.", |machine| {
        balloon(machine, |balloon| balloon.actual_bytes)
    }),
    row("machine_guest_memory_bytes", "All memory, as its guest says.", |machine| {
        guest(machine, |said| said.total_bytes)
    }),
    row("machine_guest_available_bytes", "Available memory, as its guest says.", |machine| {
        guest(machine, |said| said.available_bytes)
    }),
    row("machine_guest_free_bytes", "Free memory, as its guest says.", |machine| {
        guest(machine, |said| said.free_bytes)
    }),
    row("machine_guest_caches_bytes", "Caches of files, as its guest says.", |machine| {
        guest(machine, |said| said.caches_bytes)
    }),
    row(
        "machine_guest_oom_kills_total",
        "Processes killed for lack of memory, as its guest says.",
        |machine| guest(machine, |said| said.oom_kills),
    ),
];

/// The labels that all series of a machine have.
fn labels(machine: &MachineStatus) -> [Label<'_>; 3] {
    [
        ("machine", &machine.name),
        ("monitor", machine.monitor.as_deref().unwrap_or("unknown")),
        ("profile", &machine.profile),
    ]
}

pub(super) fn all(text: &mut Text, observed: &Observed) {
    let machines = distinct(&observed.status);
    for Row { name, help, value } in &ROWS {
        let known = machines.iter().filter_map(|machine| Some((machine, value(machine)?)));
        text.metric(name, help, known.map(|(machine, value)| (labels(machine), value)));
    }
    let orders = machines.iter().filter_map(|machine| {
        let counts = observed.counters.by_machine.get(&machine.name)?;
        let given = ACTIONS.into_iter().zip(*counts).filter(|(_, count)| *count > 0);
        Some(given.map(move |(action, count)| {
            let [name, monitor, profile] = labels(machine);
            ([name, monitor, profile, ("action", action)], Value::from(count))
        }))
    });
    text.metric("machine_orders_total", "Orders to it.", orders.flatten());
}
