use alloc::vec::Vec;
use core::sync::atomic::AtomicU64;
use proptest::prelude::*;

use super::*;
use crate::protocol::Stability;
use crate::reader::Stopped;

const SECOND_NS: u64 = 1_000_000_000;
const MILLISECOND_NS: i64 = 1_000_000;
const DAY_NS: u64 = 86_400 * SECOND_NS;
const PPM: i64 = 1_000;

fn khz(khz: u32) -> Kilohertz {
    Kilohertz::new(khz).unwrap()
}

fn machine(mode: KernelMode, slew_ppm: i64) -> Machine {
    let mut machine = Machine::new(mode, khz(2_600_000));
    machine.set_slew_ppb(slew_ppm * PPM);
    machine
}

/// Time of a one-second-old guest that was created after `days` of uptime.
fn fresh_guest_ns(mode: KernelMode, days: u64, slew_ppm: i64) -> u64 {
    let mut machine = machine(mode, slew_ppm);
    machine.advance(days * DAY_NS);
    let vm = machine.create_vm();
    machine.advance(SECOND_NS);
    machine.guest_time(vm).unwrap().time_ns
}

/// Rounded to the nearest millisecond.
fn milliseconds(ns: i64) -> i64 {
    (ns + MILLISECOND_NS / 2).div_euclid(MILLISECOND_NS)
}

#[test]
fn mixed_clocks_make_a_fresh_guests_time_negative_after_two_weeks() {
    for (days, slew_ppm, expected_ms) in
        [(7, 1, 395), (13, 1, -123), (14, 1, -210), (14, 5, -5048), (14, -5, 7048), (14, 0, 1000)]
    {
        let seen = fresh_guest_ns(KernelMode::Mixed, days, slew_ppm);
        assert_eq!(milliseconds(seen.cast_signed()), expected_ms, "{days} d, {slew_ppm} ppm");
        // The guest reads a negative time as centuries.
        assert_eq!(seen > u64::MAX / 2, expected_ms < 0);
    }
    // 1 s - 1.1232 s, less a nanosecond by the factor's rounding.
    assert_eq!(fresh_guest_ns(KernelMode::Mixed, 13, 1), 18_446_744_073_586_351_615);
}

#[test]
fn raw_clocks_keep_a_fresh_guests_time_exact() {
    for days in [0, 7, 13, 14, 60] {
        for slew_ppm in [-100, -5, -1, 0, 1, 5, 100] {
            // A nanosecond less by the factor's rounding.
            assert_eq!(fresh_guest_ns(KernelMode::Raw, days, slew_ppm), SECOND_NS - 1);
        }
    }
}

#[test]
fn master_clock_flips_jump_by_the_drift_in_mixed_mode_only() {
    for slew_ppm in [-5, 0, 5] {
        for mode in KernelMode::ALL {
            let mut machine = machine(mode, slew_ppm);
            let vm = machine.create_vm();
            for (days, tscs, sign) in [
                (3, VcpuTscs::Unmatched, 1),
                (2, VcpuTscs::Matched, -1),
                (1, VcpuTscs::Unmatched, 1),
                (1, VcpuTscs::Matched, -1),
            ] {
                machine.advance(days * DAY_NS);
                // Measure the jump of the switch alone, without the factor's loss over days.
                machine.renew_clock(vm);
                let before_ns = machine.clock(vm).clock_ns;
                machine.set_vcpu_tscs(vm, tscs);
                let jump_ns = machine.clock(vm).clock_ns - before_ns;
                let expected_ns =
                    if mode == KernelMode::Mixed { sign * machine.host().drift_ns() } else { 0 };
                assert_eq!(jump_ns, expected_ns, "{mode:?} {slew_ppm} ppm, {tscs:?}");
            }
        }
    }
}

#[test]
fn the_wall_clock_is_wrong_by_the_drift_in_mixed_mode_only() {
    for slew_ppm in [-100, 0, 100] {
        let mut mixed = machine(KernelMode::Mixed, slew_ppm);
        mixed.advance(10 * DAY_NS);
        let vm = mixed.create_vm();
        mixed.advance(DAY_NS);
        mixed.renew_clock(vm);
        assert_eq!(mixed.host().drift_ns(), slew_ppm * 11 * 86_400 * PPM);
        assert_eq!(mixed.wall_error_ns(vm), -mixed.host().drift_ns());
        let mut raw = machine(KernelMode::Raw, slew_ppm);
        raw.advance(10 * DAY_NS);
        let vm = raw.create_vm();
        raw.advance(DAY_NS);
        assert_eq!(raw.wall_error_ns(vm), 0);
    }
}

#[test]
fn results_do_not_depend_on_the_time_step() {
    let (mut whole, mut cut) = (machine(KernelMode::Raw, 7), machine(KernelMode::Raw, 7));
    whole.set_tsc_error_ppb(-333);
    cut.set_tsc_error_ppb(-333);
    whole.advance(DAY_NS);
    for _ in 0..1_000_000 {
        cut.advance(DAY_NS / 1_000_000);
    }
    assert_eq!(whole.host().tsc(), cut.host().tsc());
    assert_eq!(whole.host().raw_ns(), cut.host().raw_ns());
    assert_eq!(whole.host().monotonic_ns(), cut.host().monotonic_ns());
    assert_eq!(whole.host().realtime_ns(), cut.host().realtime_ns());
}

#[test]
fn suspended_time_counts_for_guests_and_boot_time() {
    for tsc in [TscInSuspend::RunsOn, TscInSuspend::Resets] {
        let mut machine = machine(KernelMode::Raw, 0);
        let vm = machine.create_vm();
        machine.advance(5 * SECOND_NS);
        let realtime_ns = machine.host().realtime_ns();
        machine.suspend(3600 * SECOND_NS, tsc);
        machine.advance(SECOND_NS);
        assert_eq!(machine.host().raw_ns(), 6 * SECOND_NS);
        assert_eq!(machine.host().boottime_ns(), 3606 * SECOND_NS);
        assert_eq!(machine.host().realtime_ns() - realtime_ns, 3601 * SECOND_NS);
        assert_eq!(machine.guest_time(vm).unwrap().time_ns, 3606 * SECOND_NS - 1);
    }
}

#[test]
fn another_clock_source_turns_the_master_clock_off() {
    let mut machine = machine(KernelMode::Raw, 0);
    let vm = machine.create_vm();
    assert_eq!(machine.guest_time(vm).unwrap().stability, Stability::Stable);
    machine.set_clock_source(ClockSource::Other { error_ppb: 20 * PPM });
    machine.advance(100 * SECOND_NS);
    let reading = machine.guest_time(vm).unwrap();
    assert_eq!(
        (reading.stability, reading.time_ns),
        (Stability::Unstable, 100 * SECOND_NS + 2_000_000)
    );
    assert_eq!(machine.clock(vm).host_tsc, None);
    machine.set_clock_source(ClockSource::Tsc);
    machine.advance(100 * SECOND_NS);
    let reading = machine.guest_time(vm).unwrap();
    assert_eq!(reading.stability, Stability::Stable);
    assert_eq!(
        reading.time_ns,
        200 * SECOND_NS + 2_000_000 - 28,
        "the factor loses 28 ns in 100 s"
    );
}

#[test]
fn pause_and_resume_follow_the_policy() {
    for (policy, expected_s) in [(ClockPolicy::Continue, 10), (ClockPolicy::CatchUp, 70)] {
        let mut machine = machine(KernelMode::Raw, 0);
        let vm = machine.create_vm();
        machine.advance(10 * SECOND_NS);
        machine.pause(vm);
        assert_eq!(machine.guest_time(vm), None);
        machine.advance(60 * SECOND_NS);
        machine.resume(vm, policy).unwrap();
        let reading = machine.guest_time(vm).unwrap();
        assert_eq!(reading.stopped, Stopped::Yes);
        assert_eq!(reading.time_ns.div_ceil(SECOND_NS), expected_s);
        assert!(expected_s * SECOND_NS - reading.time_ns < 100);
        // The TSC advances by the same time.
        assert_eq!(machine.vm(vm).guest_tsc(machine.host().tsc()), expected_s * 2_600_000_000);
    }
}

#[test]
fn a_saved_clock_set_on_another_host_advances_by_real_time() {
    for offset_s in [0i64, 180, -180] {
        let mut machine = machine(KernelMode::Raw, 0);
        let vm = machine.create_vm();
        machine.advance(1000 * SECOND_NS);
        let clock_ns = 7_000 * SECOND_NS as i64;
        let realtime_ns =
            machine.host().realtime_ns().checked_add_signed(offset_s * SECOND_NS as i64);
        machine.set_clock(vm, clock_ns, realtime_ns);
        assert_eq!(machine.clock(vm).clock_ns, clock_ns + (-offset_s).max(0) * SECOND_NS as i64);
    }
}

#[test]
fn whole_kilohertz_cost_a_scaled_guest_86_ms_a_day() {
    let drift_ms = |factor| {
        let mut machine = machine(KernelMode::Raw, 0);
        let vm = machine.create_scaled_vm(khz(1_000_000), FractionBits::Amd32, factor).unwrap();
        machine.advance(DAY_NS);
        let time_ns = machine.guest_time(vm).unwrap().time_ns;
        milliseconds((time_ns - DAY_NS.min(time_ns)).cast_signed())
    };
    assert_eq!(drift_ms(ScaledFactor::WholeKilohertz), 86);
    assert_eq!(drift_ms(ScaledFactor::Exact), 0);
}

/// An event on a host or its guest.
#[derive(Clone, Debug)]
enum Step {
    Advance(u64),
    Slew(i64),
    TscError(i64),
    Realtime(i64),
    Source(ClockSource),
    Tscs(VcpuTscs),
    Suspend(u64, TscInSuspend),
    Pause,
    Resume(ClockPolicy),
    SetClock(i64, Option<i64>),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let ppb = || -100 * PPM..100 * PPM;
    let step = prop_oneof![
        6 => prop_oneof![0..1_000u64, 0..SECOND_NS, 0..30 * DAY_NS].prop_map(Step::Advance),
        1 => ppb().prop_map(Step::Slew),
        1 => ppb().prop_map(Step::TscError),
        1 => (-180 * SECOND_NS as i64..180 * SECOND_NS as i64).prop_map(Step::Realtime),
        2 => prop_oneof![
            Just(ClockSource::Tsc),
            ppb().prop_map(|error_ppb| ClockSource::Other { error_ppb })
        ]
        .prop_map(Step::Source),
        2 => prop::sample::select(&[VcpuTscs::Matched, VcpuTscs::Unmatched]).prop_map(Step::Tscs),
        1 => (0..DAY_NS, prop::sample::select(&[TscInSuspend::RunsOn, TscInSuspend::Resets]))
            .prop_map(|(ns, tsc)| Step::Suspend(ns, tsc)),
        2 => Just(Step::Pause),
        2 => prop::sample::select(&ClockPolicy::ALL).prop_map(Step::Resume),
        1 => (0..1000 * SECOND_NS as i64, prop::option::of(-180..180i64))
            .prop_map(|(clock_ns, realtime_s)| Step::SetClock(clock_ns, realtime_s)),
    ];
    prop::collection::vec(step, 1..60)
}

fn take(machine: &mut Machine, vm: VmId, step: &Step) {
    match *step {
        Step::Advance(ns) => machine.advance(ns),
        Step::Slew(ppb) => machine.set_slew_ppb(ppb),
        Step::TscError(ppb) => machine.set_tsc_error_ppb(ppb),
        Step::Realtime(ns) => machine.step_realtime(ns),
        Step::Source(source) => machine.set_clock_source(source),
        Step::Tscs(tscs) => machine.set_vcpu_tscs(vm, tscs),
        Step::Suspend(ns, tsc) => machine.suspend(ns, tsc),
        Step::Pause => machine.pause(vm),
        Step::Resume(policy) => machine.resume(vm, policy).unwrap(),
        Step::SetClock(clock_ns, realtime_s) => {
            let now_ns = machine.host().realtime_ns();
            let realtime_ns =
                realtime_s.and_then(|s| now_ns.checked_add_signed(s * SECOND_NS as i64));
            machine.set_clock(vm, clock_ns, realtime_ns);
            // A guest whose clock is set back has to forget the latest time; otherwise the clamp of
            // an unstable clock keeps it there.
            machine.vms[vm.0].last_ns = AtomicU64::new(0);
        }
    }
}

proptest! {
    /// In a kernel with raw clocks a guest's time is never negative and never goes backwards over
    /// any events, unless it is set back; and KVM_GET_CLOCK agrees with it.
    #[test]
    fn raw_clocks_never_go_backwards(
        uptime_ns in 0..60 * DAY_NS,
        slew_ppm in -100i64..100,
        steps in steps(),
    ) {
        let mut machine = machine(KernelMode::Raw, slew_ppm);
        machine.advance(uptime_ns);
        let vm = machine.create_vm();
        let (mut latest_ns, mut latest_clock_ns) = (0, 0);
        for step in &steps {
            take(&mut machine, vm, step);
            if matches!(step, Step::SetClock(..)) {
                (latest_ns, latest_clock_ns) = (0, 0);
            }
            if let Step::Resume(_) = step {
                // KVM's clock continued during the pause, unseen by the guest.
                latest_clock_ns = 0;
            }
            let clock_ns = machine.clock(vm).clock_ns;
            prop_assert!(clock_ns >= latest_clock_ns, "{step:?}: {clock_ns} < {latest_clock_ns}");
            latest_clock_ns = clock_ns;
            if let Some(reading) = machine.guest_time(vm) {
                prop_assert!(reading.time_ns <= i64::MAX.cast_unsigned(), "{step:?}: negative");
                prop_assert!(
                    reading.time_ns >= latest_ns,
                    "{step:?}: {} < {latest_ns}",
                    reading.time_ns
                );
                latest_ns = reading.time_ns;
                if reading.stability == Stability::Stable {
                    prop_assert_eq!(reading.time_ns.cast_signed(), clock_ns);
                }
            }
        }
    }

    /// In both modes the model agrees with the formulas of the module's documentation.
    #[test]
    fn the_formulas_hold(
        created_ns in 0..60 * DAY_NS,
        age_ns in 0..DAY_NS,
        slew_ppb in -100 * PPM..100 * PPM,
        mode in prop::sample::select(&KernelMode::ALL),
    ) {
        let mut machine = machine(mode, 0);
        machine.set_slew_ppb(slew_ppb);
        machine.advance(created_ns);
        let drift_ns = machine.host().drift_ns();
        let vm = machine.create_vm();
        machine.advance(age_ns);
        let drift_ns = if mode == KernelMode::Mixed { drift_ns } else { 0 };
        let expected_ns = age_ns.cast_signed() - drift_ns;
        let time_ns = machine.guest_time(vm).unwrap().time_ns.cast_signed();
        // The factor's error, at most 2^-31, and the tick that its shift drops.
        let lost_ns = expected_ns - time_ns;
        prop_assert!((-1..=(age_ns >> 31).cast_signed() + 2).contains(&lost_ns), "{}", lost_ns);
    }
}
