//! Visits every processor now and then, so that an interrupt which the emulator has forgotten is
//! delivered.
//!
//! When a guest is entered with a virtual interrupt pending (V_IRQ: KVM waits for a guest to enable
//! interrupts), QEMU 10.0.2 sets a bit in the processor's word of requests without a lock
//! (`helper_vmrun` in `target/i386/tcg/system/svm_helper.c`; later versions do it at once,
//! `cpu_set_interrupt`). A request that another thread adds to the word at that moment is lost, for
//! example that of the local APIC's timer. The interrupt stays pending in the APIC, but the
//! processor is only told with its next one. If that is the timer's, there is none: the processor's
//! programs sleep and its guests stand still until another processor happens to send one; minutes
//! have been seen. A thread that moves to a processor and runs before all others sends it an
//! interrupt.

use std::io;
use std::thread;
use std::time::Duration;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Time between two visits of a processor.
const INTERVAL: Duration = Duration::from_millis(250);
/// Where the visitor sleeps: on QEMU's first processor, which runs no guests (`isolcpus=0`) and so
/// loses no timer.
const HOME: usize = 0;

/// Starts the visits, unless the only processor is [`HOME`].
pub fn start() -> Result<(), String> {
    // An isolated processor is not among those on which programs run.
    let guests = sched_getaffinity(None).map_err(|error| format!("processors: {error}"))?;
    if guests.is_set(HOME) {
        return Ok(());
    }
    thread::Builder::new()
        .name("visits".to_owned())
        .spawn(move || visit(&guests))
        .map(|_| ())
        .map_err(|error| format!("thread: {error}"))
}

fn visit(processors: &CpuSet) {
    if let Err(error) = before_all_others() {
        eprintln!("ebb init: visits of processors: {error}");
    }
    let only = |processor| {
        let mut set = CpuSet::new();
        set.set(processor);
        set
    };
    loop {
        for processor in (0..CpuSet::MAX_CPU).filter(|processor| processors.is_set(*processor)) {
            // Fails for a processor that is offline.
            let _ = sched_setaffinity(None, &only(processor));
        }
        let _ = sched_setaffinity(None, &only(HOME));
        thread::sleep(INTERVAL);
    }
}

/// Gives this thread a real-time priority, without which a busy processor would not be interrupted.
fn before_all_others() -> io::Result<()> {
    let parameters = libc::sched_param { sched_priority: 1 };
    // SAFETY: the call reads the structure and changes nothing but the calling thread's priority.
    match unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const parameters) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
