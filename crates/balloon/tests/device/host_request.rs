//! Requests for free pages, and the driver's answers (docs/extension.md).

use std::sync::Arc;

use ebb_abi::balloon::extension::{AnswerStatus, Encoding, HostRequest, Purpose};
use ebb_abi::balloon::{Feature, Features, QueueKind};
use ebb_abi::{Order, PageRange, Pfn};
use ebb_balloon::testing::{Buffer, Guest, Setup, message};
use ebb_balloon::{
    Balloon, BalloonError, BalloonState, GuestError, HintEnd, Progress, RequestBuffer, RequestPhase,
};
use virtio_queue::Queue;

use crate::hinting::Log;

const OFFERED: Features = Features::ALL_WITH_EXTENSION;

/// Features of a driver whose guest does not rely on the content of free pages.
const ALL: Features = OFFERED.without(Feature::PagePoison);
const QUEUE: QueueKind = QueueKind::HostRequest;

fn range(start: u64, pages: u64) -> PageRange {
    PageRange::new(Pfn(start), pages)
}

fn ask(guest: &mut Guest) -> Log {
    let log = Log::default();
    guest.balloon.request_free_pages(Order::PAGE, Box::new(log.clone())).unwrap();
    log
}

/// A guest that was sent a request and has taken it, the request's number, and its sink.
fn asked() -> (Guest, u64, Log) {
    let mut guest = Guest::with_extension(ALL);
    let buffer = guest.leave_request_buffer();
    let log = ask(&mut guest);
    let id = guest.request_in(buffer).unwrap().request_id();
    assert_eq!(guest.used_with_lengths(QUEUE).len(), 1);
    guest.leave_request_buffer();
    (guest, id, log)
}

fn answer(
    guest: &mut Guest,
    request_id: u64,
    status: AnswerStatus,
    blocks: &[PageRange],
) -> Progress {
    let purpose = Purpose::FreePages { request_id, status };
    guest.send_bytes(QUEUE, &message(purpose, Encoding::Ranges, blocks))
}

fn errors(guest: &Guest, error: GuestError) -> u64 {
    guest.balloon.counters().errors.get(error)
}

#[test]
fn a_whole_round() {
    let mut guest = Guest::with_extension(ALL);
    guest.mark(guest.low_pages());
    let buffer = guest.leave_request_buffer();
    assert!(guest.used(QUEUE).is_empty());

    let log = Log::default();
    assert_eq!(guest.balloon.request_free_pages(Order::HUGE, Box::new(log.clone())), Ok(true));
    assert_eq!(guest.balloon.request_phase(), RequestPhase::Sent);
    assert_eq!(guest.used_with_lengths(QUEUE), [(0, 16)]);
    assert_eq!(
        guest.request_in(buffer),
        Some(HostRequest::FreePages { request_id: 1, page_shift: 21 })
    );

    guest.leave_request_buffer();
    assert!(
        answer(&mut guest, 1, AnswerStatus::More, &[range(1024, 512), range(4000, 512)]).interrupt
    );
    assert_eq!(guest.balloon.request_phase(), RequestPhase::Answering);
    let purpose = Purpose::FreePages { request_id: 1, status: AnswerStatus::More };
    let _ = guest.send_bytes(QUEUE, &message(purpose, Encoding::Bitmap, &[range(2048, 512)]));
    let _ = answer(&mut guest, 1, AnswerStatus::Done, &[]);
    assert_eq!(guest.balloon.request_phase(), RequestPhase::Idle);
    // The second range ends beyond the first region.
    assert_eq!((log.hinted_pages(), log.ends()), (512 + 96 + 512, vec![HintEnd::Complete]));
    assert_eq!(guest.used_with_lengths(QUEUE), [(2, 0), (3, 0), (4, 0)]);

    // An answer is not a permission to discard.
    guest.balloon.flush();
    assert!(guest.unmarked(guest.low_pages()).is_empty());
    let counters = guest.balloon.counters();
    assert_eq!((counters.discard.bytes, counters.discard.syscalls), (0, 0));
    assert_eq!((counters.requests.sent, counters.requests.completed), (1, 1));
    assert_eq!(counters.host_request.bytes, (512 + 96 + 512) * 4096);
    assert_eq!(errors(&guest, GuestError::OutsideRam), 1);
}

#[test]
fn a_request_waits_for_a_buffer() {
    let mut guest = Guest::with_extension(ALL);
    let log = Log::default();
    assert_eq!(guest.balloon.request_free_pages(Order::PAGE, Box::new(log.clone())), Ok(false));
    assert_eq!(guest.balloon.request_phase(), RequestPhase::Waiting);
    // A guessed number is not accepted.
    let _ = answer(&mut guest, 1, AnswerStatus::Done, &[range(1024, 1)]);
    assert_eq!((log.hinted_pages(), errors(&guest, GuestError::StaleAnswer)), (0, 1));
    let buffer = guest.leave_request_buffer();
    assert_eq!(
        guest.request_in(buffer),
        Some(HostRequest::FreePages { request_id: 1, page_shift: 12 })
    );
    assert_eq!(guest.balloon.info().free_pages, RequestPhase::Sent);
}

#[test]
fn a_request_cancelled_in_time_is_never_sent() {
    let mut guest = Guest::with_extension(ALL);
    let log = ask(&mut guest);
    assert!(!guest.balloon.cancel_request());
    let buffer = guest.leave_request_buffer();
    assert_eq!(guest.request_in(buffer), None);
    assert_eq!(log.ends(), [HintEnd::Cancelled]);
    assert_eq!(guest.balloon.counters().requests.sent, 0);
}

#[test]
fn numbers_are_never_used_again() {
    let (mut guest, first, _) = asked();
    assert!(guest.balloon.cancel_request());
    guest.balloon.reset();
    guest.activate();
    let buffer = guest.leave_request_buffer();
    ask(&mut guest);
    assert_eq!(guest.request_in(buffer).map(HostRequest::request_id), Some(first + 1));
}

#[test]
fn a_late_answer_is_ignored_and_returned() {
    let (mut guest, first, log) = asked();
    let _ = answer(&mut guest, first, AnswerStatus::More, &[range(1024, 8)]);
    let cancel = guest.balloon.cancel_request();
    assert!(cancel && !guest.balloon.cancel_request());
    let second_log = ask(&mut guest);
    // The driver has not seen the cancellation yet; it has left no buffer for the second request.
    let _ = answer(&mut guest, first, AnswerStatus::More, &[range(2048, 8)]);
    let _ = answer(&mut guest, first, AnswerStatus::Done, &[]);
    assert_eq!((log.hinted_pages(), log.ends()), (8, vec![HintEnd::Cancelled]));
    assert_eq!((second_log.hinted_pages(), second_log.ends().len()), (0, 0));
    assert_eq!(errors(&guest, GuestError::StaleAnswer), 2);

    let buffer = guest.leave_request_buffer();
    assert_eq!(guest.request_in(buffer).map(HostRequest::request_id), Some(first + 1));
    for id in [first, first + 2, u64::MAX] {
        let _ = answer(&mut guest, id, AnswerStatus::Done, &[range(1024, 8)]);
    }
    assert_eq!(guest.balloon.request_phase(), RequestPhase::Sent);
    let _ = answer(&mut guest, first + 1, AnswerStatus::Done, &[range(1024, 4)]);
    assert_eq!((second_log.hinted_pages(), second_log.ends()), (4, vec![HintEnd::Complete]));
    // Nothing follows the end.
    let _ = answer(&mut guest, first + 1, AnswerStatus::Done, &[range(1024, 4)]);
    assert_eq!((second_log.hinted_pages(), errors(&guest, GuestError::StaleAnswer)), (4, 6));
    assert_eq!(guest.used(QUEUE).len(), 1 + 3 + 1 + 5);
}

#[test]
fn a_cancellation_is_sent_to_the_driver() {
    let (mut guest, id, _) = asked();
    guest.balloon.cancel_request();
    // It went into the buffer that the driver had left again; the next one stays with the device.
    let heads = guest.used_with_lengths(QUEUE);
    assert_eq!(heads.iter().map(|(_, length)| *length).collect::<Vec<_>>(), [16]);
    let buffer = guest.leave_request_buffer();
    assert_eq!(guest.request_in(buffer), None);

    // Without a buffer it is sent with the next one, unless the answer is complete by then.
    let log = ask(&mut guest);
    assert_eq!(guest.request_in(buffer).map(HostRequest::request_id), Some(id + 1));
    assert!(!guest.balloon.cancel_request());
    let buffer = guest.leave_request_buffer();
    assert_eq!(guest.request_in(buffer), Some(HostRequest::Cancel { request_id: id + 1 }));

    guest.leave_request_buffer();
    ask(&mut guest);
    guest.balloon.cancel_request();
    let _ = answer(&mut guest, id + 2, AnswerStatus::Aborted, &[]);
    let buffer = guest.leave_request_buffer();
    assert_eq!(guest.request_in(buffer), None);
    assert_eq!(log.ends(), [HintEnd::Cancelled]);
    let requests = guest.balloon.counters().requests;
    assert_eq!((requests.sent, requests.cancelled, requests.aborted), (3, 3, 0));
}

#[test]
fn a_driver_can_abort() {
    let (mut guest, id, log) = asked();
    let _ = answer(&mut guest, id, AnswerStatus::More, &[range(1024, 8)]);
    let _ = answer(&mut guest, id, AnswerStatus::Aborted, &[range(1032, 8)]);
    assert_eq!((log.hinted_pages(), log.ends()), (16, vec![HintEnd::Aborted]));
    assert_eq!(guest.balloon.counters().requests.aborted, 1);
}

#[test]
fn there_is_one_request_at_a_time_and_it_needs_the_feature() {
    let (mut guest, _, _) = asked();
    let refused = guest.balloon.request_free_pages(Order::PAGE, Box::new(Log::default()));
    assert_eq!(refused, Err(BalloonError::RequestActive));
    let mut guest = Guest::with_extension(ALL.without(Feature::HostRequest));
    let refused = guest.balloon.request_free_pages(Order::PAGE, Box::new(Log::default()));
    assert_eq!(refused, Err(BalloonError::NotNegotiated { feature: "HOST_REQUEST_VQ" }));
    assert!(!guest.balloon.cancel_request());
}

#[test]
fn pages_are_reported_on_request() {
    let mut guest = Guest::with_extension(ALL);
    let buffer = guest.leave_request_buffer();
    let log = Log::default();
    assert_eq!(guest.balloon.request_report(Order::HUGE, Box::new(log.clone())), Ok(true));
    let request = HostRequest::Report { request_id: 1, page_shift: 21 };
    assert_eq!(guest.request_in(buffer), Some(request));
    // There is one request at a time, of both kinds.
    let refused = guest.balloon.request_free_pages(Order::PAGE, Box::new(Log::default()));
    assert_eq!(refused, Err(BalloonError::RequestActive));
    // What an answer names is nothing to the host.
    let _ = answer(&mut guest, 1, AnswerStatus::Done, &[range(1024, 512)]);
    assert_eq!((log.hinted_pages(), log.ends()), (0, vec![HintEnd::Complete]));
    assert_eq!(guest.balloon.counters().requests.completed, 1);

    let mut guest = Guest::with_extension(ALL.without(Feature::ReportRequest));
    let refused = guest.balloon.request_report(Order::PAGE, Box::new(Log::default()));
    assert_eq!(refused, Err(BalloonError::NotNegotiated { feature: "REPORT_REQUEST" }));
}

#[test]
fn refused_answers_end_nothing() {
    let (mut guest, id, log) = asked();
    let purpose = Purpose::FreePages { request_id: id, status: AnswerStatus::Done };
    let mut bytes = message(purpose, Encoding::Ranges, &[range(1024, 1)]);
    bytes.push(0);
    let _ = guest.send_bytes(QUEUE, &bytes);
    let _ =
        guest.send_bytes(QUEUE, &message(Purpose::Inflate, Encoding::Ranges, &[range(1024, 1)]));
    assert_eq!(
        (errors(&guest, GuestError::MessageLength), errors(&guest, GuestError::BadMessage)),
        (1, 1)
    );
    assert_eq!((log.hinted_pages(), guest.balloon.request_phase()), (0, RequestPhase::Sent));
    assert_eq!(guest.used(QUEUE).len(), 2);
    let _ = answer(&mut guest, id, AnswerStatus::Done, &[]);
    assert_eq!(log.ends(), [HintEnd::Complete]);
}

#[test]
fn pages_may_be_named_again_and_no_encoding_is_needed() {
    let mut guest = Guest::with_extension(Features::from(Feature::HostRequest));
    let buffer = guest.leave_request_buffer();
    let log = ask(&mut guest);
    assert!(guest.request_in(buffer).is_some());
    let purpose = Purpose::FreePages { request_id: 1, status: AnswerStatus::More };
    for _ in 0..2 {
        let _ = guest.send_bytes(
            QUEUE,
            &message(purpose, Encoding::Pfns, &[range(1024, 3), range(1025, 1)]),
        );
    }
    assert_eq!((log.hinted_pages(), guest.balloon.counters().errors.total()), (6, 0));
    let _ = guest.send_bytes(QUEUE, &message(purpose, Encoding::Bitmap, &[range(1024, 3)]));
    assert_eq!(errors(&guest, GuestError::ForbiddenEncoding), 1);
}

#[test]
fn unusable_request_buffers_are_returned_empty() {
    let mut guest = Guest::with_extension(ALL);
    let short = Buffer { length: 15, address: 0x18_0000, writable: true };
    let outside = Buffer { length: 16, address: 3 << 30, writable: true };
    let across = Buffer { length: 16, address: (16 << 20) - 8, writable: true };
    for buffer in [short, outside, across] {
        let _ = guest.send(QUEUE, &[buffer]);
    }
    assert_eq!(errors(&guest, GuestError::ShortRequestBuffer), 3);
    assert_eq!(guest.used_with_lengths(QUEUE), [(0, 0), (1, 0), (2, 0)]);
    // Many tiny pieces are accepted.
    let pieces =
        (0..16).map(|index| Buffer { length: 1, address: 0x18_0000 + 3 * index, writable: true });
    let pieces: Vec<_> = pieces.collect();
    let _ = guest.send(QUEUE, &pieces);
    ask(&mut guest);
    let bytes: Vec<u8> = pieces.iter().flat_map(|piece| guest.content(*piece)).collect();
    assert_eq!(bytes, HostRequest::FreePages { request_id: 1, page_shift: 12 }.to_bytes());
    assert_eq!(guest.used_with_lengths(QUEUE), [(3, 16)]);
}

#[test]
fn a_second_buffer_takes_the_place_of_the_first() {
    let mut guest = Guest::with_extension(ALL);
    guest.leave_request_buffer();
    let second = guest.leave_request_buffer();
    assert_eq!(guest.used_with_lengths(QUEUE), [(0, 0)]);
    assert_eq!(errors(&guest, GuestError::ExtraRequestBuffer), 1);
    ask(&mut guest);
    assert!(guest.request_in(second).is_some());
}

#[test]
fn a_reset_ends_the_request() {
    let (mut guest, id, log) = asked();
    guest.balloon.reset();
    assert_eq!(
        (log.ends(), guest.balloon.request_phase()),
        (vec![HintEnd::Reset], RequestPhase::Idle)
    );
    guest.activate();
    let _ = answer(&mut guest, id, AnswerStatus::Done, &[range(1024, 1)]);
    assert_eq!((log.hinted_pages(), errors(&guest, GuestError::StaleAnswer)), (0, 1));
    // The buffer of the former driver is not written to.
    ask(&mut guest);
    assert_eq!(guest.balloon.request_phase(), RequestPhase::Waiting);
    assert_eq!(guest.used(QUEUE).len(), 1);
}

#[test]
fn free_pages_of_a_guest_that_relies_on_their_content_are_not_passed_on() {
    // A pattern, or the zeros of Linux's init_on_free.
    for poison_value in [0xaa_u32, 0] {
        let mut guest = Guest::with_extension(OFFERED);
        guest.balloon.write_config(12, &poison_value.to_le_bytes());
        guest.leave_request_buffer();
        let log = ask(&mut guest);
        let _ = answer(&mut guest, 1, AnswerStatus::Done, &[range(1024, 8)]);
        assert_eq!((log.hinted_pages(), log.ends()), (0, vec![HintEnd::Complete]));
        let counters = guest.balloon.counters();
        assert_eq!(
            (counters.host_request.bytes, counters.requests.poisoned_bytes),
            (8 * 4096, 8 * 4096)
        );
    }
}

#[test]
fn a_large_answer_is_processed_in_steps_and_can_be_cancelled_between_them() {
    let region_bytes = 512 << 20;
    let mut guest =
        Guest::new(Setup { offered: OFFERED, negotiated: ALL, region_bytes, ..Setup::default() });
    guest.leave_request_buffer();
    let log = ask(&mut guest);
    let purpose = Purpose::FreePages { request_id: 1, status: AnswerStatus::Done };
    let buffer = guest.buffer(&message(purpose, Encoding::Ranges, &[guest.high_pages()]));
    guest.offer(QUEUE, &[buffer]);
    let index = guest.index(QUEUE);
    guest.used(QUEUE);
    let progress = guest.balloon.process_queue(index);
    assert!(progress.more && !progress.interrupt);
    let first_step = log.hinted_pages();
    assert_eq!(first_step, 64 << 10);

    guest.balloon.cancel_request();
    assert_eq!(log.ends(), [HintEnd::Cancelled]);
    while guest.balloon.process_queue(index).more {}
    assert_eq!((log.hinted_pages(), errors(&guest, GuestError::StaleAnswer)), (first_step, 1));
    assert_eq!(guest.used(QUEUE).len(), 1);
}

fn restored(guest: &mut Guest, state: &BalloonState) -> Result<Balloon, BalloonError> {
    let queues =
        guest.balloon.queue_states().into_iter().map(|state| Queue::try_from(state).unwrap());
    Balloon::restore(state, Arc::clone(&guest.ram), queues.collect())
}

#[test]
fn a_snapshot_keeps_the_buffer_and_the_number_and_not_the_request() {
    let (mut guest, id, log) = asked();
    let text = serde_json::to_string(&guest.balloon.save()).unwrap();
    let state: BalloonState = serde_json::from_str(&text).unwrap();
    let mut copy = restored(&mut guest, &state).unwrap();
    assert_eq!(copy.request_phase(), RequestPhase::Idle);

    // The saved device continues the request.
    let _ = answer(&mut guest, id, AnswerStatus::Done, &[range(1024, 8)]);
    assert_eq!((log.hinted_pages(), log.ends()), (8, vec![HintEnd::Complete]));
    // For the restored device the answer is stale, and the next request goes into the left buffer.
    let index = guest.index(QUEUE);
    let _ = copy.process_queue(index);
    assert_eq!(copy.counters().errors.get(GuestError::StaleAnswer), 1);
    let other = Log::default();
    assert!(copy.request_free_pages(Order::PAGE, Box::new(other)).is_ok());
    assert_eq!(copy.request_phase(), RequestPhase::Sent);
    assert_eq!(copy.save().last_request_id, id + 1);
}

#[test]
fn a_state_of_the_first_version_is_restored() {
    let mut guest = Guest::with_all_features();
    let mut json = serde_json::to_value(guest.balloon.save()).unwrap();
    let fields = json.as_object_mut().unwrap();
    fields.remove("last_request_id").unwrap();
    fields.remove("request_buffer").unwrap();
    fields.insert("version".to_owned(), 1.into());
    let state: BalloonState = serde_json::from_value(json).unwrap();
    let copy = restored(&mut guest, &state).unwrap();
    assert_eq!(copy.negotiated(), Features::ALL_BALLOON);
}

#[test]
fn a_state_with_an_impossible_buffer_is_refused() {
    let mut guest = Guest::with_extension(ALL);
    let state = guest.balloon.save();
    let good = RequestBuffer { head: 0, pieces: vec![(0x18_0000, 16)] };
    assert!(
        restored(&mut guest, &BalloonState { request_buffer: Some(good.clone()), ..state.clone() })
            .is_ok()
    );
    let bad = [
        RequestBuffer { head: 128, ..good.clone() },
        RequestBuffer { pieces: vec![(0x18_0000, 15)], ..good.clone() },
        RequestBuffer { pieces: vec![(3 << 30, 16)], ..good.clone() },
        RequestBuffer { pieces: vec![(u64::MAX, 16)], ..good.clone() },
        RequestBuffer { pieces: vec![(0x18_0000, 0); 1000], ..good.clone() },
    ];
    for buffer in bad {
        let state = BalloonState { request_buffer: Some(buffer), ..state.clone() };
        assert!(restored(&mut guest, &state).is_err(), "{state:?}");
    }
    assert!(
        restored(&mut guest, &BalloonState { last_request_id: u64::MAX, ..state.clone() }).is_err()
    );
    let state = BalloonState { request_buffer: Some(good), negotiated: Some(0x3f), ..state };
    assert!(restored(&mut guest, &state).is_err());
}
