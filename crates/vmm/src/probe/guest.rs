//! A throw-away virtual machine that counts down in 64-bit mode.

use std::io;
use std::time::{Duration, Instant};

use kvm_bindings::{KVM_MAX_CPUID_ENTRIES, kvm_regs, kvm_segment, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};
use vmm_sys_util::signal::SIGRTMIN;

use super::ITERATIONS;
use crate::cpu::threads::{KickTarget, handle_kicks};

/// All of the guest's memory.
const MEMORY_BYTES: u64 = 64 << 10;
const PAGE_MAP_LEVEL_4: u64 = 0x1000;
const PAGE_DIRECTORY_POINTERS: u64 = 0x2000;
const PAGE_DIRECTORY: u64 = 0x3000;
const CODE: u64 = 0x4000;

/// `loop: dec ecx; jnz loop; hlt`
const PROGRAM: [u8; 5] = [0xff, 0xc9, 0x75, 0xfc, 0xf4];

/// Where KVM on Intel processors may put a task state segment of its own: below 4 GiB, outside of
/// guest memory.
const TSS_ADDRESS: usize = 0xfffb_d000;

/// Page table entry bits (Intel SDM volume 3, section 4.5): present, writable, accessed, dirty,
/// large page.
const PRESENT: u64 = 1 << 0;
const WRITABLE: u64 = 1 << 1;
const ACCESSED: u64 = 1 << 5;
const DIRTY: u64 = 1 << 6;
const LARGE: u64 = 1 << 7;

/// Control register and EFER bits for 64-bit mode (Intel SDM volume 3, section 10.8.5).
const CR0_PE: u64 = 1 << 0;
const CR0_NE: u64 = 1 << 5;
const CR0_PG: u64 = 1 << 31;
const CR4_PAE: u64 = 1 << 5;
const EFER_LME: u64 = 1 << 8;
const EFER_LMA: u64 = 1 << 10;

/// Bit 1 of RFLAGS is always set.
const RFLAGS_RESERVED: u64 = 1 << 1;

/// The result of a run of the loop.
#[derive(Clone, Copy, Debug)]
pub(super) struct Run {
    /// Iterations completed.
    pub(super) iterations: u64,
    /// Their time.
    pub(super) elapsed: Duration,
}

/// Why there was no run.
#[derive(Debug, thiserror::Error)]
pub(super) enum GuestError {
    #[error("a test guest could not be set up: {what}: {source}")]
    Kvm { what: &'static str, source: kvm_ioctls::Error },
    #[error("a test guest could not be set up: memory: {0}")]
    Memory(String),
    #[error("the test guest stopped for an unexpected reason: {0}")]
    Exit(String),
    #[error("the test guest did not end in time")]
    TimeLimit,
}

fn kvm_error(what: &'static str) -> impl Fn(kvm_ioctls::Error) -> GuestError {
    move |source| GuestError::Kvm { what, source }
}

/// A machine with one vCPU. Memory comes last, so that it is unmapped last.
struct Guest {
    vcpu: VcpuFd,
    _vm: VmFd,
    _memory: GuestMemoryMmap,
}

/// The best of up to `runs` runs, all within `limit`; stops after the first fast one.
pub(super) fn best_run(kvm: &Kvm, runs: u32, limit: Duration) -> Result<Run, GuestError> {
    let mut guest = Guest::new(kvm)?;
    let _alarm = Alarm::set(limit).map_err(|error| GuestError::Exit(format!("alarm: {error}")))?;
    let until = Instant::now() + limit;
    // Keep host page faults and the first entry out of the measurement.
    guest.run(1, until)?;
    let mut best = guest.run(ITERATIONS, until)?;
    for _ in 1..runs {
        if super::KvmQuality::from_run(best.iterations, best.elapsed).runs_linux() {
            break;
        }
        let run = guest.run(ITERATIONS, until)?;
        if run.elapsed < best.elapsed {
            best = run;
        }
    }
    Ok(best)
}

/// Interrupts KVM_RUN in this thread after a time, and then repeatedly until it is dropped. Not by
/// a thread: the process has to have a single one when the monitor enters its namespaces.
struct Alarm(libc::timer_t);

impl Alarm {
    fn set(after: Duration) -> io::Result<Self> {
        const AGAIN: libc::timespec = libc::timespec { tv_sec: 0, tv_nsec: 10_000_000 };
        handle_kicks()?;
        // SAFETY: integers and a pointer, for all of which zero is valid.
        let mut event: libc::sigevent = unsafe { std::mem::zeroed() };
        event.sigev_notify = libc::SIGEV_THREAD_ID;
        event.sigev_signo = SIGRTMIN();
        // SAFETY: gettid only returns a number.
        event.sigev_notify_thread_id = unsafe { libc::gettid() };
        let mut timer = std::ptr::null_mut();
        // SAFETY: both pointers are valid for the call.
        let made =
            unsafe { libc::timer_create(libc::CLOCK_MONOTONIC, &raw mut event, &raw mut timer) };
        if made != 0 {
            return Err(io::Error::last_os_error());
        }
        let alarm = Self(timer);
        let first = libc::timespec {
            tv_sec: after.as_secs() as i64,
            tv_nsec: i64::from(after.subsec_nanos()),
        };
        let times = libc::itimerspec { it_interval: AGAIN, it_value: first };
        // SAFETY: the timer exists, the times are valid for the call, the old ones are not wanted.
        let set = unsafe { libc::timer_settime(timer, 0, &raw const times, std::ptr::null_mut()) };
        if set == 0 { Ok(alarm) } else { Err(io::Error::last_os_error()) }
    }
}

impl Drop for Alarm {
    fn drop(&mut self) {
        // SAFETY: the timer was made in `set` and is deleted once.
        unsafe { libc::timer_delete(self.0) };
    }
}

impl Guest {
    fn new(kvm: &Kvm) -> Result<Self, GuestError> {
        let memory: GuestMemoryMmap =
            GuestMemoryMmap::from_ranges(&[(GuestAddress(0), MEMORY_BYTES as usize)])
                .map_err(|error| GuestError::Memory(error.to_string()))?;
        let table = PRESENT | WRITABLE | ACCESSED;
        for (address, entry) in [
            (PAGE_MAP_LEVEL_4, PAGE_DIRECTORY_POINTERS | table),
            (PAGE_DIRECTORY_POINTERS, PAGE_DIRECTORY | table),
            (PAGE_DIRECTORY, table | DIRTY | LARGE),
        ] {
            memory
                .write_obj(entry, GuestAddress(address))
                .map_err(|error| GuestError::Memory(error.to_string()))?;
        }
        memory
            .write_slice(&PROGRAM, GuestAddress(CODE))
            .map_err(|error| GuestError::Memory(error.to_string()))?;
        let host_address = memory
            .get_host_address(GuestAddress(0))
            .map_err(|error| GuestError::Memory(error.to_string()))?;

        let vm = kvm.create_vm().map_err(kvm_error("create a machine"))?;
        vm.set_tss_address(TSS_ADDRESS).map_err(kvm_error("set the TSS address"))?;
        let region = kvm_userspace_memory_region {
            slot: 0,
            flags: 0,
            guest_phys_addr: 0,
            memory_size: MEMORY_BYTES,
            userspace_addr: host_address as u64,
        };
        // SAFETY: the region is the mapping of `memory`, all of it, which lives in the same struct
        // as the machine and is dropped after it. Rust code does not access it while the vCPU runs.
        unsafe { vm.set_user_memory_region(region) }.map_err(kvm_error("set its memory"))?;
        let vcpu = vm.create_vcpu(0).map_err(kvm_error("create a vCPU"))?;
        let cpuid = kvm
            .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
            .map_err(kvm_error("read the supported CPUID"))?;
        vcpu.set_cpuid2(&cpuid).map_err(kvm_error("set the CPUID"))?;
        set_long_mode(&vcpu)?;
        Ok(Self { vcpu, _vm: vm, _memory: memory })
    }

    /// Runs the loop with `iterations` iterations. An [`Alarm`] after `until` ends it.
    fn run(&mut self, iterations: u64, until: Instant) -> Result<Run, GuestError> {
        let registers =
            kvm_regs { rip: CODE, rcx: iterations, rflags: RFLAGS_RESERVED, ..kvm_regs::default() };
        self.vcpu.set_regs(&registers).map_err(kvm_error("set registers"))?;
        let begin = Instant::now();
        let _kicks = KickTarget::install(&mut self.vcpu);
        loop {
            match self.vcpu.run() {
                Ok(VcpuExit::Hlt) => {
                    return Ok(Run { iterations, elapsed: begin.elapsed() });
                }
                Err(error) if error.errno() == libc::EINTR && Instant::now() >= until => {
                    return Err(GuestError::TimeLimit);
                }
                // A signal arrived; the loop continues where it was.
                Ok(VcpuExit::Intr) => {}
                Err(error) if error.errno() == libc::EINTR => {}
                Ok(other) => return Err(GuestError::Exit(format!("{other:?}"))),
                Err(error) => return Err(GuestError::Exit(error.to_string())),
            }
        }
    }
}

/// Puts the vCPU into 64-bit mode with the first 2 MiB mapped one to one, without a descriptor
/// table: segments are loaded into their hidden parts directly, and the program never reloads them.
fn set_long_mode(vcpu: &VcpuFd) -> Result<(), GuestError> {
    let mut special = vcpu.get_sregs().map_err(kvm_error("read special registers"))?;
    let data = kvm_segment {
        base: 0,
        limit: u32::MAX,
        selector: 0x10,
        type_: 3,
        present: 1,
        dpl: 0,
        db: 1,
        s: 1,
        l: 0,
        g: 1,
        ..kvm_segment::default()
    };
    special.cs = kvm_segment { selector: 0x08, type_: 11, db: 0, l: 1, ..data };
    for segment in
        [&mut special.ds, &mut special.es, &mut special.fs, &mut special.gs, &mut special.ss]
    {
        *segment = data;
    }
    special.cr0 = CR0_PE | CR0_NE | CR0_PG;
    special.cr3 = PAGE_MAP_LEVEL_4;
    special.cr4 = CR4_PAE;
    special.efer = EFER_LME | EFER_LMA;
    vcpu.set_sregs(&special).map_err(kvm_error("set special registers"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_that_does_not_end_is_interrupted() {
        const LIMIT: Duration = Duration::from_millis(50);
        // Elsewhere there is nothing to interrupt.
        let Ok(kvm) = Kvm::new() else { return };
        let Ok(mut guest) = Guest::new(&kvm) else { return };
        // Two minutes where a guest takes 30 ns for an iteration.
        let _alarm = Alarm::set(LIMIT).unwrap();
        let end = guest.run(u64::from(u32::MAX), Instant::now() + LIMIT);
        assert!(matches!(end, Err(GuestError::TimeLimit)), "{end:?}");
    }
}
