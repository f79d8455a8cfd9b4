use alloc::string::ToString;
use alloc::vec;
use alloc::vec::Vec;
use core::str::FromStr;
use proptest::prelude::*;

use super::*;

const SECOND_NS: u64 = 1_000_000_000;

fn khz(khz: u32) -> Kilohertz {
    Kilohertz::new(khz).unwrap()
}

fn saved() -> SavedClock {
    SavedClock {
        clock_ns: 100 * SECOND_NS,
        host_realtime_ns: Some(1_700_000_000 * SECOND_NS),
        host_tsc: Some(9_000_000_000_000),
        tsc_khz: khz(2_600_000),
        guest_tsc: vec![260_000_000_000, 260_000_000_007],
    }
}

fn present(seconds_later: i64) -> HostReading {
    HostReading {
        realtime_ns: Some(((1_700_000_000 + seconds_later) as u64) * SECOND_NS),
        host_tsc: Some(123_456_789),
        tsc_khz: khz(2_600_000),
        scaling: TscScaling::Unavailable,
    }
}

fn guest_tsc(plan: &ClockPlan) -> Vec<u64> {
    plan.vcpus.iter().map(|vcpu| vcpu.guest_tsc).collect()
}

#[test]
fn names_of_policies_survive_parsing() {
    for policy in ClockPolicy::ALL {
        assert_eq!(ClockPolicy::from_str(&policy.to_string()), Ok(policy));
    }
    assert_eq!(ClockPolicy::from_str("catchup"), Err(UnknownPolicy));
    assert_eq!(ClockPolicy::default().to_string(), "continue");
}

#[test]
fn continue_keeps_both_clocks() {
    let plan = saved().plan(ClockPolicy::Continue, &present(3600)).unwrap();
    assert_eq!(plan.clock_ns, 100 * SECOND_NS);
    assert_eq!((plan.elapsed_ns, plan.elapsed_ticks), (0, 0));
    assert_eq!(guest_tsc(&plan), saved().guest_tsc);
    assert_eq!(plan.realtime_ns, present(3600).realtime_ns);
    assert_eq!(plan.tsc_rate, TscRate::Same);
}

#[test]
fn catch_up_advances_both_clocks_by_the_real_time() {
    let plan = saved().plan(ClockPolicy::CatchUp, &present(3600)).unwrap();
    assert_eq!(plan.clock_ns, 3700 * SECOND_NS);
    assert_eq!(plan.elapsed_ticks, 3600 * 2_600_000_000);
    assert_eq!(
        guest_tsc(&plan),
        [260_000_000_000 + 9_360_000_000_000, 260_000_000_007 + 9_360_000_000_000]
    );
}

#[test]
fn offsets_make_the_vcpus_read_the_planned_tsc() {
    for policy in ClockPolicy::ALL {
        let now = present(12);
        let plan = saved().plan(policy, &now).unwrap();
        for vcpu in &plan.vcpus {
            let read = plan.tsc_rate.ratio().guest_tsc(now.host_tsc.unwrap(), vcpu.offset.unwrap());
            assert_eq!(read, vcpu.guest_tsc);
        }
    }
}

#[test]
fn real_time_that_went_backwards_counts_as_zero() {
    let plan = saved().plan(ClockPolicy::CatchUp, &present(-180)).unwrap();
    assert_eq!(plan, saved().plan(ClockPolicy::Continue, &present(-180)).unwrap());
    assert_eq!(plan.clock_ns, 100 * SECOND_NS);
}

#[test]
fn only_catch_up_needs_real_time() {
    let blind = HostReading { realtime_ns: None, ..present(1) };
    assert_eq!(
        saved().plan(ClockPolicy::CatchUp, &blind),
        Err(ClockError::NoRealtime { missing: Missing::PresentHost })
    );
    let old = SavedClock { host_realtime_ns: None, ..saved() };
    assert_eq!(
        old.plan(ClockPolicy::CatchUp, &present(1)),
        Err(ClockError::NoRealtime { missing: Missing::SavedClock })
    );
    assert_eq!(old.plan(ClockPolicy::Continue, &blind).unwrap().clock_ns, 100 * SECOND_NS);
}

#[test]
fn without_a_host_tsc_there_are_no_offsets() {
    let plan =
        saved().plan(ClockPolicy::Continue, &HostReading { host_tsc: None, ..present(1) }).unwrap();
    assert!(plan.vcpus.iter().all(|vcpu| vcpu.offset.is_none()));
    assert_eq!(guest_tsc(&plan), saved().guest_tsc);
}

#[test]
fn only_frequencies_beyond_the_tolerance_need_scaling() {
    let guest = khz(2_600_000);
    let slower = khz(2_000_000);
    assert_eq!(
        TscRate::between(guest, slower, TscScaling::Unavailable),
        Err(ClockError::NoScaling { guest, host: slower })
    );
    for fraction in [FractionBits::Amd32, FractionBits::Intel48] {
        let scaled = TscRate::between(guest, slower, TscScaling::Available(fraction)).unwrap();
        assert!(matches!(scaled, TscRate::Scaled(_)));
        // 1.3 is no finite binary fraction: the ratio is rounded down.
        assert_eq!(scaled.ratio().scale(2_000_000_000), 2_599_999_999);
        // 250 ppm of the host's 2.6 GHz are 650 kHz.
        let available = TscScaling::Available(fraction);
        assert_eq!(TscRate::between(khz(2_600_650), guest, available), Ok(TscRate::Tolerated));
        assert_eq!(TscRate::between(khz(2_599_350), guest, available), Ok(TscRate::Tolerated));
        assert!(matches!(
            TscRate::between(khz(2_600_651), guest, available),
            Ok(TscRate::Scaled(_))
        ));
        assert!(matches!(
            TscRate::between(khz(2_599_349), guest, available),
            Ok(TscRate::Scaled(_))
        ));
    }
    // The integer part has eight bits on AMD.
    let (fast, slow) = (khz(2_560_000), khz(10_000));
    assert_eq!(
        TscRate::between(fast, slow, TscScaling::Available(FractionBits::Amd32)),
        Err(ClockError::RatioOutOfRange { guest: fast, host: slow })
    );
    assert!(TscRate::between(fast, slow, TscScaling::Available(FractionBits::Intel48)).is_ok());
}

#[test]
fn errors_say_what_to_do() {
    let error = ClockError::NoScaling { guest: khz(2_600_000), host: khz(2_000_000) }.to_string();
    assert!(
        error.contains("2600000 kHz") && error.contains("2000000 kHz") && error.contains("250 ppm"),
        "{error}"
    );
}

#[test]
fn impossible_real_times_are_an_error_and_not_a_wrapped_clock() {
    let now = HostReading { realtime_ns: Some(u64::MAX), ..present(0) };
    let ancient = SavedClock { host_realtime_ns: Some(0), ..saved() };
    assert_eq!(
        ancient.plan(ClockPolicy::CatchUp, &now),
        Err(ClockError::OutOfRange { clock_ns: 100 * SECOND_NS, elapsed_ns: u64::MAX })
    );
}

#[cfg(feature = "serde")]
#[test]
fn saved_clocks_survive_serialization() {
    let text = serde_json::to_string(&saved()).unwrap();
    assert!(text.contains("\"tsc_khz\":2600000"), "{text}");
    assert_eq!(serde_json::from_str::<SavedClock>(&text).unwrap(), saved());
    assert!(serde_json::from_str::<SavedClock>(&text.replace("2600000", "0")).is_err());
    assert_eq!(serde_json::to_string(&ClockPolicy::CatchUp).unwrap(), "\"catch-up\"");
}

fn frequencies() -> impl Strategy<Value = Kilohertz> {
    (100_000u32..10_000_000).prop_map(khz)
}

proptest! {
    /// The guest's TSC, as time, differs from its KVM clock by less than a tick, over any host and
    /// any pause.
    #[test]
    fn clock_and_tsc_advance_by_the_same_time(
        guest in frequencies(),
        elapsed_ns in 0u64..100 * 365 * 86_400 * SECOND_NS / 10,
        policy in prop::sample::select(&ClockPolicy::ALL),
    ) {
        let saved = SavedClock { tsc_khz: guest, ..saved() };
        let now = HostReading {
            realtime_ns: saved.host_realtime_ns.map(|ns| ns + elapsed_ns),
            tsc_khz: guest,
            ..present(0)
        };
        let plan = saved.plan(policy, &now).unwrap();
        let clock_advance_ns = u128::from(plan.clock_ns - saved.clock_ns);
        for (vcpu, &before) in plan.vcpus.iter().zip(&saved.guest_tsc) {
            let ticks = u128::from(vcpu.guest_tsc - before);
            prop_assert!(ticks * 1_000_000 <= clock_advance_ns * u128::from(guest.get()));
            prop_assert!((ticks + 1) * 1_000_000 > clock_advance_ns * u128::from(guest.get()));
        }
    }

    /// For any TSCs of both hosts and any scaling, the TSC that the hardware computes from the
    /// plan's offset is never below the guest's last reading.
    #[test]
    fn no_guest_clock_goes_backwards(
        guest in frequencies(),
        host in frequencies(),
        host_tsc in any::<u64>(),
        saved_tsc in 0u64..1 << 62,
        realtime_step_s in -1_000_000i64..1_000_000,
        policy in prop::sample::select(&ClockPolicy::ALL),
        fraction in prop::sample::select(&[FractionBits::Amd32, FractionBits::Intel48]),
    ) {
        let saved = SavedClock { tsc_khz: guest, guest_tsc: vec![saved_tsc], ..saved() };
        let now = HostReading {
            host_tsc: Some(host_tsc),
            tsc_khz: host,
            scaling: TscScaling::Available(fraction),
            ..present(realtime_step_s)
        };
        let plan = saved.plan(policy, &now).unwrap();
        prop_assert!(plan.clock_ns >= saved.clock_ns);
        let read = plan.tsc_rate.ratio().guest_tsc(host_tsc, plan.vcpus[0].offset.unwrap());
        prop_assert_eq!(read, plan.vcpus[0].guest_tsc);
        prop_assert!(read >= saved_tsc);
    }

    /// Saving by offsets and restoring on the same host at the same instant changes no offset.
    #[test]
    fn an_immediate_restore_keeps_the_offsets(
        guest in frequencies(),
        host in frequencies(),
        host_tsc in any::<u64>(),
        offsets in prop::collection::vec(any::<u64>(), 1..4),
    ) {
        let scaling = TscScaling::Available(FractionBits::Intel48);
        let ratio = TscRate::between(guest, host, scaling).unwrap().ratio();
        let saved = SavedClock::from_offsets(7, Some(9), host_tsc, guest, ratio, &offsets);
        let now =
            HostReading { realtime_ns: Some(9), host_tsc: Some(host_tsc), tsc_khz: host, scaling };
        let plan = saved.plan(ClockPolicy::CatchUp, &now).unwrap();
        let restored: Vec<_> = plan.vcpus.iter().filter_map(|vcpu| vcpu.offset).collect();
        prop_assert_eq!(restored, offsets);
    }
}
