//! A large guest without page cache to speak of: what is left of it after its program has ended.

use ebb_agent::protocol::Command;

use super::{Found, ParkedGuest, sizes};
use crate::LabError;
use crate::harness::driver::{Driver, Module};
use crate::harness::experiment::{Run, SeriesPlan};
use crate::harness::monitor::Setup;
use crate::harness::size::GuestSize;
use crate::harness::testbed::Testbed;
use crate::report::results::Series;

/// The series with a guest as it is, and with the words of `ebb run --lean`.
pub(super) const LARGE: &str = "large";
pub(super) const LARGE_LEAN: &str = "large-lean";

/// Both; they run when they are named.
pub(super) fn series() -> [SeriesPlan; 2] {
    let setup = Setup { driver: Driver::Module(Module::DEFAULT), ..Setup::EBB };
    let plan =
        |name, summary, setup| SeriesPlan::new(name, summary, Run::Guests(setup, run)).when_named();
    [
        plan(LARGE, "a large guest with an agent only, Ebb's driver, PUT /vm/park", setup),
        plan(LARGE_LEAN, "the same with ebb run --lean", Setup { lean: true, ..setup }),
    ]
}

fn run(testbed: &mut Testbed<'_>, series: &mut Series) -> Result<(), LabError> {
    let sizes = sizes(testbed.scale());
    let size = GuestSize { memory_mib: sizes.large_guest_mib, cpus: sizes.guest.cpus };
    let base_mib = testbed.usage()?.used_mib;
    let mut record = testbed.start_controlled_guest(size)?;
    let mut found = Found::default();
    let program_mib = sizes.large_program_mib;
    let program = Command::AllocTouchExit { bytes: program_mib << 20 };
    let outcome = testbed.run_program(&mut record, program, program_mib).and_then(|_| {
        testbed.wait_for_return(&mut record, program_mib)?;
        ParkedGuest { testbed, record: &mut record, sizes, base_mib }.park(1, &mut found)
    });
    found.fill(series);
    series.guests.push(record);
    outcome
}
