//! Has the guest's kernel evict its caches and compact its memory, through the agent in the guest.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use ebb_guest_agent::wire::Ended;
use ebb_vmm::api::{ParkStage, ParkStageEnd, ParkStageName};

use crate::guest;

/// Reclaims all file caches but the KiB in `$0`, in steps, until files are read again that were
/// just evicted (exit code 3). Then large blocks of the free memory are made, which Linux reports.
const SCRIPT: &str = "
reclaim=/sys/fs/cgroup/memory.reclaim
[ -w $reclaim ] || {
    echo \"the guest has no $reclaim: it takes Linux 5.19 or newer, with cgroup v2\" >&2
    exit 1
}
value() {
    while read -r name number rest; do
        [ $name != $2 ] || echo $number
    done <$1
}
caches() {
    echo $(($(value /proc/meminfo Cached:) + $(value /proc/meminfo Buffers:) +
        $(value /proc/meminfo SReclaimable:) - $(value /proc/meminfo Shmem:)))
}
read_again() { value /proc/vmstat workingset_refault_file; }
before=$(read_again)
code=0
left=$(($(caches) - $0))
while [ $left -gt 0 ]; do
    step=$((left < 16384 ? left : 16384))
    # Less is reclaimed than there is if the rest is in use.
    echo ${step}K 2>/dev/null >$reclaim || break
    left=$((left - step))
    if [ $(($(read_again) - before)) -gt 2048 ]; then
        code=3
        break
    fi
done
echo 1 >/proc/sys/vm/compact_memory
exit $code
";

/// Evicts and compacts; the machine is that of the API's `socket`.
pub(super) fn evict(socket: &Path, keep_bytes: u64, limit: Duration) -> anyhow::Result<ParkStage> {
    let began = Instant::now();
    let mut channel = guest::connect(socket, &guest::GuestArgs::default())?;
    let keep_kib = (keep_bytes / 1024).to_string();
    let argv = ["/bin/sh", "-c", SCRIPT, &keep_kib].map(str::to_owned).to_vec();
    let ran = guest::run(&mut channel, argv, began + limit)?;
    let (end, reason) = match ran {
        None => (ParkStageEnd::Timeout, Some("the guest's kernel could have evicted more")),
        Some((Ended::Code(0), _)) => (ParkStageEnd::Done, None),
        Some((Ended::Code(3), _)) => {
            (ParkStageEnd::Stopped, Some("the guest needs memory: it reads its files again"))
        }
        Some((ended, said)) => {
            let said = ebb_program::printable(said.trim());
            bail!("the agent could not evict caches ({ended:?}): {said}")
        }
    };
    Ok(ParkStage {
        stage: ParkStageName::Evict,
        end,
        reason: reason.map(str::to_owned),
        // The memory is free in the guest, and the next stage returns it.
        returned_bytes: 0,
        elapsed_us: u64::try_from(began.elapsed().as_micros()).context("the time")?,
    })
}
