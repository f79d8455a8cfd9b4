//! Requests to a driver on rings in real memory; the device is the machine's own.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use ebb_abi::balloon::extension::{AnswerStatus, Encoding, HostRequest, Purpose};
use ebb_abi::balloon::{Feature, Features, QueueKind};
use ebb_abi::{PageRange, Pfn};
use ebb_balloon::testing::{Buffer, Guest, Setup, message};

use super::*;
use crate::config::BalloonDeviceConfig;
use crate::devices::interrupt::InterruptLine;
use crate::devices::virtio::VirtioDevice as _;
use crate::devices::virtio::balloon::BalloonDevice;
use crate::devices::virtio::mmio::{MmioTransport, Wires};

const ALL: Features = Features::ALL_WITH_EXTENSION.without(Feature::PagePoison);

struct Machine {
    guest: Guest,
    transport: SharedTransport,
    interrupts: Arc<AtomicU64>,
}

impl Machine {
    fn new(negotiated: Features) -> Self {
        let setup = Setup { offered: Features::ALL_WITH_EXTENSION, negotiated, ..Setup::default() };
        let mut guest = Guest::new(setup);
        let mut device =
            BalloonDevice::new(&BalloonDeviceConfig::default(), guest.ram.clone()).unwrap();
        device.activate(negotiated.0, guest.fresh_queues()).unwrap();
        let (line, interrupts) = InterruptLine::counted();
        let wires = Wires::new(6, line).unwrap();
        let transport = MmioTransport::new(device, guest.ram.memory().clone(), wires);
        Self { guest, transport: Arc::new(Mutex::new(transport)), interrupts }
    }

    fn kick(&self, kind: QueueKind) {
        let index = self.guest.index(kind);
        while lock(&self.transport).device_mut().process_queue(index).more {}
    }

    fn leave_buffer(&mut self) -> Buffer {
        let buffer = Buffer { writable: true, ..self.guest.buffer(&[0xee; 16]) };
        self.guest.offer(QueueKind::HostRequest, &[buffer]);
        self.kick(QueueKind::HostRequest);
        buffer
    }

    fn ask(&self, min_order: u8) -> Result<Question, ControlError> {
        Question::ask(
            Wish::Names(FreePagesRequest { min_order, ..FreePagesRequest::default() }),
            &self.transport,
            &self.guest.ram,
        )
    }

    fn answer(&mut self, request_id: u64, status: AnswerStatus, blocks: &[PageRange]) {
        let purpose = Purpose::FreePages { request_id, status };
        let buffer = self.guest.buffer(&message(purpose, Encoding::Ranges, blocks));
        self.guest.offer(QueueKind::HostRequest, &[buffer]);
        self.kick(QueueKind::HostRequest);
    }

    fn interrupts(&self) -> u64 {
        self.interrupts.swap(0, Ordering::SeqCst)
    }
}

fn refusal(result: Result<Question, ControlError>) -> String {
    match result.map(|_| ()) {
        Err(ControlError::WrongState { message, remedy: Some(_) }) => message,
        other => panic!("{other:?}"),
    }
}

/// The answer in a document.
fn named(document: Option<Document>) -> Option<FreePagesReport> {
    document.map(|document| match document {
        Document::FreePages(report) => report,
        other => panic!("{other:?}"),
    })
}

#[test]
fn free_pages_named_by_the_guest_are_reported() {
    let mut machine = Machine::new(ALL);
    let buffer = machine.leave_buffer();
    let question = machine.ask(9).unwrap();
    assert_eq!(machine.interrupts(), 1);
    let request = HostRequest::FreePages { request_id: 1, page_shift: 21 };
    assert_eq!(machine.guest.request_in(buffer), Some(request));
    assert_eq!(named(question.report()), None);
    machine.answer(1, AnswerStatus::More, &[PageRange::new(Pfn(1024), 1024)]);
    assert_eq!(named(question.report()), None);
    machine.answer(
        1,
        AnswerStatus::Done,
        &[PageRange::new(Pfn(2048), 512), PageRange::new(Pfn(1024), 512)],
    );
    let report = named(question.report()).unwrap();
    assert_eq!((report.request_id, report.status, report.min_order), (1, RequestStatus::Done, 9));
    assert_eq!((report.bytes, report.ranges, report.largest_range_bytes), (6 << 20, 1, 6 << 20));
    let block =
        |order, block_bytes| FreeBlocks { order, block_bytes, blocks: 1, bytes: block_bytes };
    assert_eq!(report.by_order, [block(9, 2 << 20), block(10, 4 << 20)]);
    assert_eq!((report.blocks, report.memory_bytes), (2, machine.guest.ram.size_bytes()));
    assert_eq!((report.messages, report.encodings.ranges, report.message_bytes), (2, 2, 48 + 64));
    // The guest has reported no statistics to compare with.
    assert_eq!((report.free_memory_bytes, report.coverage_percent), (None, None));
}

#[test]
fn it_is_compared_with_the_statistics() {
    let mut machine = Machine::new(ALL);
    // Tag 4, free memory (virtio 1.3 section 5.5.6.3), 8 MiB.
    let statistics = machine.guest.buffer(&[4, 0, 0, 0, 0x80, 0, 0, 0, 0, 0]);
    machine.guest.offer(QueueKind::Statistics, &[statistics]);
    machine.kick(QueueKind::Statistics);
    machine.leave_buffer();
    let question = machine.ask(0).unwrap();
    assert_eq!(machine.guest.used(QueueKind::Statistics).len(), 1, "they are requested as well");
    machine.guest.offer(QueueKind::Statistics, &[statistics]);
    machine.kick(QueueKind::Statistics);
    machine.answer(1, AnswerStatus::Aborted, &[PageRange::new(Pfn(1024), 512)]);
    let report = named(question.report()).unwrap();
    assert_eq!((report.status, report.bytes), (RequestStatus::Aborted, 2 << 20));
    assert_eq!((report.free_memory_bytes, report.coverage_percent), (Some(8 << 20), Some(25.0)));
    assert!(report.free_memory_age_ms.is_some());
}

#[test]
fn a_late_answer_is_withdrawn() {
    let mut machine = Machine::new(ALL);
    machine.leave_buffer();
    let question = machine.ask(0).unwrap();
    let next = machine.leave_buffer();
    machine.answer(1, AnswerStatus::More, &[PageRange::new(Pfn(1024), 8)]);
    let report = named(Some(question.give_up())).unwrap();
    assert_eq!((report.status, report.bytes), (RequestStatus::Timeout, 8 * 4096));
    assert_eq!(machine.guest.request_in(next), Some(HostRequest::Cancel { request_id: 1 }));
    machine.answer(1, AnswerStatus::Done, &[PageRange::new(Pfn(2048), 8)]);
    assert_eq!(named(question.report()).map(|report| report.bytes), Some(8 * 4096));
    // It has ended: dropping it withdraws nothing of the next one.
    let other = machine.ask(0).unwrap();
    drop(question);
    machine.leave_buffer();
    machine.answer(2, AnswerStatus::Done, &[]);
    assert_eq!(named(other.report()).map(|report| report.status), Some(RequestStatus::Done));
}

#[test]
fn one_request_at_a_time_and_dropping_it_withdraws_it() {
    let mut machine = Machine::new(ALL);
    machine.leave_buffer();
    let question = machine.ask(0).unwrap();
    assert!(refusal(machine.ask(0)).contains("already"));
    let next = machine.leave_buffer();
    drop(question);
    assert_eq!(machine.guest.request_in(next), Some(HostRequest::Cancel { request_id: 1 }));
    let question = machine.ask(0).unwrap();
    lock(&machine.transport).device_mut().reset();
    assert_eq!(named(question.report()).map(|report| report.status), Some(RequestStatus::Reset));
}

#[test]
fn a_driver_without_host_requests_is_not_asked() {
    let machine = Machine::new(Features::ALL_BALLOON);
    assert!(refusal(machine.ask(0)).contains("has not negotiated host requests"));
    lock(&machine.transport).device_mut().reset();
    refusal(machine.ask(0));
}

#[test]
fn reported_memory_is_at_the_host_before_the_answer() {
    let mut machine = Machine::new(ALL);
    let buffer = machine.leave_buffer();
    let wish = Wish::Reports(ReclaimRequest::default());
    let question = Question::ask(wish, &machine.transport, &machine.guest.ram).unwrap();
    let request = HostRequest::Report { request_id: 1, page_shift: 21 };
    assert_eq!(machine.guest.request_in(buffer), Some(request));
    machine.guest.mark(PageRange::new(Pfn(1024), 1024));
    let block = Buffer { address: Pfn(1024).address(), length: 2 << 20, writable: true };
    machine.guest.offer(QueueKind::Reporting, &[block]);
    machine.kick(QueueKind::Reporting);
    assert!(question.report().is_none());
    // Pages in the answer are not looked at.
    machine.answer(1, AnswerStatus::Done, &[PageRange::new(Pfn(1536), 512)]);
    let Some(Document::Reclaim(report)) = question.report() else { panic!("no answer") };
    assert_eq!((report.request_id, report.status, report.min_order), (1, RequestStatus::Done, 9));
    assert_eq!(report.reported_bytes, 2 << 20);
    assert!(machine.guest.unmarked(PageRange::new(Pfn(1024), 1024)).len() == 512);
}

#[test]
fn a_driver_that_cannot_report_on_request_is_not_asked() {
    let machine = Machine::new(ALL.without(Feature::ReportRequest));
    let wish = Wish::Reports(ReclaimRequest::default());
    let asked = Question::ask(wish, &machine.transport, &machine.guest.ram);
    assert!(refusal(asked).contains("report its free pages on request"));
    assert!(machine.ask(0).is_ok());
}
