//! QEMU's monitors without QEMU: recorded answers, and servers that break the protocol.

#![allow(clippy::unwrap_used)]

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ebb_host_policy::{Action, Balloon, Mean, Means};
use ebbd::monitors::qemu::Qemu;
use ebbd::monitors::{Kind, Monitor, Seen, Trouble};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::time::timeout;

const MIB: u64 = 1 << 20;
const GREETING: &str = r#"{"QMP": {"version": {}, "capabilities": []}}"#;
/// The age of the replayed statistics.
const AGE_S: u64 = 3;
/// The moment of a look.
const NOW_MS: u64 = 100_000;
/// QEMU asks guests by itself.
const FRESH_MS: u64 = 2_000;

/// A socket, with the name of its directory.
struct Socket {
    directory: TempDir,
    listener: UnixListener,
}

impl Socket {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(directory.path().join("qmp")).unwrap();
        Self { directory, listener }
    }

    fn path(&self) -> PathBuf {
        self.directory.path().join("qmp")
    }
}

/// A request without its number, as the key of its answers.
fn key(request: &Value) -> String {
    format!("{} {}", request["execute"], request["arguments"])
}

/// What a recording has for requests in a state of the machine: the lines up to each answer.
type Section = HashMap<String, Vec<String>>;

/// Answers with what a recording has, in the state that is set. What it does not have succeeds if
/// it is in `more`.
struct Replay {
    greeting: String,
    sections: HashMap<String, Section>,
    served: Served,
    more: &'static [&'static str],
}

/// A view of a server.
#[derive(Clone, Default)]
struct Served {
    asked: Arc<Mutex<Vec<String>>>,
    section: Arc<Mutex<&'static str>>,
}

impl Served {
    /// What it was asked with this command: the arguments.
    fn asked(&self, command: &str) -> Vec<String> {
        let command = format!("\"{command}\" ");
        let asked = self.asked.lock().unwrap();
        asked.iter().filter_map(|it| it.strip_prefix(&command)).map(str::to_owned).collect()
    }

    fn enter(&self, section: &'static str) {
        *self.section.lock().unwrap() = section;
    }
}

impl Replay {
    fn new(name: &str, more: &'static [&'static str]) -> Self {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/qemu").join(name);
        let text = std::fs::read_to_string(path).unwrap();
        let mut lines = text.lines();
        let greeting = lines.next().unwrap()[2..].to_owned();
        let mut sections: HashMap<String, Section> = HashMap::new();
        let (mut section, mut request) = (String::new(), String::new());
        for line in lines {
            let (mark, rest) = line.split_at(2);
            let answers = sections.entry(section.clone()).or_default();
            match mark {
                "# " => rest.clone_into(&mut section),
                "> " => {
                    request = key(&serde_json::from_str(rest).unwrap());
                    answers.insert(request.clone(), Vec::new());
                }
                _ => answers.get_mut(&request).unwrap().push(rest.to_owned()),
            }
        }
        Self { greeting, sections, served: Served::default(), more }
    }

    /// Replaces an answer in all states.
    fn answers(&mut self, command: &str, returned: &Value) {
        let line = json!({ "return": returned }).to_string();
        for section in self.sections.values_mut() {
            section.insert(key(&json!({ "execute": command })), vec![line.clone()]);
        }
    }

    /// Serves one client.
    fn serve(mut self, socket: &Arc<Socket>) -> Served {
        let (served, socket) = (self.served.clone(), socket.clone());
        tokio::spawn(async move {
            let (stream, _) = socket.listener.accept().await.unwrap();
            let mut stream = BufReader::new(stream);
            stream.write_all(format!("{}\r\n", self.greeting).as_bytes()).await.unwrap();
            let mut line = String::new();
            while stream.read_line(&mut line).await.unwrap_or(0) > 0 {
                let request: Value = serde_json::from_str(&line).unwrap();
                line.clear();
                let answer = self.answer(&request);
                self.served.asked.lock().unwrap().push(key(&request));
                stream.write_all(answer.as_bytes()).await.unwrap();
            }
        });
        served
    }

    fn answer(&mut self, request: &Value) -> String {
        let command = request["execute"].as_str().unwrap();
        let section = *self.served.section.lock().unwrap();
        let recorded = [section, ""]
            .into_iter()
            .find_map(|section| self.sections.get(section)?.get(&key(request)));
        let other = if self.more.contains(&command) {
            json!({ "return": {} })
        } else {
            json!({ "error": { "class": "NotRecorded", "desc": command } })
        };
        let mut text = String::new();
        for line in recorded.unwrap_or(&vec![other.to_string()]) {
            let mut message: Value = serde_json::from_str(line).unwrap();
            if message.get("event").is_none() {
                message["id"] = request["id"].clone();
            }
            if let Some(1..) = message["return"]["last-update"].as_u64() {
                // The recording is of another day.
                let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
                message["return"]["last-update"] = (now - AGE_S).into();
            }
            text += &message.to_string();
            text += "\r\n";
        }
        text
    }
}

async fn replayed(name: &str) -> (Monitor, Served) {
    let socket = Arc::new(Socket::new());
    let served = Replay::new(name, &["balloon", "stop", "cont"]).serve(&socket);
    let monitor = Monitor::connect(&socket.path()).await.unwrap();
    assert_eq!(monitor.kind(), Kind::Qemu);
    assert!(!monitor.undoes_itself());
    assert_eq!(monitor.process().pid(), std::process::id());
    (monitor, served)
}

fn means(list: &[Mean]) -> Means {
    list.iter().copied().collect()
}

async fn act(monitor: &mut Monitor, action: Action) -> Result<(), Trouble> {
    monitor.act(action, Duration::from_secs(30)).await
}

#[tokio::test]
async fn a_machine_without_a_balloon() {
    let (mut monitor, served) = replayed("no-balloon.qmp").await;
    let expected = Seen {
        size_bytes: 256 * MIB,
        is_paused: false,
        balloon: None,
        statistics: None,
        means: means(&[Mean::Pause]),
    };
    assert_eq!(monitor.look(NOW_MS, FRESH_MS).await, Ok(expected));
    assert!(served.asked("qom-list").is_empty());
    let refused = act(&mut monitor, Action::Balloon { target_bytes: 56 * MIB }).await;
    assert!(matches!(&refused, Err(Trouble::Refused(text)) if text.contains("No balloon")));
    for action in [Action::Reclaim, Action::Trim, Action::Park, Action::Stop] {
        assert_eq!(act(&mut monitor, action).await, Err(Trouble::Unable));
    }
    assert!(monitor.look(NOW_MS, FRESH_MS).await.is_ok());
}

#[tokio::test]
async fn a_machine_whose_driver_comes_later() {
    let (mut monitor, served) = replayed("driver.qmp").await;
    served.enter("booting");
    let seen = monitor.look(NOW_MS, FRESH_MS).await.unwrap();
    assert_eq!((seen.balloon, seen.statistics), (None, None));
    assert_eq!(seen.means, means(&[Mean::Pause]));
    let set = served.asked("qom-set");
    assert!(set.len() == 1 && set[0].contains("guest-stats-polling-interval"), "{set:?}");

    served.enter("inflated");
    let seen = monitor.look(NOW_MS + 1000, FRESH_MS).await.unwrap();
    // Another client has inflated it.
    let balloon = Balloon { target_bytes: 64 * MIB, actual_bytes: 64 * MIB };
    assert_eq!(seen.balloon, Some(balloon));
    assert_eq!(seen.means, means(&[Mean::Reporting, Mean::Balloon, Mean::Pause]));
    let said = seen.statistics.unwrap();
    assert!(said.taken_ms <= NOW_MS + 1000 - 1000 * AGE_S, "{said:?}");
    assert!(said.total_bytes.unwrap() < (256 - 64) * MIB, "{said:?}");
    assert!(said.available_bytes.unwrap() > said.free_bytes.unwrap(), "{said:?}");
    assert_eq!((said.swap_out_bytes, said.major_faults), (Some(0), Some(0)));
    assert!(said.caches_bytes.is_some());
    assert_eq!(said.oom_kills, None, "Linux 6.1 does not report them");

    act(&mut monitor, Action::Balloon { target_bytes: 80 * MIB + 5 }).await.unwrap();
    assert_eq!(served.asked("balloon"), [format!("{{\"value\":{}}}", (256 - 80) * MIB)]);
    act(&mut monitor, Action::Pause { for_ms: 1000 }).await.unwrap();
    served.enter("paused");
    let seen = monitor.look(NOW_MS + 2000, FRESH_MS).await.unwrap();
    assert!(seen.is_paused);
    let balloon = Balloon { target_bytes: 80 * MIB, actual_bytes: 64 * MIB };
    assert_eq!(seen.balloon, Some(balloon));
    // The statistics are as old as they were.
    assert_eq!(seen.statistics.unwrap().taken_ms, said.taken_ms);
    let all = Action::Balloon { target_bytes: 256 * MIB };
    assert!(matches!(act(&mut monitor, all).await, Err(Trouble::Refused(_))));
    assert_eq!(served.asked("qom-list").len(), 1);
}

#[tokio::test]
async fn plugged_memory_counts() {
    let (mut monitor, served) = replayed("plugged.qmp").await;
    let seen = monitor.look(NOW_MS, FRESH_MS).await.unwrap();
    assert_eq!(seen.size_bytes, (256 + 128) * MIB);
    assert_eq!(seen.balloon.unwrap().actual_bytes, 64 * MIB);
    act(&mut monitor, Action::Balloon { target_bytes: 32 * MIB }).await.unwrap();
    let value = (256 + 128 - 32) * MIB;
    assert_eq!(served.asked("balloon"), [format!("{{\"value\":{value}}}")]);
}

#[tokio::test]
async fn a_machine_that_is_elsewhere_is_left_alone() {
    for name in ["incoming.qmp", "migrated.qmp"] {
        let (mut monitor, served) = replayed(name).await;
        let seen = monitor.look(NOW_MS, FRESH_MS).await.unwrap();
        assert!(seen.is_paused, "{name}");
        assert_eq!(seen.means, Means::default(), "{name}");
        for action in
            [Action::Resume, Action::Pause { for_ms: 1000 }, Action::Balloon { target_bytes: MIB }]
        {
            let result = act(&mut monitor, action).await;
            assert!(matches!(result, Err(Trouble::Refused(_))), "{name} {action:?} {result:?}");
        }
        for command in ["stop", "cont", "balloon"] {
            assert!(served.asked(command).is_empty(), "{name} {command}");
        }
    }
}

#[tokio::test]
async fn a_machine_that_migrates_is_only_deflated() {
    let socket = Arc::new(Socket::new());
    let mut replay = Replay::new("driver.qmp", &["balloon", "stop"]);
    replay.answers("query-migrate", &json!({ "status": "active" }));
    let served = replay.serve(&socket);
    served.enter("inflated");
    let mut monitor = Monitor::connect(&socket.path()).await.unwrap();
    let seen = monitor.look(NOW_MS, FRESH_MS).await.unwrap();
    assert_eq!(seen.means, means(&[Mean::Reporting]));
    for action in [Action::Pause { for_ms: 1000 }, Action::Balloon { target_bytes: MIB }] {
        assert!(matches!(act(&mut monitor, action).await, Err(Trouble::Refused(_))));
    }
    act(&mut monitor, Action::Balloon { target_bytes: 0 }).await.unwrap();
    assert_eq!(served.asked("balloon"), [format!("{{\"value\":{}}}", i64::MAX)]);
    assert!(served.asked("stop").is_empty());
}

/// Serves one client: the greeting, the answer to `qmp_capabilities`, then what `more` does after
/// the next request.
async fn broken<F: Future<Output = ()> + Send + 'static>(
    more: impl FnOnce(BufReader<UnixStream>, Value) -> F + Send + 'static,
) -> Monitor {
    let socket = Socket::new();
    let path = socket.path();
    let server = async move {
        let (stream, _) = socket.listener.accept().await.unwrap();
        let mut stream = BufReader::new(stream);
        stream.write_all(format!("{GREETING}\n").as_bytes()).await.unwrap();
        let request = next(&mut stream).await;
        let answer = json!({ "return": {}, "id": request["id"] });
        stream.write_all(format!("{answer}\n").as_bytes()).await.unwrap();
        let request = next(&mut stream).await;
        more(stream, request).await;
    };
    let served = tokio::spawn(server);
    let monitor = Monitor::connect(&path).await.unwrap();
    drop(served);
    monitor
}

async fn next(stream: &mut BufReader<UnixStream>) -> Value {
    let mut line = String::new();
    stream.read_line(&mut line).await.unwrap();
    serde_json::from_str(&line).unwrap()
}

/// Asserts that the connection is of no further use.
async fn assert_given_up(monitor: &mut Monitor) {
    let after = monitor.look(NOW_MS, FRESH_MS).await;
    assert!(matches!(after, Err(Trouble::Gone(_))), "{after:?}");
}

#[tokio::test]
async fn an_answer_without_end_is_bounded() {
    let mut monitor =
        broken(
            |mut stream, _| async move { while stream.write_all(&[b'x'; 4096]).await.is_ok() {} },
        )
        .await;
    let seen = monitor.look(NOW_MS, FRESH_MS).await;
    assert!(matches!(&seen, Err(Trouble::Nonsense(text)) if text.contains("bytes")), "{seen:?}");
    assert_given_up(&mut monitor).await;
}

#[tokio::test]
async fn a_flood_of_events_is_bounded() {
    let mut monitor = broken(|mut stream, _| async move {
        let events = "{\"event\": \"STOP\"}\r\n".repeat(100);
        while stream.write_all(events.as_bytes()).await.is_ok() {}
    })
    .await;
    let seen = monitor.look(NOW_MS, FRESH_MS).await;
    assert!(matches!(&seen, Err(Trouble::Nonsense(text)) if text.contains("bytes")), "{seen:?}");
    assert_given_up(&mut monitor).await;
}

#[tokio::test]
async fn garbage_and_answers_to_others_are_nonsense() {
    for line in [
        "garbage",
        GREETING,
        "{}",
        r#"{"return": {"status": "running"}}"#,
        r#"{"return": {"status": "running"}, "id": 1}"#,
        r#"{"return": {"status": "running"}, "id": "x"}"#,
        r#"{"error": {"class": "GenericError", "desc": "JSON parse error"}}"#,
    ] {
        let mut monitor = broken(move |mut stream, _| async move {
            stream.write_all(format!("{line}\n").as_bytes()).await.unwrap();
            let _ = stream.read_line(&mut String::new()).await;
        })
        .await;
        let seen = monitor.look(NOW_MS, FRESH_MS).await;
        assert!(matches!(seen, Err(Trouble::Nonsense(_))), "{line}: {seen:?}");
        assert_given_up(&mut monitor).await;
    }
    // The right number, but not the right answer.
    let mut monitor = broken(|mut stream, request| async move {
        let answer = json!({ "return": [], "id": request["id"] });
        stream.write_all(format!("{answer}\n").as_bytes()).await.unwrap();
        let _ = stream.read_line(&mut String::new()).await;
    })
    .await;
    assert!(matches!(monitor.look(NOW_MS, FRESH_MS).await, Err(Trouble::Nonsense(_))));
}

#[tokio::test]
async fn an_end_in_the_middle_is_seen() {
    for piece in ["", r#"{"return": "#] {
        let mut monitor = broken(move |mut stream, _| async move {
            stream.write_all(piece.as_bytes()).await.unwrap();
        })
        .await;
        assert!(matches!(monitor.look(NOW_MS, FRESH_MS).await, Err(Trouble::Gone(_))), "{piece}");
        assert_given_up(&mut monitor).await;
    }
}

#[tokio::test]
async fn a_cancelled_request_gives_the_connection_up() {
    let (late, wait) = tokio::sync::oneshot::channel::<()>();
    let (ended, end) = tokio::sync::oneshot::channel();
    let mut monitor = broken(move |mut stream, request| async move {
        wait.await.unwrap();
        let answer = json!({ "return": { "status": "running" }, "id": request["id"] });
        // It fails if the client has gone.
        let _ = stream.write_all(format!("{answer}\n").as_bytes()).await;
        let rest = stream.read_line(&mut String::new()).await;
        ended.send(rest.unwrap_or(0)).unwrap();
    })
    .await;
    assert!(timeout(Duration::from_millis(20), monitor.look(NOW_MS, FRESH_MS)).await.is_err());
    late.send(()).unwrap();
    assert_given_up(&mut monitor).await;
    assert_eq!(end.await.unwrap(), 0, "the connection is closed, and nothing was sent on it");
}

#[tokio::test]
async fn a_server_that_is_busy_or_ends_at_once_is_trouble() {
    let socket = Socket::new();
    // Nothing is accepted, as by a QEMU with another client.
    let qemu = Qemu::connect(&socket.path()).await;
    assert!(matches!(&qemu, Err(Trouble::Refused(text)) if text.contains("one client")));

    let socket = Socket::new();
    let path = socket.path();
    let server = tokio::spawn(async move { drop(socket.listener.accept().await.unwrap()) });
    let monitor = Monitor::connect(&path).await;
    assert!(matches!(monitor, Err(Trouble::Gone(_))), "{monitor:?}");
    server.await.unwrap();
}

#[tokio::test]
async fn a_server_that_waits_to_be_asked_is_taken_for_http() {
    let socket = Socket::new();
    let path = socket.path();
    let server = tokio::spawn(async move {
        let (stream, _) = socket.listener.accept().await.unwrap();
        let mut stream = BufReader::new(stream);
        let mut line = String::new();
        stream.read_line(&mut line).await.unwrap();
        stream
            .write_all(b"HTTP/1.1 200 OK\r\nServer: other/1\r\nContent-Length: 2\r\n\r\n{}")
            .await
            .unwrap();
        line
    });
    let monitor = Monitor::connect(&path).await;
    assert!(matches!(&monitor, Err(Trouble::Nonsense(text)) if text.contains("other/1")));
    assert_eq!(server.await.unwrap(), "GET / HTTP/1.1\r\n");
}
