//! A real QEMU with a Linux guest: the balloon, the statistics and the pause over QMP.

#![allow(clippy::unwrap_used)]

mod machine;

use std::time::{Duration, Instant};

use ebb_host_policy::{Action, Balloon, Mean, Means};
use ebbd::clock::now_ms;
use ebbd::monitors::{Kind, Monitor, Place, Seen, Trouble, Undo, undo};
use serde_json::json;

use machine::{LIMIT, MIB, Machine};

impl Machine {
    async fn connect(&self) -> Monitor {
        let started = Instant::now();
        loop {
            match Monitor::connect(&self.socket()).await {
                Ok(monitor) => return monitor,
                Err(trouble) => assert!(started.elapsed() < LIMIT, "{trouble}"),
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Looks until `is_wanted`.
    async fn wait(
        &self,
        monitor: &mut Monitor,
        what: &str,
        is_wanted: impl Fn(&Seen) -> bool,
    ) -> Seen {
        let started = Instant::now();
        loop {
            let seen = monitor.look(now_ms(), 2000).await.unwrap();
            if is_wanted(&seen) {
                return seen;
            }
            let console = || std::fs::read_to_string(self.directory.path().join("console"));
            assert!(started.elapsed() < LIMIT, "{what}: {seen:?}, console: {:?}", console());
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
}

async fn act(monitor: &mut Monitor, action: Action) -> Result<(), Trouble> {
    monitor.act(action, Duration::from_secs(30)).await
}

fn is_refused<T>(result: &Result<T, Trouble>) -> bool {
    matches!(result, Err(Trouble::Refused(_)))
}

const PAUSE: Action = Action::Pause { for_ms: 1000 };

#[tokio::test]
async fn a_guest_of_qemu() {
    let machine = Machine::start();
    let mut monitor = machine.connect().await;
    assert_eq!(monitor.kind(), Kind::Qemu);
    assert_eq!(monitor.process().pid(), machine.child.id());
    assert!(monitor.process().usage().unwrap().resident_bytes > 0);

    // It waits for its first `cont`, which is not this program's to give.
    let seen = monitor.look(now_ms(), 2000).await.unwrap();
    assert_eq!((seen.size_bytes, seen.is_paused), (256 * MIB, true));
    assert_eq!((seen.balloon, seen.statistics, seen.means), (None, None, Means::default()));
    for action in [Action::Resume, PAUSE, Action::Balloon { target_bytes: MIB }] {
        assert!(is_refused(&act(&mut monitor, action).await), "{action:?}");
    }
    machine.tell(&json!({ "execute": "cont" }));

    let started_ms = now_ms();
    let seen = machine.wait(&mut monitor, "statistics", |seen| seen.statistics.is_some()).await;
    let said = seen.statistics.unwrap();
    assert!((started_ms - 1000..=now_ms()).contains(&said.taken_ms), "{said:?}");
    let total = said.total_bytes.unwrap();
    assert!((100 * MIB..256 * MIB).contains(&total), "{said:?}");
    assert!(said.available_bytes.is_some_and(|bytes| bytes > 0 && bytes < total), "{said:?}");
    assert_eq!(seen.balloon, Some(Balloon::default()));
    assert_eq!(seen.means, [Mean::Reporting, Mean::Balloon, Mean::Pause].into_iter().collect());
    // They come again and again.
    let is_newer = |seen: &Seen| seen.statistics.is_some_and(|it| it.taken_ms > said.taken_ms);
    machine.wait(&mut monitor, "newer statistics", is_newer).await;

    let second = Monitor::connect(&machine.socket()).await;
    assert!(matches!(&second, Err(Trouble::Refused(text)) if text.contains("one client")));

    act(&mut monitor, Action::Balloon { target_bytes: 64 * MIB }).await.unwrap();
    let full = Balloon { target_bytes: 64 * MIB, actual_bytes: 64 * MIB };
    machine.wait(&mut monitor, "inflated", |seen| seen.balloon == Some(full)).await;
    let is_less = |seen: &Seen| {
        let total_now = seen.statistics.and_then(|it| it.total_bytes);
        total_now.is_some_and(|bytes| bytes + 60 * MIB < total)
    };
    machine.wait(&mut monitor, "the guest says that it has less", is_less).await;

    act(&mut monitor, PAUSE).await.unwrap();
    assert!(monitor.look(now_ms(), 2000).await.unwrap().is_paused);
    // It is renewed.
    act(&mut monitor, PAUSE).await.unwrap();
    act(&mut monitor, Action::Resume).await.unwrap();
    machine.tell(&json!({ "execute": "stop" }));
    assert!(is_refused(&act(&mut monitor, PAUSE).await), "it is another's pause");
    act(&mut monitor, Action::Resume).await.unwrap();
    assert!(!monitor.look(now_ms(), 2000).await.unwrap().is_paused);
    act(&mut monitor, Action::Resume).await.unwrap();

    act(&mut monitor, Action::Balloon { target_bytes: 32 * MIB }).await.unwrap();
    let half = |seen: &Seen| seen.balloon.is_some_and(|it| it.actual_bytes == 32 * MIB);
    machine.wait(&mut monitor, "deflated", half).await;

    // The program dies, and another one takes back what it did.
    act(&mut monitor, PAUSE).await.unwrap();
    drop(monitor);
    for what in [Undo::Pause, Undo::Balloon] {
        undo(&Place::of(&machine.socket()), what).await.unwrap();
    }
    let mut monitor = machine.connect().await;
    let seen =
        machine.wait(&mut monitor, "undone", |it| it.balloon == Some(Balloon::default())).await;
    assert!(!seen.is_paused);

    // What has moved elsewhere must not run here again, although QEMU would let it.
    let arguments = json!({ "uri": "exec:cat >/dev/null" });
    machine.tell(&json!({ "execute": "migrate", "arguments": arguments }));
    machine.wait(&mut monitor, "migrated", |seen| seen.is_paused).await;
    let seen = monitor.look(now_ms(), 2000).await.unwrap();
    assert!(!seen.means.has(Mean::Pause) && !seen.means.has(Mean::Balloon), "{seen:?}");
    assert!(is_refused(&act(&mut monitor, Action::Resume).await));
    drop(monitor);
    assert!(is_refused(&undo(&Place::of(&machine.socket()), Undo::Pause).await));
    let status = machine.tell(&json!({ "execute": "query-status" }));
    assert_eq!(status["return"]["running"], false, "{status}");
}
