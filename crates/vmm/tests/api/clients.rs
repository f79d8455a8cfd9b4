//! Clients of all kinds: the monitor's own, pipelining ones, half-closing ones, several at a time.

use std::io::Write as _;
use std::net::Shutdown;
use std::thread;

use ebb_vmm::api::*;
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::double::{MEMORY_BYTES, Mood};
use crate::wire::{Served, read_answer, read_answers, request, serve};

#[test]
fn our_client_reads_every_document() {
    let served = serve(Mood::Willing);
    let client = served.client();
    let info: VmInfo = client.get("/vm").unwrap();
    assert_eq!((info.state, info.cpus, info.memory_bytes), (VmState::Running, 2, MEMORY_BYTES));
    let info: VmInfo = client.put("/vm/pause").unwrap();
    assert_eq!(info.state, VmState::Paused);
    let info: VmInfo = client.put("/vm/resume").unwrap();
    assert_eq!(info.state, VmState::Running);
    let balloon: BalloonInfo =
        client.put_json("/balloon", &json!({ "target_bytes": 1 << 30 })).unwrap();
    assert_eq!((balloon.target_bytes, balloon.state), (1 << 30, BalloonState::Inflating));
    assert_eq!(
        balloon.negotiated_features,
        [
            BalloonFeature::StatisticsQueue,
            BalloonFeature::DeflateOnOom,
            BalloonFeature::PageReporting
        ]
    );
    let balloon: BalloonInfo =
        client.put_json("/balloon/statistics-interval", &json!({ "interval_seconds": 7 })).unwrap();
    assert_eq!(balloon.statistics_interval_seconds, 7);
    assert_eq!(served.vm.state().interval, 7);
    let info: VmInfo = client.put("/vm/kill").unwrap();
    assert_eq!((info.state, served.vm.state().kills), (VmState::Stopping, 1));
}

#[test]
fn refusals_reach_our_client_with_their_reason() {
    let served = serve(Mood::Willing);
    let too_much = json!({ "target_bytes": MEMORY_BYTES + 4096 });
    match served.client().put_json::<BalloonInfo>("/balloon", &too_much) {
        Err(ClientError::Refused { status: 422, detail }) => {
            assert_eq!(detail.field.as_deref(), Some("target_bytes"));
            assert!(detail.message.contains(&(MEMORY_BYTES + 4096).to_string()));
            assert!(detail.remedy.is_some());
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(served.vm.state().target_bytes, 0);
}

#[test]
fn statistics_are_fresh_and_old_ones_only_returned_on_demand() {
    let served = serve(Mood::Willing);
    let first: StatisticsDocument = served.client().get("/balloon/statistics").unwrap();
    assert!(first.age_ms.is_some());
    assert_eq!(first.statistics.free_memory_bytes, Some(1 << 30));
    assert_eq!(first.statistics.oom_kills, Some(0));
    let raw: Value = served.client().get("/balloon/statistics").unwrap();
    assert_eq!(raw["statistics"]["swap_in_bytes"], Value::Null);
    assert_eq!(served.vm.state().requests, 2);
    let _: StatisticsDocument =
        served.client().get("/balloon/statistics?max_age_ms=3600000").unwrap();
    assert_eq!(served.vm.state().requests, 2, "recent values need no request");
    let _: StatisticsDocument = served.client().get("/balloon/statistics?max_age_ms=0").unwrap();
    assert_eq!(served.vm.state().requests, 3, "old values need one");
}

#[test]
fn a_silent_guest_is_a_timeout_with_its_last_statistics() {
    let served = serve(Mood::Willing);
    let _: StatisticsDocument = served.client().get("/balloon/statistics").unwrap();
    served.vm.state().mood = Mood::Silent;
    match served.client().get::<StatisticsDocument>("/balloon/statistics") {
        Err(ClientError::Refused { status: 504, detail }) => {
            let known = detail.last_known.unwrap();
            assert!(known.age_ms.unwrap() >= 1000);
            assert_eq!(known.statistics.free_memory_bytes, Some(1 << 30));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_silent_guest_blocks_no_other_client() {
    let served = serve(Mood::Silent);
    let mut waiting = served.connect();
    waiting.write_all(request("GET", "/balloon/statistics", "").as_bytes()).unwrap();
    served.vm.wait_for_requests(1);
    // If the server stopped to wait for the guest, this guest would never answer and the wait would
    // end in a 504.
    let info: VmInfo = served.client().get("/vm").unwrap();
    assert_eq!(info.state, VmState::Running);
    served.vm.state().deliver();
    assert_eq!(read_answer(&mut waiting).status, 200);
}

#[test]
fn a_client_may_leave_while_the_guest_is_asked() {
    let served = serve(Mood::Silent);
    for round in 1..=20 {
        let mut stream = served.connect();
        stream.write_all(request("GET", "/balloon/statistics", "").as_bytes()).unwrap();
        served.vm.wait_for_requests(round);
    }
    let _: VmInfo = served.client().get("/vm").unwrap();
}

#[test]
fn free_pages_are_named_and_a_silent_request_is_withdrawn() {
    let served = serve(Mood::Willing);
    let report: FreePagesReport = served.client().put("/balloon/free-pages").unwrap();
    assert_eq!((report.status, report.min_order, report.bytes), (RequestStatus::Done, 0, 6 << 20));
    served.vm.state().mood = Mood::Silent;
    let body = json!({ "min_order": 9, "timeout_ms": 20 });
    let report: FreePagesReport = served.client().put_json("/balloon/free-pages", &body).unwrap();
    assert_eq!((report.status, report.min_order), (RequestStatus::Timeout, 9));
    served.vm.wait_for_questions(0);
}

#[test]
fn free_pages_are_reported_on_request() {
    let served = serve(Mood::Willing);
    let report: ReclaimReport = served.client().put("/balloon/reclaim").unwrap();
    assert_eq!((report.status, report.min_order), (RequestStatus::Done, 9));
    let body = json!({ "min_order": 0 });
    let report: ReclaimReport = served.client().put_json("/balloon/reclaim", &body).unwrap();
    assert_eq!(report.min_order, 0);
}

#[test]
fn one_free_page_request_at_a_time_and_leaving_withdraws_it() {
    let served = serve(Mood::Silent);
    let question = request("PUT", "/balloon/free-pages", r#"{"timeout_ms": 60000}"#);
    for round in 1..=5 {
        let mut first = served.connect();
        first.write_all(question.as_bytes()).unwrap();
        served.vm.wait_for_questions(1);
        let info: VmInfo = served.client().get("/vm").unwrap();
        assert_eq!(info.state, VmState::Running, "no other client waits");
        let second = served.ask("PUT", "/balloon/free-pages", "");
        assert_eq!(
            (second.status, second.body.contains("already")),
            (409, true),
            "{}",
            second.body
        );
        drop(first);
        served.vm.wait_for_questions(0);
        assert_eq!(served.vm.state().withdrawn, round);
    }
    // The monitor's end withdraws the request as well.
    let mut stream = served.connect();
    stream.write_all(question.as_bytes()).unwrap();
    served.vm.wait_for_questions(1);
    let Served { vm, server, .. } = served;
    drop(server);
    assert_eq!(read_answer(&mut stream).status, 503);
    vm.wait_for_questions(0);
}

#[test]
fn requests_in_one_packet_are_answered_in_order_on_one_connection() {
    let served = serve(Mood::Willing);
    let text = [
        request("PUT", "/vm/pause", ""),
        request("GET", "/vm", ""),
        request("GET", "/nothing", ""),
        request("GET", "/balloon/statistics", ""),
        request("PUT", "/vm/resume", "{}"),
        "GET /vm HTTP/1.1\r\nConnection: close\r\n\r\n".to_owned(),
        request("PUT", "/vm/kill", ""),
    ]
    .concat();
    let answers = served.exchange(text.as_bytes());
    let statuses: Vec<u16> = answers.iter().map(|answer| answer.status).collect();
    assert_eq!(statuses, [200, 200, 404, 200, 200, 200]);
    assert_eq!(answers[1].json()["state"], "paused");
    assert_eq!(answers[5].json()["state"], "running");
    assert_eq!(answers[5].header("connection"), Some("close"));
    assert_eq!(served.vm.state().kills, 0, "requests after Connection: close are not executed");
}

#[test]
fn a_request_in_single_bytes_is_answered() {
    let served = serve(Mood::Willing);
    let mut stream = served.connect();
    for byte in request("PUT", "/balloon", r#"{"target_bytes": 8192}"#).bytes() {
        stream.write_all(&[byte]).unwrap();
    }
    assert_eq!(read_answer(&mut stream).json()["target_bytes"], 8192);
}

#[test]
fn http_1_0_and_head_are_served() {
    let served = serve(Mood::Willing);
    let mut stream = served.connect();
    stream.write_all(b"GET /vm HTTP/1.0\r\n\r\n").unwrap();
    let answers = read_answers(&mut stream);
    assert_eq!((answers.len(), answers[0].status), (1, 200));
    let mut stream = served.connect();
    stream.write_all(b"HEAD /vm HTTP/1.1\r\n\r\n").unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    let mut text = String::new();
    std::io::Read::read_to_string(&mut stream, &mut text).unwrap();
    assert!(text.starts_with("HTTP/1.1 405 "), "{text}");
    assert!(text.ends_with("\r\n\r\n"), "{text}");
}

#[test]
fn a_body_is_requested_when_the_client_expects_100_continue() {
    let served = serve(Mood::Willing);
    let mut stream = served.connect();
    stream
        .write_all(b"PUT /balloon HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 22\r\n\r\n")
        .unwrap();
    assert_eq!(read_answer(&mut stream).status, 100);
    stream.write_all(b"{\"target_bytes\": 4096}").unwrap();
    assert_eq!(read_answer(&mut stream).json()["target_bytes"], 4096);
}

#[test]
fn several_clients_at_a_time_get_their_own_answers() {
    let served = serve(Mood::Willing);
    thread::scope(|scope| {
        for client in 0..8_u64 {
            let served = &served;
            scope.spawn(move || {
                let mut stream = served.connect();
                for round in 0..50 {
                    let target = (client * 50 + round) * 4096;
                    let body = json!({ "target_bytes": target }).to_string();
                    stream.write_all(request("PUT", "/balloon", &body).as_bytes()).unwrap();
                    assert_eq!(read_answer(&mut stream).json()["target_bytes"], target);
                }
            });
        }
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn any_bytes_are_routed_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        if let Some(Err(status)) = parse_and_route(&bytes) {
            prop_assert!((400..600).contains(&status.code()));
        }
    }

    #[test]
    fn any_nearly_right_request_is_routed_or_refused(
        method in "GET|PUT|[A-Z]{1,5}",
        path in "/vm|/vm/pause|/balloon|/balloon/statistics(-interval)?|/[a-z/?=&%\\PC]{0,30}",
        query in "(\\?(max_age_ms=)?[0-9a-z&=]{0,8})?",
        body in concat!(
            r#"|\{"(target_bytes|interval_seconds|x)": "#,
            r#"?(-?[0-9]{1,25}|"[a-zA-Z0-9]*"|null|\[\]|[0-9]e[0-9]{1,3})\}|\PC{0,40}"#,
        ),
    ) {
        let length = body.len();
        let text =
            format!("{method} {path}{query} HTTP/1.1\r\nContent-Length: {length}\r\n\r\n{body}");
        match parse_and_route(text.as_bytes()) {
            None => prop_assert!(false, "the request is complete"),
            Some(Err(status)) => {
                prop_assert!((400..500).contains(&status.code()) || status.code() == 505);
            }
            Some(Ok(_)) => prop_assert!(method == "GET" || method == "PUT"),
        }
    }
}

#[test]
fn random_bytes_leave_the_server_alive() {
    let served = serve(Mood::Willing);
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(60));
    let noise = proptest::collection::vec(any::<u8>(), 1..2000);
    runner
        .run(&noise, |bytes| {
            for answer in served.exchange(&bytes) {
                prop_assert!(answer.status >= 400);
            }
            Ok(())
        })
        .unwrap();
    let info: VmInfo = served.client().get("/vm").unwrap();
    assert_eq!(info.state, VmState::Running);
}
