//! Slow, greedy and misbehaving clients.

use std::io::Write as _;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use ebb_vmm::api::http::{MAX_BODY_BYTES, MAX_HEAD_BYTES};
use ebb_vmm::api::server::Limits;
use ebb_vmm::api::{ClientError, VmInfo};
use rustix::event::{PollFd, PollFlags, Timespec};

use crate::double::Mood;
use crate::wire::{Served, read_answer, read_answers, request, serve, serve_with};

const SHORT: Duration = Duration::from_millis(50);

fn alive(served: &Served) {
    let _: VmInfo = served.client().get("/vm").unwrap();
}

#[test]
fn an_incomplete_request_is_refused_after_a_time_limit() {
    let served = serve_with(Mood::Willing, Limits { request: SHORT, ..Limits::default() });
    for start in ["GET /vm HT", "PUT /balloon HTTP/1.1\r\nContent-Length: 10\r\n\r\n{"] {
        let mut stream = served.connect();
        stream.write_all(start.as_bytes()).unwrap();
        let answers = read_answers(&mut stream);
        assert_eq!(answers.len(), 1);
        assert_eq!(answers[0].status, 408, "{start}");
        assert!(answers[0].message().contains("50 ms"));
    }
}

#[test]
fn an_idle_connection_is_closed_after_a_time_limit() {
    let served = serve_with(Mood::Willing, Limits { idle: SHORT, ..Limits::default() });
    let mut fresh = served.connect();
    assert!(read_answers(&mut fresh).is_empty());
    let mut used = served.connect();
    used.write_all(request("GET", "/vm", "").as_bytes()).unwrap();
    assert_eq!(read_answers(&mut used).len(), 1);
}

/// Fills both directions of a connection: the client sends requests and reads no reply.
fn stuff(stream: &mut UnixStream) {
    stream.set_nonblocking(true).unwrap();
    let text = request("GET", "/openapi.json", "").repeat(20);
    // The socket takes some hundred kilobytes at most.
    for _ in 0..10_000 {
        if stream.write_all(text.as_bytes()).is_err() {
            return;
        }
    }
    panic!("the server takes any number of requests from a client that reads no replies");
}

#[test]
fn a_client_that_reads_nothing_blocks_no_other_and_is_dropped() {
    let served = serve_with(Mood::Willing, Limits { reply: SHORT, ..Limits::default() });
    let mut stuck = served.connect();
    stuff(&mut stuck);
    alive(&served);
    let mut hang_up = [PollFd::new(&stuck, PollFlags::empty())];
    let patience = Timespec { tv_sec: 30, tv_nsec: 0 };
    assert_eq!(rustix::event::poll(&mut hang_up, Some(&patience)), Ok(1), "it is never dropped");
    assert!(hang_up[0].revents().contains(PollFlags::HUP));
    alive(&served);
}

#[test]
fn excess_clients_replace_only_idle_ones() {
    let served = serve_with(Mood::Willing, Limits { connections: 3, ..Limits::default() });
    let mut idle: Vec<_> = (0..3)
        .map(|_| {
            let mut stream = served.connect();
            stream.write_all(request("GET", "/vm", "").as_bytes()).unwrap();
            assert_eq!(read_answer(&mut stream).status, 200);
            stream
        })
        .collect();
    alive(&served);
    assert!(read_answers(&mut idle[0]).is_empty(), "the connection idle longest is closed");
    idle[1].write_all(request("GET", "/vm", "").as_bytes()).unwrap();
    assert_eq!(read_answer(&mut idle[1]).status, 200);
}

#[test]
fn the_next_client_is_refused_when_all_connections_are_busy() {
    let served = serve_with(Mood::Silent, Limits { connections: 2, ..Limits::default() });
    let mut busy: Vec<_> = (1..=2)
        .map(|count| {
            let mut stream = served.connect();
            stream.write_all(request("GET", "/balloon/statistics", "").as_bytes()).unwrap();
            served.vm.wait_for_requests(count);
            stream
        })
        .collect();
    match served.client().get::<VmInfo>("/vm") {
        Err(ClientError::Refused { status: 503, detail }) => {
            assert!(detail.message.contains("all 2"));
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(read_answer(&mut busy[0]).status, 504);
    assert_eq!(read_answer(&mut busy[1]).status, 504);
    alive(&served);
}

#[test]
fn oversized_requests_are_refused_while_they_are_sent() {
    let served = serve(Mood::Willing);
    let body = "x".repeat(MAX_BODY_BYTES + 1);
    let answer = served.ask("PUT", "/balloon", &body);
    assert_eq!(answer.status, 413);
    assert!(answer.message().contains(&body.len().to_string()));
    let huge = "x".repeat(2 << 20);
    match served.client().request("PUT", "/balloon", &huge) {
        Err(ClientError::Refused { status: 413, .. }) => {}
        other => panic!("{other:?}"),
    }
    let text = format!("GET /{} HTTP/1.1\r\n\r\n", "a".repeat(MAX_HEAD_BYTES));
    assert_eq!(served.exchange(text.as_bytes())[0].status, 431);
    let text = format!("GET /vm HTTP/1.1\r\n{}\r\n", "A: b\r\n".repeat(100));
    assert_eq!(served.exchange(text.as_bytes())[0].status, 431);
    alive(&served);
}

#[test]
fn nothing_after_malformed_bytes_is_executed() {
    let served = serve(Mood::Willing);
    for start in [
        "\r\n\0 nonsense\r\n\r\n",
        "PUT /vm/pause HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        "PUT /vm/pause HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ] {
        let answers =
            served.exchange(format!("{start}{}", request("PUT", "/vm/kill", "")).as_bytes());
        assert_eq!(answers.len(), 1, "{start:?}");
        assert!((400..500).contains(&answers[0].status), "{start:?}");
        assert_eq!(answers[0].header("connection"), Some("close"));
    }
    assert_eq!(served.vm.state().kills, 0);
}

#[test]
fn a_truncated_request_is_not_executed() {
    let served = serve(Mood::Willing);
    let text = request("PUT", "/vm/kill", "{}");
    for length in 0..text.len() {
        assert!(served.exchange(&text.as_bytes()[..length]).is_empty(), "{length}");
    }
    assert_eq!(served.vm.state().kills, 0);
}
