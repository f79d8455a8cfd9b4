//! File descriptors that come with a request.

use std::io::{IoSlice, Read as _, Write as _};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::net::UnixStream;

use ebb_vmm::api::http::MAX_BODY_BYTES;
use ebb_vmm::api::{ClientError, MAX_DESCRIPTORS, SnapshotReport, VmInfo};
use proptest::prelude::*;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use serde_json::json;

use crate::double::Mood;
use crate::wire::{read_answer, read_answers, request, serve};

fn send(stream: &UnixStream, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(200))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    assert!(descriptors.is_empty() || ancillary.push(SendAncillaryMessage::ScmRights(descriptors)));
    let bytes = [IoSlice::new(bytes)];
    rustix::net::sendmsg(stream, &bytes, &mut ancillary, SendFlags::NOSIGNAL).unwrap();
}

fn pipe() -> (std::io::PipeReader, std::io::PipeWriter) {
    std::io::pipe().unwrap()
}

/// Returns once all copies of the pipe's other end are closed.
fn wait_until_closed(mut reader: std::io::PipeReader) {
    assert_eq!(reader.read(&mut [0]).unwrap(), 0);
}

fn snapshot() -> String {
    request("PUT", "/vm/snapshot", r#"{"path": "/x"}"#)
}

#[test]
fn our_client_sends_descriptors_that_are_closed_afterwards() {
    let served = serve(Mood::Willing);
    let (reader, writer) = pipe();
    let descriptors = [writer.as_fd(); MAX_DESCRIPTORS];
    let body = json!({ "path": "/x" });
    let _: SnapshotReport =
        served.client().put_json_with("/vm/snapshot", &body, &descriptors).unwrap();
    assert_eq!(served.vm.state().descriptors, Some(MAX_DESCRIPTORS));
    let _: SnapshotReport = served.client().put_json("/vm/snapshot", &body).unwrap();
    assert_eq!(served.vm.state().descriptors, Some(0));
    drop(writer);
    wait_until_closed(reader);
}

#[test]
fn an_operation_without_descriptors_refuses_them() {
    let served = serve(Mood::Willing);
    let (reader, writer) = pipe();
    match served.client().put_json_with::<VmInfo>("/vm/pause", &json!({}), &[writer.as_fd()]) {
        Err(ClientError::Refused { status: 400, .. }) => {}
        other => panic!("{other:?}"),
    }
    let mut stream = served.connect();
    send(&stream, request("PUT", "/vm/pause", "").as_bytes(), &[writer.as_fd(); 2]);
    let answer = read_answer(&mut stream);
    assert_eq!(answer.status, 400);
    assert!(answer.message().contains("/vm/pause takes no file descriptors, and 2 came"));
    assert_eq!(served.vm.state().descriptors, None);
    // The connection remains usable, and its next request has none.
    stream.write_all(snapshot().as_bytes()).unwrap();
    assert_eq!(read_answer(&mut stream).status, 200);
    assert_eq!(served.vm.state().descriptors, Some(0));
    drop(writer);
    wait_until_closed(reader);
}

#[test]
fn too_many_descriptors_are_refused_in_one_message_and_in_several() {
    for counts in [&[MAX_DESCRIPTORS + 1][..], &[200], &[MAX_DESCRIPTORS, 1], &[9, 9, 9]] {
        let served = serve(Mood::Willing);
        let (reader, writer) = pipe();
        let mut stream = served.connect();
        let text = snapshot();
        for (byte, count) in text.as_bytes().iter().zip(counts) {
            send(&stream, &[*byte], &vec![writer.as_fd(); *count]);
        }
        drop(writer);
        // Bytes that follow are not a request.
        let _ = stream.write_all(request("PUT", "/vm/kill", "").as_bytes());
        let answers = read_answers(&mut stream);
        assert_eq!(answers.len(), 1, "{counts:?}");
        assert_eq!(answers[0].status, 400, "{counts:?}");
        assert!(answers[0].message().contains(&format!("at most {MAX_DESCRIPTORS}")));
        assert_eq!(served.vm.state().kills, 0);
        wait_until_closed(reader);
    }
}

#[test]
fn descriptors_of_a_refused_or_abandoned_request_are_closed() {
    let served = serve(Mood::Willing);
    let (reader, writer) = pipe();
    // A client that hangs up in the middle.
    let stream = served.connect();
    send(&stream, b"PUT /vm/snap", &[writer.as_fd()]);
    drop(stream);
    // One whose request is malformed, and one that goes on sending after a refusal.
    let mut malformed = served.connect();
    send(&malformed, b"\0\0 nonsense\r\n\r\n", &[writer.as_fd()]);
    assert_eq!(read_answer(&mut malformed).status, 400);
    let mut lingering = served.connect();
    let head = format!("PUT /balloon HTTP/1.1\r\nContent-Length: {}\r\n\r\n", MAX_BODY_BYTES + 1);
    send(&lingering, head.as_bytes(), &[writer.as_fd()]);
    assert_eq!(read_answer(&mut lingering).status, 413);
    send(&lingering, b"more", &[writer.as_fd()]);
    drop(writer);
    wait_until_closed(reader);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// However the request is divided, all descriptors reach its operation.
    #[test]
    fn descriptors_may_come_with_any_part_of_a_request(
        pieces in proptest::collection::vec((1_usize..40, 0_usize..6), 1..8),
    ) {
        let served = serve(Mood::Willing);
        let (reader, writer) = pipe();
        let mut stream = served.connect();
        let text = snapshot();
        let mut rest = text.as_bytes();
        let mut sent = 0;
        for (length, count) in pieces {
            let piece = rest.split_off(..length.min(rest.len())).unwrap();
            let count = count.min(MAX_DESCRIPTORS - sent);
            if piece.is_empty() {
                break;
            }
            send(&stream, piece, &vec![writer.as_fd(); count]);
            sent += count;
        }
        if !rest.is_empty() {
            send(&stream, rest, &[]);
        }
        stream.shutdown(Shutdown::Write).unwrap();
        let answers = read_answers(&mut stream);
        prop_assert_eq!(answers.len(), 1);
        prop_assert_eq!(answers[0].status, 200);
        prop_assert_eq!(served.vm.state().descriptors, Some(sent));
        drop(writer);
        wait_until_closed(reader);
    }
}
