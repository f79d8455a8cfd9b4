//! Servers that answer with what was recorded, or with anything.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex};

use ebbd::monitors::{Monitor, Trouble};
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{UnixListener, UnixStream};

/// What Cloud Hypervisor answers about a path that it does not have.
const NOT_FOUND: &str = "HTTP/1.1 404 \r\nServer: Cloud Hypervisor API\r\n\
                         Connection: keep-alive\r\nContent-Type: application/json\r\n\
                         Content-Length: 13\r\n\r\n[\"Not Found\"]";
const DONE: &str = "HTTP/1.1 204 \r\nServer: recorded\r\n\r\n";

/// Whole answers by request: method, target and body.
pub type Section = HashMap<String, String>;
/// What a server answers to a request, as its method, target and body.
type Answers = Box<dyn Fn(&str) -> String + Send + Sync>;

/// A server for any number of clients.
pub struct Server {
    directory: TempDir,
    pub asked: Arc<Mutex<Vec<String>>>,
    section: Arc<Mutex<&'static str>>,
}

impl Server {
    pub fn start(
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
    pub fn replay(name: &str, section: &'static str) -> Self {
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
    pub fn canned(name: &'static str, documents: &[(&'static str, String)]) -> Self {
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

    pub async fn connect(&self) -> Result<Monitor, Trouble> {
        Monitor::connect(&self.directory.path().join("api")).await
    }

    pub fn enter(&self, section: &'static str) {
        *self.section.lock().unwrap() = section;
    }

    /// What was asked for since the last call, without what changes nothing.
    pub fn changes(&self) -> Vec<String> {
        let mut asked = std::mem::take(&mut *self.asked.lock().unwrap());
        asked.retain(|request| !request.starts_with("GET "));
        asked
    }
}

/// A recording: `# ` begins a state of the machine, `> ` a request.
pub fn sections(text: &str) -> HashMap<String, Section> {
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

pub async fn next(stream: &mut BufReader<UnixStream>) -> Option<String> {
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
