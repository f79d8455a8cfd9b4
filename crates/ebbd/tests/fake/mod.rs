//! A monitor with the API of this project that answers what a test wants.

use std::io::{Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::thread;

use serde_json::Value;

/// What is answered to a request such as `GET /vm`: a status and a document. `None`: nothing, ever.
pub trait Answers: Fn(&str) -> Option<(u16, Value)> + Send + Sync + 'static {}

impl<T: Fn(&str) -> Option<(u16, Value)> + Send + Sync + 'static> Answers for T {}

/// Serves all clients of a socket until the process ends.
pub fn monitor(path: &Path, answers: impl Answers) {
    let (listener, answers) = (UnixListener::bind(path).unwrap(), Arc::new(answers));
    thread::spawn(move || {
        for stream in listener.incoming() {
            let (mut stream, answers) = (stream.unwrap(), answers.clone());
            thread::spawn(move || while serve(&mut stream, &*answers).is_some() {});
        }
    });
}

fn serve(stream: &mut UnixStream, answers: &impl Answers) -> Option<()> {
    let (mut head, mut byte) = (Vec::new(), [0]);
    while !head.ends_with(b"\r\n\r\n") {
        stream.read_exact(&mut byte).ok()?;
        head.push(byte[0]);
    }
    let head = String::from_utf8_lossy(&head).into_owned().to_lowercase();
    let length = head
        .split_once("content-length: ")
        .map_or(0, |(_, rest)| rest.split("\r\n").next().unwrap().parse().unwrap());
    stream.read_exact(&mut vec![0; length]).ok()?;
    let mut words = head.split([' ', '?']);
    let (method, target) = (words.next()?.to_uppercase(), words.next()?);
    let Some((status, document)) = answers(&format!("{method} {target}")) else {
        // Until the client hangs up.
        let _ = stream.read(&mut byte);
        return None;
    };
    let body = document.to_string();
    let length = body.len();
    let head =
        format!("HTTP/1.1 {status} X\r\nServer: ebb/0 test\r\nContent-Length: {length}\r\n\r\n");
    stream.write_all((head + &body).as_bytes()).ok()?;
    // Clients that ask for one answer wait for the end.
    (target != "/vm/snapshot").then_some(())
}
