//! Packets of the guest and for it.

use std::time::Instant;

use super::{ANY_PORT, CLOSE_LIMIT, MOST_RESETS, Muxer};
use crate::devices::virtio::vsock::connection::{Connection, Fate, Phase, Ports};
use crate::devices::virtio::vsock::packet::{HOST_CID, Header, Op, SHUTDOWN_BOTH, TYPE_STREAM};

impl Muxer {
    /// Handles a packet of the guest. `data` has the length in the header.
    pub(in super::super) fn accept_packet(&mut self, header: &Header, data: &[u8], now: Instant) {
        self.counters.packets_from_guest += 1;
        let invalid = &mut self.counters.invalid;
        if header.src_cid != self.guest_cid || header.dst_cid != HOST_CID {
            // An answer would have no receiver.
            invalid.address += 1;
            return;
        }
        if header.kind != TYPE_STREAM {
            invalid.socket_type += 1;
            self.answer_reset(header);
            return;
        }
        let ports = Ports { host: header.dst_port, guest: header.src_port };
        let op = Op::of(header.op);
        if op.is_none() {
            invalid.operation += 1;
        }
        let Some(connection) = self.connections.get_mut(&ports) else {
            match op {
                Some(Op::Request) => self.on_request(ports, header, now),
                Some(Op::Reset) => {}
                _ => self.answer_reset(header),
            }
            return;
        };
        connection.take_credit(header);
        let fate = match (op, connection.phase) {
            (Some(Op::Reset), phase) => {
                let fate = connection.take_reset();
                match phase {
                    Phase::Requested => self.counters.refused_from_host += 1,
                    Phase::Connecting => self.counters.refused_from_guest += 1,
                    // An end that the host has asked for is not one.
                    Phase::Open if connection.has_told_end() => {}
                    Phase::Open => self.counters.resets += 1,
                }
                fate
            }
            (Some(Op::Response), Phase::Requested) => {
                let fate = connection.accepted(ports.host);
                if fate == Fate::Keep {
                    self.counters.accepted_from_host += 1;
                } else {
                    self.counters.refused_from_host += 1;
                }
                self.limit(ports, None);
                fate
            }
            (Some(Op::Data), Phase::Open) if connection.guest_has_finished() => {
                invalid.operation += 1;
                Fate::Reset
            }
            (Some(Op::Data), Phase::Open) if !connection.has_room(data.len()) => {
                invalid.credit += 1;
                Fate::Reset
            }
            (Some(Op::Data), Phase::Open) => {
                self.counters.bytes_from_guest += connection.take_data(data) as u64;
                connection.settle()
            }
            (Some(Op::Shutdown), Phase::Open) => {
                connection.take_shutdown(header.flags);
                connection.settle()
            }
            // The guest no longer waits.
            (Some(Op::Shutdown), Phase::Connecting) if header.flags & SHUTDOWN_BOTH != 0 => {
                self.counters.refused_from_guest += 1;
                Fate::Reset
            }
            (Some(Op::CreditUpdate), Phase::Open | Phase::Requested) => Fate::Keep,
            (Some(Op::CreditRequest), Phase::Open) => {
                connection.credit_requested();
                Fate::Keep
            }
            (op, _) => {
                if op.is_some() {
                    invalid.operation += 1;
                }
                Fate::Reset
            }
        };
        self.end(ports, fate);
        self.enqueue(ports);
    }

    /// The guest connects to a port of the host.
    fn on_request(&mut self, ports: Ports, header: &Header, now: Instant) {
        if [ports.host, ports.guest].contains(&ANY_PORT)
            || self.connections.len() >= self.most_connections
            || self.connector.is_closed()
            || self.connector.backlog() >= 2 * self.most_connections
        {
            self.counters.refused_from_guest += 1;
            self.answer_reset(header);
            return;
        }
        let (serial, buffer) = (self.serial(), self.take_buffer());
        self.insert(ports, Connection::of_guest(serial, buffer, header));
        self.connector.ask((ports, serial));
        self.ask(now);
        self.refuse_without_companion(now);
    }

    /// Answers a packet that has no connection (section 5.10.6.4.1).
    fn answer_reset(&mut self, header: &Header) {
        if header.op == Op::Reset as u16 {
            return;
        }
        self.send_reset(Header {
            src_cid: header.dst_cid,
            dst_cid: header.src_cid,
            src_port: header.dst_port,
            dst_port: header.src_port,
            kind: header.kind,
            op: Op::Reset as u16,
            ..Header::default()
        });
    }

    pub(super) fn send_reset(&mut self, header: Header) {
        if self.resets.len() < MOST_RESETS {
            self.resets.push_back(header);
        } else {
            self.counters.invalid.unanswered += 1;
        }
    }

    /// Whether [`to_guest`](Self::to_guest) may have a packet.
    pub(in super::super) fn has_packets(&self) -> bool {
        !self.resets.is_empty() || !self.line.is_empty()
    }

    /// The next packet for the guest. Its data is in `buffer`, which must not be empty.
    pub(in super::super) fn next_packet(
        &mut self,
        buffer: &mut [u8],
        now: Instant,
    ) -> Option<Header> {
        if let Some(header) = self.resets.pop_front() {
            return Some(header);
        }
        while let Some(ports) = self.line.pop_front() {
            let Some(connection) = self.connections.get_mut(&ports) else { continue };
            connection.is_queued = false;
            let packet = match connection.next_packet(buffer) {
                Ok(Some(packet)) => packet,
                Ok(None) => continue,
                Err(_) => {
                    self.counters.resets += 1;
                    self.end(ports, Fate::Reset);
                    return self.resets.pop_front();
                }
            };
            let (buf_alloc, fwd_cnt) = connection.credit();
            self.counters.bytes_to_guest += packet.len as u64;
            if connection.has_told_end() && connection.stream().is_some() {
                let stream = connection.close();
                self.close_stream(stream);
                self.limit(ports, Some(now + CLOSE_LIMIT));
            }
            self.enqueue(ports);
            return Some(Header {
                src_cid: HOST_CID,
                dst_cid: self.guest_cid,
                src_port: ports.host,
                dst_port: ports.guest,
                len: packet.len as u32,
                kind: TYPE_STREAM,
                op: packet.op as u16,
                flags: packet.flags,
                buf_alloc,
                fwd_cnt,
            });
        }
        None
    }
}
