//! The guest's statistics: fresh and plausible, and an error if the guest cannot answer.

use std::time::{Duration, Instant};

use ebb_agent::protocol::{Command, Crash};
use ebb_vmm::api::{ClientError, StatisticsDocument};

use crate::guest::{Guest, MIB};
use crate::harness::{Scene, Test, eventually, when};
use crate::setup::Setup;

/// The tests.
pub const TESTS: &[Test] = &[
    Test::new("statistics::fresh_and_plausible", 180, fresh_and_plausible),
    Test::new("statistics::at_an_interval", 180, at_an_interval),
    Test::new("statistics::of_a_guest_that_cannot_answer", 240, of_a_guest_that_cannot_answer),
];

/// Retries until the guest answers within the API's time limit of a second, which it may exceed on
/// a busy machine.
fn fresh(guest: &Guest) -> StatisticsDocument {
    eventually("statistics", 30, || guest.statistics().map_err(|error| error.to_string()))
}

fn fresh_and_plausible(scene: &Scene) {
    let guest = Setup::new(scene).start();
    let total = guest.meminfo("MemTotal");
    let document = fresh(&guest);
    assert!(document.age_ms.is_some_and(|age| age <= 1000), "{document:?}");
    let values = document.statistics;
    let known = [
        values.swap_in_bytes,
        values.swap_out_bytes,
        values.major_faults,
        values.minor_faults,
        values.free_memory_bytes,
        values.total_memory_bytes,
        values.available_memory_bytes,
        values.disk_caches_bytes,
        values.hugetlb_allocations,
        values.hugetlb_failures,
    ];
    assert!(known.iter().all(Option::is_some), "Linux reports tags 0 to 9: {values:?}");
    assert_eq!(values.total_memory_bytes, Some(total));
    assert_eq!(
        (values.swap_in_bytes, values.swap_out_bytes),
        (Some(0), Some(0)),
        "there is no swap"
    );
    for part in [values.free_memory_bytes, values.available_memory_bytes, values.disk_caches_bytes]
    {
        assert!(part.is_some_and(|bytes| bytes > 0 && bytes < total), "{values:?}");
    }

    guest.run(Command::Hold { bytes: 200 * MIB, pattern: 1 });
    let after = fresh(&guest).statistics;
    let fell = values.free_memory_bytes.unwrap().saturating_sub(after.free_memory_bytes.unwrap());
    assert!(fell > 150 * MIB, "free memory fell by {fell} bytes");
    assert!(after.minor_faults > values.minor_faults, "{values:?} {after:?}");

    // With a maximum age the previous values are returned.
    let old: StatisticsDocument =
        guest.client().get("/balloon/statistics?max_age_ms=600000").unwrap();
    assert_eq!(old.statistics, after);
}

/// Age of the known values, without a request to the guest.
fn age_ms(guest: &Guest) -> Option<u64> {
    let document: Result<StatisticsDocument, _> =
        guest.client().get("/balloon/statistics?max_age_ms=600000");
    document.unwrap().age_ms
}

fn at_an_interval(scene: &Scene) {
    let guest = Setup::new(scene).balloon("reporting=off,statistics=1").start();
    assert_eq!(guest.balloon().statistics_interval_seconds, 1);
    let wait_for_newer = || {
        let mut last = age_ms(&guest).unwrap_or(u64::MAX);
        eventually("values arrive at the interval", 30, || {
            let now = age_ms(&guest).unwrap_or(u64::MAX);
            let newer = now < last;
            last = now;
            when(newer, || format!("the last ones are {now} ms old"))
        });
    };
    eventually("the first values arrive", 30, || {
        when(age_ms(&guest).is_some(), || "none yet".to_owned())
    });
    wait_for_newer();
    wait_for_newer();
    let body = serde_json::json!({ "interval_seconds": 0 });
    let info: ebb_vmm::api::BalloonInfo =
        guest.client().put_json("/balloon/statistics-interval", &body).unwrap();
    assert_eq!(info.statistics_interval_seconds, 0);
    // No new values are requested; one that was pending may still arrive.
    eventually("values are three intervals old", 30, || {
        let age = age_ms(&guest);
        when(age.is_some_and(|age| age > 3000), || format!("{age:?}"))
    });
    let body = serde_json::json!({ "interval_seconds": 1 });
    let _: ebb_vmm::api::BalloonInfo =
        guest.client().put_json("/balloon/statistics-interval", &body).unwrap();
    wait_for_newer();
}

fn of_a_guest_that_cannot_answer(scene: &Scene) {
    let guest = Setup::new(scene).start();
    let known = fresh(&guest).statistics;
    let refusal = || match guest.statistics() {
        Err(ClientError::Refused { status, detail }) => (status, detail),
        other => panic!("{other:?} instead of a refusal"),
    };

    guest.put("/vm/pause");
    let (status, detail) = refusal();
    assert_eq!(status, 409, "{detail:?}");
    assert_eq!(detail.last_known.expect("the last values").statistics, known);
    guest.put("/vm/resume");
    fresh(&guest);

    guest.run(Command::UnloadModule { name: "virtio_balloon".to_owned() });
    let (status, detail) = refusal();
    assert_eq!(status, 409, "{detail:?}");
    assert!(detail.message.contains("driver"), "{detail:?}");
    guest.run(Command::LoadModule {
        path: "/modules/virtio_balloon.ko".to_owned(),
        parameters: String::new(),
    });
    let known = fresh(&guest).statistics;

    // A kernel that has panicked and neither restarts nor notifies the monitor.
    guest.run(Command::UnloadModule { name: "pvpanic_mmio".to_owned() });
    guest.write_file("/proc/sys/kernel/panic", "0");
    guest.send(Command::Crash { how: Crash::Panic });
    let mut asked = Instant::now();
    let detail = eventually("the guest is dead", 30, || {
        asked = Instant::now();
        match guest.statistics() {
            Err(ClientError::Refused { status: 504, detail }) => Ok(detail),
            other => Err(format!("{other:?}")),
        }
    });
    assert!(asked.elapsed() >= Duration::from_secs(1), "the API waited for a second");
    assert!(detail.message.contains("1000 ms"), "{detail:?}");
    assert!(
        detail.last_known.expect("the last values").statistics.total_memory_bytes
            == known.total_memory_bytes
    );
    // The monitor still answers.
    guest.vm();
}
