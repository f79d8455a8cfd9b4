//! Random steps of both ends of a connection: what goes in comes out.

use proptest::prelude::*;

use super::*;

/// Steps of the two ends of a connection.
#[derive(Debug, Clone, Copy)]
enum Step {
    HostWrites(u16),
    HostReads(u16),
    GuestSends(u16),
    GuestReads(u16),
    GuestUpdates,
    GuestAsks,
    GuestReceives,
    Events,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        any::<u16>().prop_map(Step::HostWrites),
        any::<u16>().prop_map(Step::HostReads),
        any::<u16>().prop_map(Step::GuestSends),
        any::<u16>().prop_map(Step::GuestReads),
        Just(Step::GuestUpdates),
        Just(Step::GuestAsks),
        Just(Step::GuestReceives),
        Just(Step::Events),
    ]
}

/// The guest's end of a connection that obeys the rules.
struct Guest {
    buf_alloc: u32,
    /// Received and not read yet, in bytes.
    buffered: u32,
    fwd_cnt: u32,
    sent: u32,
    host_alloc: u32,
    host_fwd: u32,
}

/// The byte at a position of a stream.
fn byte(position: usize) -> u8 {
    (position * 7 + (position >> 8) * 3) as u8
}

fn bytes(from: usize, count: usize) -> Vec<u8> {
    (from..from + count).map(byte).collect()
}

struct Streams {
    bench: Bench,
    server: UnixStream,
    guest: Guest,
    to_guest: (usize, usize),
    to_host: (usize, usize),
    host_ended: bool,
}

impl Streams {
    fn new(buf_alloc: u32) -> Self {
        let mut bench = Bench::new();
        let request = Header { op: Op::Request as u16, buf_alloc, ..header(80, 9) };
        bench.send_with(request, &[]);
        let (_, server) = bench.host.serve().unwrap();
        bench.events();
        let (response, _) = bench.receive().unwrap();
        let guest = Guest {
            buf_alloc,
            buffered: 0,
            fwd_cnt: 0,
            sent: 0,
            host_alloc: response.buf_alloc,
            host_fwd: response.fwd_cnt,
        };
        Self { bench, server, guest, to_guest: (0, 0), to_host: (0, 0), host_ended: false }
    }

    fn send(&mut self, op: Op, flags: u32, data: &[u8]) {
        let Guest { buf_alloc, fwd_cnt, .. } = self.guest;
        let header = Header { op: op as u16, flags, buf_alloc, fwd_cnt, ..header(80, 9) };
        self.bench.send_with(header, data);
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::HostWrites(count) => {
                let data = bytes(self.to_guest.0, usize::from(count));
                if let Ok(written) = (&self.server).write(&data) {
                    self.to_guest.0 += written;
                }
            }
            Step::HostReads(count) => {
                let mut data = vec![0; usize::from(count)];
                if let Ok(read) = (&self.server).read(&mut data) {
                    assert_eq!(data[..read], bytes(self.to_host.1, read));
                    self.to_host.1 += read;
                }
            }
            Step::GuestSends(count) => {
                let in_flight = self.guest.sent.wrapping_sub(self.guest.host_fwd);
                let room = self.guest.host_alloc - in_flight;
                let count = u32::from(count).min(room) as usize;
                let data = bytes(self.to_host.0, count);
                self.to_host.0 += count;
                self.guest.sent = self.guest.sent.wrapping_add(count as u32);
                self.send(Op::Data, 0, &data);
            }
            Step::GuestReads(count) => {
                let count = u32::from(count).min(self.guest.buffered);
                self.guest.buffered -= count;
                self.guest.fwd_cnt = self.guest.fwd_cnt.wrapping_add(count);
            }
            Step::GuestUpdates => self.send(Op::CreditUpdate, 0, &[]),
            Step::GuestAsks => self.send(Op::CreditRequest, 0, &[]),
            Step::GuestReceives => {
                let Some((header, data)) = self.bench.receive() else { return };
                (self.guest.host_alloc, self.guest.host_fwd) = (header.buf_alloc, header.fwd_cnt);
                match Op::of(header.op).unwrap() {
                    Op::Data => {
                        assert_eq!(data, bytes(self.to_guest.1, data.len()));
                        self.to_guest.1 += data.len();
                        self.guest.buffered += data.len() as u32;
                        assert!(self.guest.buffered <= self.guest.buf_alloc, "more than credit");
                        assert!(!self.host_ended && !data.is_empty());
                    }
                    Op::CreditRequest => self.step(Step::GuestUpdates),
                    Op::CreditUpdate => {}
                    Op::Shutdown => self.host_ended = true,
                    other => panic!("{other:?}"),
                }
            }
            Step::Events => self.bench.events(),
        }
    }

    /// Everything until nothing is left.
    fn finish(&mut self) {
        self.server.shutdown(Shutdown::Write).unwrap();
        for _ in 0..2000 + (self.to_guest.0 - self.to_guest.1) {
            let all = [
                Step::Events,
                Step::GuestReceives,
                Step::GuestReads(u16::MAX),
                Step::GuestUpdates,
                Step::HostReads(u16::MAX),
            ];
            for step in all {
                self.step(step);
            }
            if self.host_ended && self.to_host.0 == self.to_host.1 {
                break;
            }
        }
        assert_eq!(self.to_guest.0, self.to_guest.1);
        assert_eq!(self.to_host.0, self.to_host.1);
        self.send(Op::Shutdown, SHUTDOWN_BOTH, &[]);
        while let Some((header, _)) = self.bench.receive() {
            if header.op == Op::Reset as u16 {
                assert!(is_closed(&self.server));
                assert_eq!(self.bench.muxer.len(), 0);
                return;
            }
        }
        panic!("the guest gets no answer to its end");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn what_goes_in_comes_out(
        buf_alloc in prop_oneof![50..500_u32, Just(4096), Just(1 << 18), Just(1 << 30)],
        steps in prop::collection::vec(step(), 0..200),
    ) {
        let mut streams = Streams::new(buf_alloc);
        for step in steps {
            streams.step(step);
        }
        streams.finish();
    }
}
