//! Several guests that free memory at the same time and report nothing by themselves: all are made
//! small at once.

use std::panic::resume_unwind;
use std::thread;
use std::time::Instant;

use ebb_agent::protocol::Command;
use ebb_vmm::api::{Client, ClientError, ParkReport};

use super::{Found, call, sizes};
use crate::LabError;
use crate::harness::balloon;
use crate::harness::driver::{Driver, Tracker};
use crate::harness::experiment::{Run, SeriesPlan};
use crate::harness::monitor::Setup;
use crate::harness::size::GuestSize;
use crate::harness::testbed::Testbed;
use crate::report::results::{GuestRecord, Series};
use crate::report::statistics::rounded;

/// The series.
pub(super) const MANY: &str = "many";

/// It runs when it is named.
pub(super) fn series() -> SeriesPlan {
    let setup = Setup { driver: Driver::tracking(Tracker::Off), ..Setup::EBB };
    let summary = "several guests with an agent only that free memory at once, Ebb's driver, PUT \
                   /vm/park for all at once";
    SeriesPlan::new(MANY, summary, Run::Guests(setup, run)).when_named()
}

fn run(testbed: &mut Testbed<'_>, series: &mut Series) -> Result<(), LabError> {
    let mut found = Found::default();
    let outcome = park(testbed, &mut series.guests, &mut found);
    found.fill(series);
    outcome
}

fn park(
    testbed: &mut Testbed<'_>,
    records: &mut Vec<GuestRecord>,
    found: &mut Found,
) -> Result<(), LabError> {
    let sizes = sizes(testbed.scale());
    let size = GuestSize { memory_mib: sizes.many_guest_mib, cpus: sizes.guest.cpus };
    let base_mib = testbed.usage()?.used_mib;
    for _ in 0..testbed.guests(sizes.many_guests) {
        records.push(testbed.start_controlled_guest(size)?);
    }
    for record in &mut *records {
        let hold = Command::Hold { bytes: sizes.many_program_mib << 20, pattern: 1 };
        testbed.run_program(record, hold, sizes.many_program_mib)?;
    }
    for record in &*records {
        testbed.ask(record.guest, Command::Release)?;
    }
    let clients = records
        .iter()
        .map(|record| testbed.through(record.guest, |balloon| balloon.api("park").cloned()));
    let clients: Vec<Client> = clients.collect::<Result<_, _>>()?;
    testbed.events().step(0, "makes all guests small");
    let host_mib = |testbed: &Testbed<'_>| Ok::<_, LabError>(testbed.usage()?.used_mib - base_mib);
    found.before_mib.push(rounded(host_mib(testbed)?));
    let begin = Instant::now();
    let answers = all_at_once(&clients, sizes.keep_mib);
    found.park_s.push(rounded(begin.elapsed().as_secs_f64()));
    found.parked_mib.push(rounded(host_mib(testbed)?));
    for (record, answer) in records.iter().zip(answers) {
        let answer = answer.map_err(|error| LabError::unexpected(record.guest, error))?;
        found.stages.extend(call::stages_of(&answer).map(|stage| (record.guest, stage)));
    }
    Ok(())
}

/// The call for all guests at the same time; their answers.
fn all_at_once(clients: &[Client], keep_mib: u64) -> Vec<Result<ParkReport, ClientError>> {
    thread::scope(|scope| {
        let start = |client| scope.spawn(move || balloon::park(client, keep_mib));
        let calls: Vec<_> = clients.iter().map(start).collect();
        let end = |call: thread::ScopedJoinHandle<'_, _>| {
            call.join().unwrap_or_else(|panic| resume_unwind(panic))
        };
        calls.into_iter().map(end).collect()
    })
}
