//! One machine: its guest's memory, its balloon and its work.

use ebb_host_policy::{Action, Balloon, MIB, Machine, Mean, Means, Statistics};

use crate::STEP_MS;
use crate::host::HostModel;
use crate::trace::{Activity, Growth, Honesty, MachineTrace, Phase};

/// What machines have, apart from memory.
#[derive(Clone, Copy, Debug)]
pub struct Equipment {
    /// What their monitors can do.
    pub means: Means,
    /// Whether the guest takes memory out of its balloon before it kills a process
    /// (`VIRTIO_BALLOON_F_DEFLATE_ON_OOM`).
    pub deflates_on_oom: bool,
    /// How fast programs take memory, in bytes per second.
    pub growth_rate: u64,
}

/// "AgentCgroup: Understanding and Controlling OS Resources of AI Agents", arXiv 2602.09345.
const GROWTH_RATE: u64 = 3_000_000_000;

impl Equipment {
    /// Everything that Ebb's machines can do.
    pub fn ebb() -> Self {
        let means =
            [Mean::Reporting, Mean::Reclaim, Mean::Trim, Mean::Park, Mean::Balloon, Mean::Pause];
        Self { means: means.into_iter().collect(), deflates_on_oom: true, growth_rate: GROWTH_RATE }
    }

    /// A balloon and nothing else.
    pub fn balloon() -> Self {
        Self {
            means: [Mean::Balloon].into_iter().collect(),
            deflates_on_oom: false,
            growth_rate: GROWTH_RATE,
        }
    }
}

/// Harm to a machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Troubles {
    /// Processes that the guest has killed.
    pub oom_kills: u64,
    /// Time for which inflation found no memory, in milliseconds ("Out of puff!"). The guest's
    /// processors are busy with reclaim.
    pub out_of_puff_ms: u64,
    /// Time for which programs were blocked in allocations, in milliseconds.
    pub stalled_ms: u64,
    /// Files read again because their pages had been evicted.
    pub refault_bytes: u64,
    /// How often it was paused.
    pub pauses: u64,
    /// For how long, in milliseconds, whether it had work or not.
    pub paused_ms: u64,
}

/// A machine while it runs.
#[derive(Clone, Debug)]
pub(crate) struct Guest {
    pub(crate) name: String,
    trace: MachineTrace,
    equipment: Equipment,
    started_ms: u64,
    phase: usize,
    /// How much of the phase is done, in microseconds.
    done_us: u64,
    /// Memory of programs when the phase began.
    began_bytes: u64,
    kernel_bytes: u64,
    programs_bytes: u64,
    /// Caches of the files that are read in this phase, and of others.
    hot_bytes: u64,
    cold_bytes: u64,
    /// The most that was cached in this phase of its files.
    warm_bytes: u64,
    balloon: Balloon,
    /// Free memory that the host still holds.
    stale_bytes: u64,
    /// Of kernel, programs, caches and stale memory: what the host has swapped out.
    swapped_bytes: u64,
    /// Caches that are still to be evicted.
    parking_bytes: u64,
    is_reclaiming: bool,
    stuck_ms: u64,
    /// The rest of a pause, in milliseconds.
    pause_left_ms: u64,
    /// Work done and the time that it took, in microseconds.
    pub(crate) work_us: u64,
    pub(crate) working_us: u64,
    pub(crate) troubles: Troubles,
    /// Time of its processors, in milliseconds.
    processor_ms: u64,
    spoken: Option<Statistics>,
}

/// Rate of direct reclaim, in bytes per step: 400 MiB/s.
const EVICT: u64 = 400 * MIB * STEP_MS / 1000;
/// Rate of reading files, in bytes per step: 500 MiB/s.
const READ: u64 = 500 * MIB * STEP_MS / 1000;
/// Rates of inflation and deflation, in bytes per step: 1.5 and 4 GiB/s.
const INFLATE: u64 = 1536 * MIB * STEP_MS / 1000;
const DEFLATE: u64 = 4096 * MIB * STEP_MS / 1000;
/// Deflation on OOM in a step: 256 pages (drivers/virtio/virtio_balloon.c).
const DEFLATE_ON_OOM: u64 = MIB;
/// Caches that are not evicted.
const LEAST_CACHE: u64 = 16 * MIB;
/// Time after which free pages are reported, in milliseconds (`PAGE_REPORTING_DELAY`).
const REPORTING_MS: u64 = 2000;
/// Rate of reporting on request, in bytes per step: 4 GiB/s.
const RECLAIM: u64 = 4096 * MIB * STEP_MS / 1000;
/// Time without any allocation after which the guest kills a process, in milliseconds.
const KILL_AFTER_MS: u64 = 1000;

impl Guest {
    /// Starts a machine. Its kernel's memory is taken from the host.
    pub(crate) fn start(
        name: String,
        trace: MachineTrace,
        equipment: Equipment,
        now_ms: u64,
        host: &mut HostModel,
    ) -> Self {
        let kernel_bytes = host.take(48 * MIB + trace.size_bytes / 64);
        Self {
            name,
            trace,
            equipment,
            started_ms: now_ms,
            phase: 0,
            done_us: 0,
            began_bytes: 0,
            kernel_bytes,
            programs_bytes: 0,
            hot_bytes: 0,
            cold_bytes: 0,
            warm_bytes: 0,
            balloon: Balloon::default(),
            stale_bytes: 0,
            swapped_bytes: 0,
            parking_bytes: 0,
            is_reclaiming: false,
            stuck_ms: 0,
            pause_left_ms: 0,
            work_us: 0,
            working_us: 0,
            troubles: Troubles::default(),
            processor_ms: 0,
            spoken: None,
        }
    }

    fn used(&self) -> u64 {
        self.kernel_bytes + self.programs_bytes + self.hot_bytes + self.cold_bytes
    }

    fn free(&self) -> u64 {
        self.trace.size_bytes.saturating_sub(self.used() + self.balloon.actual_bytes)
    }

    pub(crate) fn resident(&self) -> u64 {
        self.used() + self.stale_bytes - self.swapped_bytes
    }

    /// What the host could swap out.
    pub(crate) fn swappable(&self) -> u64 {
        self.resident().saturating_sub(16 * MIB)
    }

    pub(crate) fn swap_out(&mut self, bytes: u64, host: &mut HostModel) {
        self.swapped_bytes += bytes;
        host.swap_out(bytes);
    }

    /// The current phase; `None` after the last one.
    pub(crate) fn phase(&self) -> Option<Phase> {
        self.trace.phases.get(self.phase).copied()
    }

    /// Returns all memory to the host.
    pub(crate) fn end(&mut self, host: &mut HostModel) {
        host.give(self.resident());
        host.drop_swapped(self.swapped_bytes);
    }

    /// Carries out an action.
    pub(crate) fn act(&mut self, action: Action) {
        let means = self.equipment.means;
        match action {
            Action::Balloon { target_bytes } if means.has(Mean::Balloon) => {
                self.balloon.target_bytes = target_bytes.min(self.trace.size_bytes);
            }
            Action::Park if means.has(Mean::Park) => {
                self.parking_bytes = self.cold_bytes + self.hot_bytes / 2;
                self.is_reclaiming = self.parking_bytes == 0;
            }
            Action::Reclaim if means.has(Mean::Reclaim) => self.is_reclaiming = true,
            Action::Pause { for_ms } if means.has(Mean::Pause) => {
                self.troubles.pauses += u64::from(!self.is_paused());
                self.pause_left_ms = for_ms;
            }
            Action::Resume if means.has(Mean::Pause) => self.pause_left_ms = 0,
            // The model has no pages of zeros in use, and no files of stopped machines.
            _ => {}
        }
    }

    /// Lets one step pass. Returns whether the machine waited for the host.
    pub(crate) fn step(&mut self, host: &mut HostModel) -> bool {
        let Some(phase) = self.phase() else { return false };
        if self.is_paused() {
            self.stand_still(phase);
            return false;
        }
        let puffs = self.troubles.out_of_puff_ms;
        self.move_balloon(host);
        let is_busy = phase.activity == Activity::Work || self.troubles.out_of_puff_ms > puffs;
        // An idle guest wakes up now and then.
        self.processor_ms += if is_busy { STEP_MS } else { STEP_MS / 100 };
        let is_fed = self.feed(phase, host);
        let speed = self.speed(phase, is_fed, host);
        self.report(host);
        self.advance(phase, speed);
        is_fed == Fed::HostIsShort
    }

    pub(crate) fn is_paused(&self) -> bool {
        self.pause_left_ms > 0
    }

    /// Whether its processors have something to do.
    pub(crate) fn works(&self) -> bool {
        !self.is_paused() && self.phase().is_some_and(|phase| phase.activity == Activity::Work)
    }

    /// Lets one step of a pause pass: only external events do not wait for the end.
    fn stand_still(&mut self, phase: Phase) {
        self.pause_left_ms = self.pause_left_ms.saturating_sub(STEP_MS);
        self.troubles.paused_ms += STEP_MS;
        self.advance(phase, if phase.activity == Activity::Wait { 1000 } else { 0 });
    }

    fn move_balloon(&mut self, host: &mut HostModel) {
        let Balloon { target_bytes, actual_bytes } = self.balloon;
        if actual_bytes > target_bytes {
            self.balloon.actual_bytes -= DEFLATE.min(actual_bytes - target_bytes);
            return;
        }
        let wanted = INFLATE.min(target_bytes - actual_bytes);
        if wanted == 0 {
            return;
        }
        let free = wanted.min(self.free());
        let stale = free.min(self.stale_bytes);
        self.release_stale(stale, host);
        self.balloon.actual_bytes += free;
        let evicted = self.evict((wanted - free).min(EVICT));
        self.release_stale(evicted, host);
        self.balloon.actual_bytes += evicted;
        if free + evicted == 0 {
            self.troubles.out_of_puff_ms += STEP_MS;
        }
    }

    /// Evicts caches, the cold ones first; returns how much. The host still has it.
    fn evict(&mut self, most_bytes: u64) -> u64 {
        let cold = most_bytes.min(self.cold_bytes);
        let hot = (most_bytes - cold).min(self.hot_bytes.saturating_sub(LEAST_CACHE));
        self.cold_bytes -= cold;
        self.hot_bytes -= hot;
        self.stale_bytes += cold + hot;
        cold + hot
    }

    /// Returns free memory to the host, in part from swap.
    fn release_stale(&mut self, bytes: u64, host: &mut HostModel) {
        let held = self.used() + self.stale_bytes;
        let share = u128::from(self.swapped_bytes) * u128::from(bytes);
        let swapped = share.checked_div(u128::from(held)).unwrap_or(0) as u64;
        self.stale_bytes -= bytes;
        self.swapped_bytes -= swapped;
        host.drop_swapped(swapped);
        host.give(bytes - swapped);
    }

    /// Allocates free memory of the guest, resident pages first.
    fn take(&mut self, wanted_bytes: u64, host: &mut HostModel) -> u64 {
        let wanted = wanted_bytes.min(self.free());
        let stale = wanted.min(self.stale_bytes);
        self.stale_bytes -= stale;
        stale + host.take(wanted - stale)
    }

    /// Allocates for programs and caches.
    fn feed(&mut self, phase: Phase, host: &mut HostModel) -> Fed {
        let goal = self.goal(phase);
        if goal < self.programs_bytes {
            self.stale_bytes += self.programs_bytes - goal;
            self.programs_bytes = goal;
        }
        let most = self.equipment.growth_rate * STEP_MS / 1000;
        let wanted = most.min(goal - self.programs_bytes);
        // Caches are evicted for programs.
        let missing = wanted.saturating_sub(self.free());
        self.evict(missing.min(EVICT));
        let free = self.free();
        let got = self.take(wanted, host);
        self.programs_bytes += got;
        let fed = match () {
            () if got == wanted => Fed::All,
            () if got < wanted.min(free) => Fed::HostIsShort,
            () => Fed::GuestIsShort,
        };
        self.stuck(fed == Fed::GuestIsShort && got == 0);
        if phase.activity == Activity::Work && fed == Fed::All {
            self.read(phase, host);
        }
        fed
    }

    /// What programs need now.
    fn goal(&self, phase: Phase) -> u64 {
        match phase.growth {
            Growth::Burst => phase.programs_bytes,
            Growth::Steady => self.on_the_way(phase),
        }
    }

    fn on_the_way(&self, phase: Phase) -> u64 {
        let (done, all) = (i128::from(self.done_us), i128::from(phase.duration_ms.max(1) * 1000));
        let way = i128::from(phase.programs_bytes) - i128::from(self.began_bytes);
        (i128::from(self.began_bytes) + way * done / all) as u64
    }

    fn stuck(&mut self, is_stuck: bool) {
        if !is_stuck {
            self.stuck_ms = 0;
            return;
        }
        self.stuck_ms += STEP_MS;
        if self.equipment.deflates_on_oom && self.balloon.actual_bytes > 0 {
            self.balloon.actual_bytes -= DEFLATE_ON_OOM.min(self.balloon.actual_bytes);
        } else if self.stuck_ms >= KILL_AFTER_MS {
            // The work of the killed process is lost, and not repeated.
            self.troubles.oom_kills += 1;
            self.stuck_ms = 0;
            self.next_phase();
        }
    }

    /// Reads files that are not cached.
    fn read(&mut self, phase: Phase, host: &mut HostModel) {
        let wanted = READ.min(phase.files_bytes.saturating_sub(self.hot_bytes));
        let missing = wanted.saturating_sub(self.free()).min(self.cold_bytes);
        self.evict(missing.min(EVICT));
        let got = self.take(wanted, host);
        self.troubles.refault_bytes += got.min(self.warm_bytes.saturating_sub(self.hot_bytes));
        self.hot_bytes += got;
        self.warm_bytes = self.warm_bytes.max(self.hot_bytes);
    }

    /// How fast the work goes, in thousandths.
    fn speed(&mut self, phase: Phase, fed: Fed, host: &mut HostModel) -> u64 {
        if phase.activity == Activity::Wait {
            return 1000;
        }
        if fed != Fed::All {
            self.troubles.stalled_ms += STEP_MS;
            return 0;
        }
        // Files that are read again, and memory that comes back from swap.
        let cached = 1000 * self.hot_bytes / self.warm_bytes.max(1);
        let cached = if self.warm_bytes == 0 { 1000 } else { cached.max(100) };
        let swapped = 4000 * self.swapped_bytes / self.used().max(1);
        let present = 1000_u64.saturating_sub(swapped).max(50);
        if self.swapped_bytes > 0 {
            self.swapped_bytes -= host.swap_in(self.swapped_bytes);
        }
        cached * present / 1000
    }

    fn report(&mut self, host: &mut HostModel) {
        let means = self.equipment.means;
        if self.parking_bytes > 0 {
            let evicted = self.evict(EVICT.min(self.parking_bytes));
            // A working guest may have evicted some for itself meanwhile.
            self.parking_bytes = if evicted < EVICT { 0 } else { self.parking_bytes - evicted };
            self.is_reclaiming |= self.parking_bytes == 0;
        }
        // Blocks that are too small to be reported.
        let rest = self.free() / 64;
        let reportable = self.stale_bytes.saturating_sub(rest);
        if self.is_reclaiming {
            self.release_stale(RECLAIM.min(reportable), host);
            self.is_reclaiming = reportable > RECLAIM;
        } else if means.has(Mean::Reporting) {
            self.release_stale(reportable * STEP_MS / REPORTING_MS, host);
        }
    }

    fn advance(&mut self, phase: Phase, speed: u64) {
        if self.phase().is_none_or(|now| now != phase) {
            return;
        }
        // A part lasts until its programs have what they need.
        let left_us = (phase.duration_ms * 1000).saturating_sub(self.done_us);
        let done = left_us.min(STEP_MS * speed);
        self.done_us += done;
        if phase.activity == Activity::Work {
            self.work_us += done;
            self.working_us += STEP_MS * 1000;
        }
        if self.done_us >= phase.duration_ms * 1000 && self.programs_bytes >= self.goal(phase) {
            self.next_phase();
        }
    }

    fn next_phase(&mut self) {
        self.phase += 1;
        self.done_us = 0;
        self.began_bytes = self.programs_bytes;
        let Some(phase) = self.phase() else { return };
        let before = self.trace.phases[self.phase - 1].files_bytes;
        if phase.activity == Activity::Work && phase.files_bytes != before {
            // Half of the files are the same.
            let hot = (self.hot_bytes / 2).min(phase.files_bytes);
            self.cold_bytes += self.hot_bytes - hot;
            self.hot_bytes = hot;
            self.warm_bytes = hot;
        }
    }

    /// Its part of a snapshot.
    pub(crate) fn seen(&mut self, now_ms: u64) -> Machine {
        self.speak(now_ms);
        Machine {
            name: self.name.clone(),
            size_bytes: self.trace.size_bytes,
            resident_bytes: Some(self.resident()),
            swapped_bytes: Some(self.swapped_bytes),
            processor_ms: Some(self.processor_ms),
            is_paused: self.is_paused(),
            balloon: self.equipment.means.has(Mean::Balloon).then_some(self.balloon),
            statistics: self.spoken,
            means: self.equipment.means,
        }
    }

    fn speak(&mut self, now_ms: u64) {
        if self.is_paused() {
            return;
        }
        let age = now_ms - self.started_ms;
        let lies = match self.trace.statistics {
            Honesty::Silent => return,
            Honesty::FallsSilent { after_ms } if age >= after_ms => return,
            Honesty::Liar => true,
            Honesty::Honest | Honesty::FallsSilent { .. } => false,
        };
        let total = self.trace.size_bytes - self.kernel_bytes.min(self.trace.size_bytes);
        let total = total.saturating_sub(self.balloon.actual_bytes);
        let caches = self.hot_bytes + self.cold_bytes;
        let told = |truth| if lies { 2 * self.trace.size_bytes } else { truth };
        self.spoken = Some(Statistics {
            taken_ms: now_ms,
            total_bytes: Some(total),
            available_bytes: Some(told((self.free() + caches).saturating_sub(LEAST_CACHE))),
            free_bytes: Some(told(self.free())),
            caches_bytes: Some(caches),
            major_faults: Some(self.troubles.refault_bytes / 4096),
            swap_out_bytes: Some(0),
            oom_kills: Some(self.troubles.oom_kills),
        });
    }
}

/// Result of programs' allocations in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fed {
    All,
    HostIsShort,
    GuestIsShort,
}
