//! Announcements of a guest's address: switches and neighbours learn where it is now.

use std::time::{Duration, Instant};

use crate::config::MacAddress;

/// Length of the frames: the smallest of Ethernet, in bytes.
const FRAME_BYTES: usize = 60;
const BROADCAST: [u8; 6] = [0xff; 6];
const ETHERTYPE_ARP: u16 = 0x0806;
const ETHERTYPE_RARP: u16 = 0x8035;
const ARP_REQUEST: u16 = 1;
const RARP_REQUEST: u16 = 3;
/// Number of announcements, and times between them: an early one may be lost while a switch learns
/// of a link (as QEMU's defaults).
const ROUNDS: u32 = 5;
const FIRST_WAIT: Duration = Duration::from_millis(50);
const LONGER: Duration = Duration::from_millis(100);

/// An address resolution packet of `mac` behind an Ethernet header (RFC 826, RFC 903). IPv4
/// addresses are unknown: zero.
fn packet(mac: MacAddress, ethertype: u16, operation: u16, target: [u8; 6]) -> [u8; FRAME_BYTES] {
    let mac = mac.bytes();
    let parts: [&[u8]; 11] = [
        &BROADCAST,
        &mac,
        &ethertype.to_be_bytes(),
        // Ethernet, IPv4, lengths of their addresses.
        &[0, 1, 8, 0, 6, 4],
        &operation.to_be_bytes(),
        &mac,
        &[0; 4],
        &target,
        // No address of a network begins with 0, so that the question matches none.
        &[0, 0, 0, u8::from(ethertype == ETHERTYPE_ARP)],
        &[0; 16],
        &[0; 2],
    ];
    let mut frame = [0; FRAME_BYTES];
    for (to, from) in frame.iter_mut().zip(parts.concat()) {
        *to = from;
    }
    frame
}

/// The reverse request with which a host announces a guest's address to switches; nothing answers
/// it (QEMU `announce_self_create`).
pub(super) fn announcement(mac: MacAddress) -> [u8; FRAME_BYTES] {
    packet(mac, ETHERTYPE_RARP, RARP_REQUEST, mac.bytes())
}

/// A question for an IPv4 address, which passt answers whatever the address is.
pub(super) fn probe(mac: MacAddress) -> [u8; FRAME_BYTES] {
    packet(mac, ETHERTYPE_ARP, ARP_REQUEST, [0; 6])
}

/// Announcements that are still to be made.
#[derive(Debug, Default)]
pub(super) struct Schedule {
    next: Option<Instant>,
    done: u32,
}

impl Schedule {
    /// Starts a series, with the first one at once.
    pub(super) fn start(&mut self, now: Instant) {
        *self = Self { next: Some(now), done: 0 };
    }

    /// Ends the series.
    pub(super) fn end(&mut self) {
        self.next = None;
    }

    /// Time of the next one.
    pub(super) fn next(&self) -> Option<Instant> {
        self.next
    }

    /// Whether one is due; it counts as made.
    pub(super) fn take_due(&mut self, now: Instant) -> bool {
        if self.next.is_none_or(|next| next > now) {
            return false;
        }
        let wait = FIRST_WAIT + LONGER * self.done;
        self.done += 1;
        self.next = (self.done < ROUNDS).then_some(now + wait);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_announcement_is_a_reverse_request() {
        let mac: MacAddress = "02:00:00:00:00:07".parse().unwrap();
        let frame = announcement(mac);
        assert_eq!(frame[..14], [255, 255, 255, 255, 255, 255, 2, 0, 0, 0, 0, 7, 0x80, 0x35]);
        assert_eq!(frame[14..22], [0, 1, 8, 0, 6, 4, 0, 3]);
        assert_eq!((&frame[22..28], &frame[32..38]), (&mac.bytes()[..], &mac.bytes()[..]));
    }

    #[test]
    fn a_series_has_five() {
        let mut schedule = Schedule::default();
        let mut now = Instant::now();
        assert!(!schedule.take_due(now));
        schedule.start(now);
        let mut made = 0;
        while let Some(next) = schedule.next() {
            assert!(next >= now);
            now = next;
            assert!(schedule.take_due(now) && !schedule.take_due(now));
            made += 1;
        }
        assert_eq!(made, 5);
    }
}
