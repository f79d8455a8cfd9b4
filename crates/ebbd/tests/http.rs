//! Firecracker and Cloud Hypervisor without them: recorded answers, and servers that answer badly.

#![allow(clippy::unwrap_used)]

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ebb_host_policy::{Action, Balloon, Mean, Means};
use ebbd::monitors::{Kind, Monitor, Seen, Trouble};
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{UnixListener, UnixStream};

const MIB: u64 = 1 << 20;
/// The moment of the first look.
const NOW_MS: u64 = 100_000;
/// Between two looks: so long that this process is idle by comparison, which stands for a monitor.
const LATER_MS: u64 = 100_000;
/// What Cloud Hypervisor answers about a path that it does not have.
const NOT_FOUND: &str = "HTTP/1.1 404 \r\nServer: Cloud Hypervisor API\r\n\
                         Connection: keep-alive\r\nContent-Type: application/json\r\n\
                         Content-Length: 13\r\n\r\n[\"Not Found\"]";
const DONE: &str = "HTTP/1.1 204 \r\nServer: recorded\r\n\r\n";

/// Whole answers by request: method, target and body.
type Section = HashMap<String, String>;
/// What a server answers to a request, as its method, target and body.
type Answers = Box<dyn Fn(&str) -> String + Send + Sync>;

/// A server for any number of clients.
struct Server {
    directory: TempDir,
    asked: Arc<Mutex<Vec<String>>>,
    section: Arc<Mutex<&'static str>>,
}

impl Server {
    fn start(
        section: &'static str,
        make: impl FnOnce(Arc<Mutex<&'static str>>) -> Answers,
    ) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(directory.path().join("api")).unwrap();
        let (asked, section) = (Arc::default(), Arc::new(Mutex::new(section)));
        let server = Self { directory, asked, section: section.clone() };
        let (asked, answers) = (server.asked.clone(), Arc::new(make(section)));
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (asked, answers) = (asked.clone(), answers.clone());
                tokio::spawn(async move {
                    let mut stream = BufReader::new(stream);
                    while let Some(request) = next(&mut stream).await {
                        let answer = answers(&request);
                        asked.lock().unwrap().push(request);
                        if stream.write_all(answer.as_bytes()).await.is_err() {
                            break;
                        }
                    }
                });
            }
        });
        server
    }

    /// Answers with what was recorded, and anything else that changes something with success.
    fn replay(name: &str, section: &'static str) -> Self {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
        let sections = sections(&std::fs::read_to_string(path).unwrap());
        Self::start(section, move |section| {
            Box::new(move |request| {
                let recorded = sections[*section.lock().unwrap()].get(request);
                let recorded = recorded.map(String::as_str);
                let other = if request == "GET /" { NOT_FOUND } else { DONE };
                recorded.unwrap_or(other).to_owned()
            })
        })
    }

    /// Answers some targets with a document, and others with a refusal. All are of `name`.
    fn canned(name: &'static str, documents: &[(&'static str, String)]) -> Self {
        let documents: HashMap<_, _> = documents.iter().cloned().collect();
        Self::start("", move |_| {
            Box::new(move |request| {
                let target = request.split(' ').nth(1).unwrap();
                let (status, body) = match documents.get(target) {
                    Some(body) => (200, body.as_str()),
                    None => (400, "[\"absent\"]"),
                };
                format!(
                    "HTTP/1.1 {status} \r\nServer: {name}\r\nContent-Length: {}\r\n\r\n{body}",
                    body.len()
                )
            })
        })
    }

    async fn connect(&self) -> Result<Monitor, Trouble> {
        Monitor::connect(&self.directory.path().join("api")).await
    }

    fn enter(&self, section: &'static str) {
        *self.section.lock().unwrap() = section;
    }

    /// What was asked for since the last call, without what changes nothing.
    fn changes(&self) -> Vec<String> {
        let mut asked = std::mem::take(&mut *self.asked.lock().unwrap());
        asked.retain(|request| !request.starts_with("GET "));
        asked
    }
}

/// A recording: `# ` begins a state of the machine, `> ` a request.
fn sections(text: &str) -> HashMap<String, Section> {
    let (mut sections, mut name) = (HashMap::<String, Section>::new(), "");
    let mut lines = text.lines().peekable();
    while let Some(line) = lines.next() {
        if let Some(section) = line.strip_prefix("# ") {
            name = section;
            continue;
        }
        let request = line.strip_prefix("> ").unwrap();
        let mut answer: Vec<&str> = Vec::new();
        while lines.peek().is_some_and(|line| !line.starts_with("# ") && !line.starts_with("> ")) {
            answer.push(lines.next().unwrap());
        }
        let end = answer.iter().position(|line| line.is_empty()).unwrap();
        let (head, body) = (answer[..end].join("\r\n"), answer[end + 1..].concat());
        let answer = format!("{head}\r\n\r\n{body}");
        sections.entry(name.to_owned()).or_default().insert(request.to_owned(), answer);
    }
    sections
}

async fn next(stream: &mut BufReader<UnixStream>) -> Option<String> {
    let (mut request, mut length) = (String::new(), 0);
    loop {
        let mut line = String::new();
        if stream.read_line(&mut line).await.unwrap_or(0) == 0 {
            return None;
        }
        let line = line.trim_end();
        if let Some(number) = line.to_lowercase().strip_prefix("content-length: ") {
            length = number.parse().unwrap();
        }
        if request.is_empty() {
            line.strip_suffix(" HTTP/1.1").unwrap().clone_into(&mut request);
        }
        if line.is_empty() {
            break;
        }
    }
    let mut body = vec![0; length];
    stream.read_exact(&mut body).await.ok()?;
    if length > 0 {
        request += " ";
        request += std::str::from_utf8(&body).unwrap();
    }
    Some(request)
}

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

/// The documents of a machine, by target.
fn documents(kind: Kind) -> Vec<(&'static str, String)> {
    let (name, section, prefix) = match kind {
        Kind::Firecracker => ("firecracker/plugged.http", "plugged", "GET "),
        _ => ("cloud-hypervisor/machine.http", "inflated", "GET "),
    };
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
    let sections = sections(&std::fs::read_to_string(path).unwrap());
    let mut found = Vec::new();
    for target in ["/", "/machine-config", "/hotplug/memory", "/balloon", "/balloon/statistics"]
        .into_iter()
        .chain(["/api/v1/vm.info"])
    {
        if let Some(answer) = sections[section].get(&format!("{prefix}{target}")) {
            found.push((target, answer.split_once("\r\n\r\n").unwrap().1.to_owned()));
        }
    }
    found
}

/// What a look finds if one of a machine's documents is changed, for each of them.
async fn with_one_changed(
    change: impl Fn(&str) -> String,
) -> Vec<(&'static str, Result<Seen, Trouble>)> {
    let mut tasks = Vec::new();
    for (kind, name) in
        [(Kind::Firecracker, "Firecracker API"), (Kind::CloudHypervisor, "Cloud Hypervisor API")]
    {
        let documents = documents(kind);
        for index in 0..documents.len() {
            let mut documents = documents.clone();
            documents[index].1 = change(&documents[index].1);
            let target = documents[index].0;
            let result = tokio::spawn(async move { exercise(name, &documents).await });
            tasks.push((target, result));
        }
    }
    let mut results = Vec::new();
    for (target, result) in tasks {
        results.push((target, result.await.unwrap()));
    }
    results
}

/// Looks at a machine with these documents, and does things to it, which must end.
async fn exercise(
    name: &'static str,
    documents: &[(&'static str, String)],
) -> Result<Seen, Trouble> {
    let server = Server::canned(name, documents);
    let mut monitor = server.connect().await?;
    let seen = monitor.look(NOW_MS, 2000).await;
    for action in [inflate(SOME), PAUSE, Action::Resume] {
        let _ = act(&mut monitor, action).await;
    }
    seen
}

#[tokio::test]
async fn garbage_is_nonsense() {
    for garbage in ["", "\u{1b}[31m", "{}", "[]", "null", "7", "{\"state\":7}", "[[[["] {
        for (target, result) in with_one_changed(|_| garbage.to_owned()).await {
            // All that is used of this document may be absent.
            let is_document = target == "/balloon" && garbage.starts_with(['{', '[']);
            let is_nonsense = matches!(result, Err(Trouble::Nonsense(_)));
            assert!(is_document || is_nonsense, "{target} {garbage} {result:?}");
        }
    }
    let halved = with_one_changed(|document| document[..document.len() / 2].to_owned()).await;
    for (target, result) in halved {
        assert!(matches!(result, Err(Trouble::Nonsense(_))), "{target} {result:?}");
    }
}

#[tokio::test]
async fn absurd_numbers_do_no_harm() {
    for number in ["18446744073709551615", "-1", "1e300", "0", "18446744073709551616"] {
        let mut seen = 0;
        for (_, result) in with_one_changed(|document| replace_numbers(document, number)).await {
            seen += u32::from(result.is_ok());
            assert!(matches!(result, Ok(_) | Err(Trouble::Nonsense(_))), "{number} {result:?}");
        }
        assert!(seen > 0, "{number}");
    }
}

/// The document with all numbers that are values replaced.
fn replace_numbers(document: &str, number: &str) -> String {
    let mut result = String::new();
    for piece in document.split_inclusive(':') {
        let rest = piece.trim_start_matches(|character: char| character.is_ascii_digit());
        if rest.len() < piece.len() && result.ends_with("\":") {
            result += number;
        }
        result += rest;
    }
    result
}

#[tokio::test]
async fn an_answer_without_end_is_bounded() {
    let endless = format!("[{}", "0,".repeat(1 << 19));
    for (target, result) in with_one_changed(|_| endless.clone()).await {
        assert!(matches!(result, Err(Trouble::Nonsense(_))), "{target} {result:?}");
    }
}
