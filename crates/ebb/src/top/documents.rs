//! What daemons and monitors answer, and what is shown of it.

use std::path::Path;

use ebb_host_policy::report::{MachineStatus, Status};
use ebb_host_policy::{Balloon, Host, Machine, Mean, Statistics};
use ebb_vmm::api::{
    BalloonFeature, BalloonInfo, BalloonState, StatisticsDocument, VmInfo, VmState,
};
use serde::Serialize;

use super::act::Act;
use crate::columns::columns;
use crate::ctl::{bytes, vm_state};
use crate::host::{decision_text, explain};

/// The documents of a monitor.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Documents {
    /// When they arrived, in milliseconds since the host's start.
    pub(super) at_ms: u64,
    /// `GET /vm`.
    pub(super) vm: VmInfo,
    /// `GET /balloon`; `None` without a balloon.
    pub(super) balloon: Option<BalloonInfo>,
    /// `GET /balloon/statistics`; `None` if the guest never sent any.
    pub(super) statistics: Option<StatisticsDocument>,
}

/// News from another thread.
#[derive(Debug)]
pub(super) enum Report {
    /// The daemon's status, or why there is none.
    Daemon(Result<Status, String>),
    /// This host's memory, where there is no daemon.
    Host(Host),
    /// The documents of one of the monitors, by its index, or why there are none.
    Monitor(usize, Result<Box<Documents>, String>),
    /// What was asked for has ended, with its result.
    Done(Act, Result<String, String>),
}

/// One machine, as it is shown.
#[derive(Clone, Debug)]
pub(super) struct Row {
    /// Its status; a machine without a daemon has no profile and no explanation.
    pub(super) status: MachineStatus,
    /// The time of its status, in milliseconds since the host's start.
    pub(super) at_ms: u64,
    /// What it shares with others, where that is known.
    pub(super) merged_bytes: Option<u64>,
    /// What is decided about it; its state where there is no daemon.
    pub(super) note: String,
    /// Growth of its resident memory, in bytes per second.
    pub(super) growth: Option<i64>,
}

impl Row {
    /// A machine of a daemon.
    pub(super) fn of_daemon(status: MachineStatus, at_ms: u64) -> Self {
        let note = decision_text(&status);
        Self { status, at_ms, merged_bytes: None, note, growth: None }
    }

    /// A machine without one, before its monitor has answered.
    pub(super) fn of_socket(socket: &Path) -> Self {
        let name = socket.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let status = MachineStatus {
            name,
            machine: None,
            monitor: None,
            socket: socket.display().to_string(),
            pid: None,
            profile: String::new(),
            is_held: false,
            trouble: None,
            explanation: None,
        };
        let note = "no answer yet".to_owned();
        Self { status, at_ms: 0, merged_bytes: None, note, growth: None }
    }

    /// Shows an answer of its monitor. After a failure the last documents stay.
    pub(super) fn answer(&mut self, answer: Result<Box<Documents>, String>) {
        match answer {
            Err(trouble) => {
                self.note = ebb_program::printable(&trouble);
                self.status.trouble = Some(trouble);
            }
            Ok(documents) => {
                self.note = vm_state(documents.vm.state).into();
                self.at_ms = documents.at_ms;
                self.merged_bytes = documents.vm.merged_bytes;
                self.status.trouble = None;
                self.status.monitor = Some("ebb".to_owned());
                self.status.pid = Some(documents.vm.pid);
                self.status.machine = Some(machine(&self.status.name, &documents));
            }
        }
    }

    /// Identifies the machine: a later one behind the same socket has another key.
    pub(super) fn key(&self) -> String {
        format!("{} {:?}", self.status.socket, self.status.pid)
    }

    /// Its name, for a terminal.
    pub(super) fn name(&self) -> String {
        line(&self.status.name)
    }

    /// Its resident memory.
    pub(super) fn resident_bytes(&self) -> Option<u64> {
        self.status.machine.as_ref()?.resident_bytes
    }

    /// What its guest uses.
    pub(super) fn used_bytes(&self) -> Option<u64> {
        self.status.machine.as_ref().and_then(explain::used_bytes)
    }

    /// All that is known of it, and the decision about it.
    pub(super) fn details(&self) -> String {
        if !self.status.profile.is_empty() {
            return explain::text(&self.status, self.at_ms);
        }
        let mut facts = explain::facts(&self.status, self.at_ms);
        if let Some(merged) = self.merged_bytes {
            facts.push(["merged".to_owned(), bytes(merged)]);
        }
        columns(&facts)
    }
}

/// Text from elsewhere as one line for a terminal.
pub(super) fn line(text: &str) -> String {
    ebb_program::printable(text).replace('\n', " ")
}

fn machine(name: &str, documents: &Documents) -> Machine {
    let Documents { at_ms, vm, balloon, statistics } = documents;
    let balloon = balloon.as_ref().filter(|balloon| balloon.state != BalloonState::DriverAbsent);
    let has = |feature| balloon.is_some_and(|it| it.negotiated_features.contains(&feature));
    let means = [
        (Mean::Reporting, has(BalloonFeature::PageReporting)),
        (Mean::Reclaim, has(BalloonFeature::HostRequest)),
        (Mean::Trim, true),
        (Mean::Park, balloon.is_some()),
        (Mean::Balloon, balloon.is_some()),
        (Mean::Pause, true),
    ];
    let said = statistics.as_ref().and_then(|said| Some((said.age_ms?, &said.statistics)));
    Machine {
        name: name.to_owned(),
        size_bytes: vm.memory_bytes,
        resident_bytes: Some(vm.resident_bytes),
        swapped_bytes: None,
        processor_ms: None,
        is_paused: vm.state != VmState::Running,
        balloon: balloon.map(|balloon| Balloon {
            target_bytes: balloon.target_bytes,
            actual_bytes: balloon.actual_bytes,
        }),
        statistics: said.map(|(age_ms, values)| Statistics {
            taken_ms: at_ms.saturating_sub(age_ms),
            total_bytes: values.total_memory_bytes,
            available_bytes: values.available_memory_bytes,
            free_bytes: values.free_memory_bytes,
            caches_bytes: values.disk_caches_bytes,
            major_faults: values.major_faults,
            swap_out_bytes: values.swap_out_bytes,
            oom_kills: values.oom_kills,
        }),
        means: means.into_iter().filter_map(|(mean, can)| can.then_some(mean)).collect(),
    }
}
