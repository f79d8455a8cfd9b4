//! A hostile guest: any frames to the service, some of them almost valid, at any times.

use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use serde_json::json;

use super::super::{DEFAULT_ADDRESS, Metadata, Served, Sessions};
use super::wire::MOST_FRAMES;
use super::{ANSWERS_BYTES, ETHERNET_BYTES, MOST_CONNECTIONS, Stack};
use crate::fuzzing::Input;

/// Longest document of the service here, in bytes.
const DOCUMENT_BYTES: usize = 8192;
/// Most steps of one run.
const STEPS: usize = 256;

const REQUESTS: [&str; 8] = [
    "GET / HTTP/1.1\r\n\r\n",
    "GET /large HTTP/1.0\r\nAccept: application/json\r\n\r\n",
    "PUT /latest/api/token HTTP/1.1\r\nX-metadata-token-ttl-seconds: 60\r\n\r\n",
    "GET /a HTTP/1.1\r\nX-metadata-token: 00\r\n\r\nGET",
    "PATCH / HTTP/1.1\r\nContent-Length: 4294967295\r\n\r\n",
    "\n\n\n\n\r\n\r\n\r\n",
    "GET  HTTP/1.1 HTTP/1.1\r\n:\r\n\r\n",
    "GET /a HTTP/1.1\r\nA: ",
];

/// A packet of TCP from the guest; its checksums are not looked at.
pub(super) fn segment(
    (port, to): (u16, u16),
    (sequence, acknowledged): (u32, u32),
    flags: u8,
    options: &[u8],
    payload: &[u8],
) -> Vec<u8> {
    let header = 20 + options.len();
    let total = (20 + header + payload.len()) as u16;
    let mut frame = vec![2; 12];
    frame.extend([0x08, 0x00, 0x45, 0]);
    frame.extend(total.to_be_bytes());
    frame.extend([0, 0, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 2]);
    frame.extend(DEFAULT_ADDRESS.octets());
    frame.extend([port.to_be_bytes(), to.to_be_bytes()].concat());
    frame.extend([sequence.to_be_bytes(), acknowledged.to_be_bytes()].concat());
    frame.extend([(header as u8 / 4) << 4, flags, 0x7f, 0xff, 0, 0, 0, 0]);
    frame.extend(options);
    frame.extend(payload);
    frame
}

/// Sequence and acknowledgement numbers of a frame of TCP, and the number of its payload's bytes.
pub(super) fn numbers(frame: &[u8]) -> Option<(u32, u32, usize)> {
    let number = |at: usize| Some(u32::from_be_bytes(*frame.get(at..)?.first_chunk()?));
    let header = usize::from(*frame.get(46)? >> 4) * 4;
    let total = usize::from(u16::from_be_bytes(*frame.get(16..)?.first_chunk()?));
    Some((number(38)?, number(42)?, total.checked_sub(20 + header)?))
}

/// Any frames at any times: the stack does not panic, and what it keeps stays within its bounds.
///
/// # Panics
/// If it is not so.
pub fn fuzz_frames(data: &[u8]) {
    let mut input = Input::new(data);
    let service = Metadata::new(DOCUMENT_BYTES);
    let document = json!({"a": "b", "large": "x".repeat(DOCUMENT_BYTES / 2)});
    #[expect(clippy::unwrap_used, reason = "it is smaller than the store")]
    service.lock().store.put(document).unwrap();
    if input.rarely() {
        service.lock().sessions = Sessions::Required;
    }
    let mut now = Instant::now();
    let served = Served { service, address: DEFAULT_ADDRESS };
    let mtu = [None, Some(68), Some(576), Some(u16::MAX)][input.below(4)];
    let mut stack = Stack::new(served, mtu, now);
    // What the stack has sent last, so that some segments fit.
    let (mut sequence, mut acknowledged) = (1_u32, 0_u32);
    for _ in 0..STEPS {
        if input.is_empty() {
            break;
        }
        let frame = match input.below(8) {
            0 => input.take(80).to_vec(),
            1 => arp(&mut input),
            2 => {
                now += Duration::from_millis(u64::from(input.byte()) * 50);
                stack.run(now);
                continue;
            }
            _ => {
                let payload = match input.below(4) {
                    0 => input.take(20).to_vec(),
                    1 => vec![b'x'; usize::from(input.byte()) * 300],
                    _ => REQUESTS[input.below(REQUESTS.len())].as_bytes().to_vec(),
                };
                let options: &[u8] = match input.below(8) {
                    0 => &[2, 4, 0, 0, 3, 3, 255, 1],
                    1 => &[2, 4, 0x05, 0xb4, 3, 3, 14, 1],
                    2 => &[8, 10, 0, 0, 0, 0, 0, 0, 0, 0, 4, 2],
                    3 => &[5, 255, 0, 0],
                    _ => &[],
                };
                let flags = match input.below(8) {
                    0 => input.byte(),
                    1 | 2 => 0x02,
                    3 => 0x11,
                    _ => 0x18,
                };
                let shift = if input.rarely() { u32::from(input.byte()) << 20 } else { 0 };
                let ports =
                    (1000 + u16::from(input.byte() % 40), if input.rarely() { 81 } else { 80 });
                let place = (sequence.wrapping_add(shift), acknowledged);
                let mut frame = segment(ports, place, flags, options, &payload);
                for _ in 0..input.below(3) {
                    let at = input.below(frame.len().min(80));
                    frame[at] = input.byte();
                }
                frame
            }
        };
        if stack.takes(&frame) || input.rarely() {
            stack.receive(&frame, now);
        }
        check(&stack);
        for _ in 0..input.below(8) {
            let Some(frame) = stack.frame() else { break };
            if let Some((from, to, length)) = numbers(frame) {
                (sequence, acknowledged) = (to, from.wrapping_add(length.max(1) as u32));
            }
            stack.skip();
        }
    }
    // Without a guest that answers, all connections end.
    for _ in 0..200 {
        while stack.frame().is_some() {
            stack.skip();
        }
        now += Duration::from_secs(1);
        stack.run(now);
        check(&stack);
    }
    assert_eq!(stack.answers_bytes, 0);
    assert!(stack.connections.iter().all(|connection| connection.deadline().is_none()));
}

fn check(stack: &Stack) {
    assert!(stack.wire.output.len() <= MOST_FRAMES);
    let longest = ETHERNET_BYTES + usize::from(stack.mtu.max(576));
    assert!(stack.wire.output.iter().all(|frame| frame.len() <= longest));
    assert!(stack.answers_bytes <= ANSWERS_BYTES + 2 * DOCUMENT_BYTES);
    assert_eq!(stack.sockets.iter().count(), MOST_CONNECTIONS);
    let total: usize = stack.connections.iter().map(|connection| connection.answer.len()).sum();
    assert_eq!(total, stack.answers_bytes);
    stack.deadline();
}

fn arp(input: &mut Input<'_>) -> Vec<u8> {
    let mut frame = vec![2; 12];
    frame.extend([0x08, 0x06, 0, 1, 8, 0, 6, 4, 0, 1]);
    frame.extend([2; 6]);
    frame.extend(Ipv4Addr::new(10, 0, 0, 2).octets());
    frame.extend([0; 6]);
    frame.extend(DEFAULT_ADDRESS.octets());
    let at = input.below(frame.len());
    if input.rarely() {
        frame[at] = input.byte();
    }
    frame
}
