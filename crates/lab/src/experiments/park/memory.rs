//! A guest's memory at a moment, as the host and as the guest itself see it.

use ebb_agent::protocol::Command;

use crate::LabError;
use crate::harness::host::mib;
use crate::harness::testbed::Testbed;
use crate::report::figures::DataTable;

/// Fields of the guest's `/proc/meminfo`.
const FIELDS: [(&str, &str); 5] = [
    ("MemFree", "guest: free, MiB"),
    ("Cached", "page cache, MiB"),
    ("Buffers", "buffers, MiB"),
    ("AnonPages", "programs, MiB"),
    ("Slab", "slab, MiB"),
];

/// Memory at a moment, in MiB.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Moment {
    when: &'static str,
    /// Memory that the host has used since before the guest was started.
    host_mib: f64,
    /// Memory of the monitor's process, guest memory included.
    monitor_mib: f64,
    /// [`FIELDS`].
    guest_mib: [Option<f64>; FIELDS.len()],
}

impl Moment {
    /// Asks the guest; `host_mib` was read before.
    pub(super) fn new(
        testbed: &mut Testbed<'_>,
        guest: u32,
        when: &'static str,
        host_mib: f64,
    ) -> Result<Self, LabError> {
        let monitor_mib = testbed.footprint_mib(guest)?;
        let fields = testbed.ask(guest, Command::MemInfo)?;
        let guest_mib = FIELDS.map(|(name, _)| fields[name].as_u64().map(mib));
        Ok(Self { when, host_mib, monitor_mib, guest_mib })
    }
}

/// All moments.
pub(super) fn table(moments: &[Moment]) -> Option<DataTable> {
    let mut columns = vec!["when", "host, MiB", "monitor's process, MiB"];
    columns.extend(FIELDS.map(|(_, title)| title));
    let row = |moment: &Moment| {
        let mut row = vec![moment.when.into(), moment.host_mib.into(), moment.monitor_mib.into()];
        row.extend(moment.guest_mib.map(Into::into));
        row
    };
    (!moments.is_empty()).then(|| DataTable::new("memory", columns, moments.iter().map(row)))
}
