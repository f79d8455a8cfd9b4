//! Firecracker and Cloud Hypervisor without them: recorded answers, and servers that answer badly.

#![allow(clippy::unwrap_used)]

mod bad;
mod server;

use std::time::Duration;

use ebb_host_policy::{Action, Balloon, Mean, Means};
use ebbd::monitors::{Kind, Monitor, Seen, Trouble};
use tokio::io::{AsyncWriteExt as _, BufReader};
use tokio::net::UnixListener;

use server::{Server, next};

const MIB: u64 = 1 << 20;
/// The moment of the first look.
const NOW_MS: u64 = 100_000;
/// Between two looks: so long that this process is idle by comparison, which stands for a monitor.
const LATER_MS: u64 = 100_000;
async fn act(monitor: &mut Monitor, action: Action) -> Result<(), Trouble> {
    monitor.act(action, Duration::from_secs(30)).await
}

/// Looks for the `nth` time.
async fn look(monitor: &mut Monitor, nth: u64) -> Seen {
    monitor.look(NOW_MS + nth * LATER_MS, 2000).await.unwrap()
}

fn is_refused<T>(result: &Result<T, Trouble>) -> bool {
    matches!(result, Err(Trouble::Refused(_)))
}

fn means(list: &[Mean]) -> Means {
    list.iter().copied().collect()
}

fn balloon(target_mib: u64, actual_mib: u64) -> Balloon {
    Balloon { target_bytes: target_mib * MIB, actual_bytes: actual_mib * MIB }
}

fn inflate(target_bytes: u64) -> Action {
    Action::Balloon { target_bytes }
}

const PAUSE: Action = Action::Pause { for_ms: 1000 };
const SOME: u64 = 64 * MIB;

/// Nothing can be done to it.
async fn assert_left_alone(monitor: &mut Monitor, server: &Server) {
    for action in [PAUSE, Action::Resume, inflate(SOME)] {
        let result = act(monitor, action).await;
        assert!(is_refused(&result), "{action:?}: {result:?}");
    }
    for action in [Action::Reclaim, Action::Trim, Action::Park, Action::Stop] {
        assert_eq!(act(monitor, action).await, Err(Trouble::Unable));
    }
    assert_eq!(server.changes(), [""; 0]);
}

#[tokio::test]
async fn firecracker_before_its_start() {
    let server = Server::replay("firecracker/machine.http", "not-started");
    let mut monitor = server.connect().await.unwrap();
    assert_eq!(monitor.kind(), Kind::Firecracker);
    assert!(!monitor.undoes_itself());
    assert_eq!(monitor.process().pid(), std::process::id());
    let expected = Seen {
        size_bytes: 256 * MIB,
        is_paused: true,
        balloon: None,
        statistics: None,
        means: Means::default(),
    };
    assert_eq!(look(&mut monitor, 0).await, expected);
    assert_left_alone(&mut monitor, &server).await;

    // Without a driver.
    server.enter("booting");
    let seen = look(&mut monitor, 1).await;
    assert!(!seen.is_paused);
    assert_eq!((seen.balloon, seen.statistics, seen.means), (None, None, means(&[Mean::Pause])));
    let refused = act(&mut monitor, inflate(SOME)).await;
    assert!(matches!(&refused, Err(Trouble::Refused(it)) if it.contains("not activated yet")));
}

#[tokio::test]
async fn firecracker_with_a_balloon() {
    let server = Server::replay("firecracker/machine.http", "running");
    let mut monitor = server.connect().await.unwrap();
    let seen = look(&mut monitor, 0).await;
    assert_eq!((seen.size_bytes, seen.balloon), (256 * MIB, Some(balloon(0, 0))));
    assert_eq!(seen.means, means(&[Mean::Reporting, Mean::Balloon, Mean::Pause]));
    assert_eq!(seen.statistics, None, "of any age");
    let said = look(&mut monitor, 1).await.statistics.unwrap();
    assert_eq!(said.taken_ms, NOW_MS);
    assert_eq!((said.total_bytes, said.available_bytes), (Some(229_134_336), Some(205_455_360)));
    assert_eq!((said.major_faults, said.swap_out_bytes, said.oom_kills), (Some(0), Some(0), None));
    assert_eq!((said.free_bytes, said.caches_bytes), (Some(202_248_192), Some(2_265_088)));

    // No more than was ordered.
    for (target_bytes, amount_mib) in [(0, 0), (MIB - 1, 0), (81 * MIB - 1, 80)] {
        act(&mut monitor, inflate(target_bytes)).await.unwrap();
        let sent = format!("PATCH /balloon {{\"amount_mib\":{amount_mib}}}");
        assert_eq!(server.changes(), [sent]);
    }
    for target_bytes in [256 * MIB, u64::MAX] {
        assert!(is_refused(&act(&mut monitor, inflate(target_bytes)).await));
    }
    assert_eq!(server.changes(), [""; 0]);

    server.enter("inflated");
    let seen = look(&mut monitor, 2).await;
    assert_eq!(seen.balloon, Some(balloon(64, 64)));
    assert_eq!(seen.statistics.unwrap().taken_ms, NOW_MS + LATER_MS);
    act(&mut monitor, PAUSE).await.unwrap();
    assert_eq!(server.changes(), ["PATCH /vm {\"state\":\"Paused\"}"]);
    server.enter("paused");
    for nth in 3..5 {
        let seen = look(&mut monitor, nth).await;
        assert!(seen.is_paused);
        assert_eq!(seen.statistics.unwrap().taken_ms, NOW_MS + LATER_MS, "as old as it was");
    }
    // It is renewed.
    act(&mut monitor, PAUSE).await.unwrap();
    assert_eq!(server.changes(), [""; 0]);
    act(&mut monitor, Action::Resume).await.unwrap();
    assert_eq!(server.changes(), ["PATCH /vm {\"state\":\"Resumed\"}"]);
    assert!(is_refused(&act(&mut monitor, PAUSE).await), "it is another's pause");
    server.enter("resumed");
    act(&mut monitor, Action::Resume).await.unwrap();
    assert_eq!(server.changes(), [""; 0]);
}

#[tokio::test]
async fn firecracker_is_asked_once_for_what_does_not_change() {
    let server = Server::replay("firecracker/machine.http", "running");
    let mut monitor = server.connect().await.unwrap();
    look(&mut monitor, 0).await;
    server.asked.lock().unwrap().clear();
    look(&mut monitor, 1).await;
    assert_eq!(*server.asked.lock().unwrap(), ["GET /", "GET /balloon/statistics"]);
}

#[tokio::test]
async fn firecracker_without_a_balloon_or_without_statistics() {
    let server = Server::replay("firecracker/no-balloon.http", "running");
    let mut monitor = server.connect().await.unwrap();
    let seen = look(&mut monitor, 0).await;
    assert_eq!((seen.size_bytes, seen.is_paused), (256 * MIB, false));
    assert_eq!((seen.balloon, seen.means), (None, means(&[Mean::Pause])));
    assert!(is_refused(&act(&mut monitor, inflate(SOME)).await));

    let server = Server::replay("firecracker/no-statistics.http", "inflated");
    let mut monitor = server.connect().await.unwrap();
    let seen = look(&mut monitor, 0).await;
    assert_eq!((seen.balloon, seen.statistics, seen.means), (None, None, means(&[Mean::Pause])));
}

#[tokio::test]
async fn statistics_of_a_snapshot_have_no_time() {
    let server = Server::replay("firecracker/restored.http", "paused");
    let mut monitor = server.connect().await.unwrap();
    for nth in 0..3 {
        let seen = look(&mut monitor, nth).await;
        assert_eq!((seen.balloon, seen.statistics), (Some(balloon(64, 64)), None));
    }
    assert!(is_refused(&act(&mut monitor, PAUSE).await), "it is another's pause");
    server.enter("running");
    assert_eq!(look(&mut monitor, 3).await.statistics, None);
    let said = look(&mut monitor, 4).await.statistics.unwrap();
    assert_eq!(said.taken_ms, NOW_MS + 3 * LATER_MS);
}

#[tokio::test]
async fn memory_that_was_plugged_counts() {
    let server = Server::replay("firecracker/plugged.http", "plugged");
    let mut monitor = server.connect().await.unwrap();
    assert_eq!(look(&mut monitor, 0).await.size_bytes, (256 + 128) * MIB);
    // Firecracker accepts up to 512.
    assert!(is_refused(&act(&mut monitor, inflate(400 * MIB)).await));
    act(&mut monitor, inflate(300 * MIB)).await.unwrap();

    let server = Server::replay("cloud-hypervisor/plugged.http", "plugged");
    let mut monitor = server.connect().await.unwrap();
    let seen = look(&mut monitor, 0).await;
    assert_eq!((seen.size_bytes, seen.balloon), ((256 + 128) * MIB, Some(balloon(32, 32))));
}

#[tokio::test]
async fn cloud_hypervisor_before_its_start() {
    let server = Server::replay("cloud-hypervisor/no-balloon.http", "not-created");
    let mut monitor = server.connect().await.unwrap();
    assert_eq!(monitor.kind(), Kind::CloudHypervisor);
    assert!(!monitor.undoes_itself());
    let none = monitor.look(NOW_MS, 2000).await;
    assert!(matches!(&none, Err(Trouble::Refused(text)) if text.contains("not created")));
    for (name, section) in [("no-balloon", "created"), ("machine", "created")] {
        let server = Server::replay(&format!("cloud-hypervisor/{name}.http"), section);
        let mut monitor = server.connect().await.unwrap();
        let expected = Seen {
            size_bytes: 256 * MIB,
            is_paused: true,
            balloon: None,
            statistics: None,
            means: Means::default(),
        };
        assert_eq!(look(&mut monitor, 0).await, expected);
        assert_left_alone(&mut monitor, &server).await;
    }
}

#[tokio::test]
async fn cloud_hypervisor_with_a_balloon() {
    let server = Server::replay("cloud-hypervisor/machine.http", "running");
    let mut monitor = server.connect().await.unwrap();
    let expected = Seen {
        size_bytes: 256 * MIB,
        is_paused: false,
        balloon: Some(balloon(0, 0)),
        statistics: None,
        means: means(&[Mean::Reporting, Mean::Balloon, Mean::Pause]),
    };
    assert_eq!(look(&mut monitor, 0).await, expected);
    act(&mut monitor, inflate(SOME + 4095)).await.unwrap();
    assert_eq!(server.changes(), [format!("PUT /api/v1/vm.resize {{\"desired_balloon\":{SOME}}}")]);
    for target_bytes in [256 * MIB, u64::MAX] {
        assert!(is_refused(&act(&mut monitor, inflate(target_bytes)).await));
    }
    assert_eq!(server.changes(), [""; 0]);

    server.enter("inflated");
    assert_eq!(look(&mut monitor, 1).await.balloon, Some(balloon(64, 64)));
    act(&mut monitor, PAUSE).await.unwrap();
    assert_eq!(server.changes(), ["PUT /api/v1/vm.pause"]);
    server.enter("paused");
    assert!(look(&mut monitor, 2).await.is_paused);
    act(&mut monitor, PAUSE).await.unwrap();
    assert_eq!(server.changes(), [""; 0]);
    act(&mut monitor, Action::Resume).await.unwrap();
    assert_eq!(server.changes(), ["PUT /api/v1/vm.resume"]);
    assert!(is_refused(&act(&mut monitor, PAUSE).await), "it is another's pause");
    server.enter("resumed");
    act(&mut monitor, Action::Resume).await.unwrap();
    assert_eq!(server.changes(), [""; 0]);
    server.enter("deflated");
    assert_eq!(look(&mut monitor, 3).await.balloon, Some(balloon(0, 0)));
    server.enter("shut-down");
    assert_left_alone(&mut monitor, &server).await;
    act(&mut monitor, inflate(0)).await.unwrap();
    assert_eq!(server.changes(), ["PUT /api/v1/vm.resize {\"desired_balloon\":0}"]);
}

#[tokio::test]
async fn cloud_hypervisor_without_a_balloon() {
    let server = Server::replay("cloud-hypervisor/no-balloon.http", "running");
    let mut monitor = server.connect().await.unwrap();
    let seen = look(&mut monitor, 0).await;
    assert_eq!((seen.balloon, seen.means), (None, means(&[Mean::Pause])));
    let refused = act(&mut monitor, inflate(SOME)).await;
    assert!(matches!(&refused, Err(Trouble::Refused(it)) if it.contains("Missing virtio-balloon")));
}

#[tokio::test]
async fn servers_are_told_apart() {
    let instance = r#"{"id":"a","state":"Running","vmm_version":"1","app_name":"Firecracker"}"#;
    for (name, document, kind) in [
        ("ebb/1.0", instance, Kind::Firecracker),
        ("ebb/1.0", "{}", Kind::Ebb),
        ("Firecracker API", "{}", Kind::Firecracker),
        ("Cloud Hypervisor API", "{}", Kind::CloudHypervisor),
    ] {
        let server = Server::canned(name, &[("/", document.to_owned())]);
        assert_eq!(server.connect().await.unwrap().kind(), kind, "{name} {document}");
    }
    let server = Server::canned("other\t", &[]);
    let other = server.connect().await;
    assert!(
        matches!(&other, Err(Trouble::Nonsense(text)) if text.contains("'other'")),
        "{other:?}"
    );
}

#[tokio::test]
async fn a_connection_may_be_closed_between_requests() {
    let directory = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(directory.path().join("api")).unwrap();
    let documents =
        [r#"{"state":"Running"}"#, r#"{"state":"Running"}"#, "{}", r#"{"state":"Paused"}"#, "{}"];
    let server = tokio::spawn(async move {
        for document in documents {
            let (stream, _) = listener.accept().await.unwrap();
            let mut stream = BufReader::new(stream);
            next(&mut stream).await.unwrap();
            let length = document.len();
            let head = "HTTP/1.1 200 \r\nServer: Firecracker API\r\nConnection: close\r\n";
            let answer = format!("{head}Content-Length: {length}\r\n\r\n{document}");
            stream.write_all(answer.as_bytes()).await.unwrap();
        }
    });
    let mut monitor = Monitor::connect(&directory.path().join("api")).await.unwrap();
    act(&mut monitor, PAUSE).await.unwrap();
    // It is not forgotten whose pause it is.
    act(&mut monitor, PAUSE).await.unwrap();
    act(&mut monitor, inflate(0)).await.unwrap();
    server.await.unwrap();
}

#[tokio::test]
async fn a_server_with_too_many_clients_is_trouble() {
    let directory = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(directory.path().join("api")).unwrap();
    let full = "HTTP/1.1 503\r\nServer: Firecracker API\r\nConnection: close\r\n\
                Content-Length: 40\r\n\r\n{ \"error\": \"Too many open connections\" }";
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        stream.write_all(full.as_bytes()).await.unwrap();
    });
    let monitor = Monitor::connect(&directory.path().join("api")).await;
    assert!(
        matches!(&monitor, Err(Trouble::Nonsense(text)) if text.contains("503")),
        "{monitor:?}"
    );
}
