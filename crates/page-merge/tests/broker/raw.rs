//! The raw protocol, for hostile clients.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use ebb_guest_ram::StableSlot;
use ebb_page_merge::PageHash;

use crate::support::{LONG, PAGE};

pub const PREAMBLE: &[u8; 16] = b"EBB-SPM\n\x01\0\x01\0\0\0\0\0";
pub const INTRODUCTION: &[u8; 16] = b"EBB-SPM\n\x01\0\x03\0\0\0\0\0";
pub const ANY: u32 = u32::MAX;

pub const WELCOME: u8 = 65;
pub const REFUSED: u8 = 66;
pub const SEGMENT: u8 = 67;
pub const ANSWERS: u8 = 69;
pub const SLOTS: u8 = 70;
pub const NOTIFICATIONS: u8 = 72;

pub fn frame(kind: u8, body: &[u8]) -> Vec<u8> {
    let mut frame = (body.len() as u32).to_le_bytes().to_vec();
    frame.push(kind);
    frame.extend(body);
    frame
}

pub fn hello(domain: &str) -> Vec<u8> {
    frame(1, format!(r#"{{"domain":"{domain}","placement":"across"}}"#).as_bytes())
}

pub fn query(node: u32, hashes: &[PageHash]) -> Vec<u8> {
    let mut body = node.to_le_bytes().to_vec();
    body.extend(hashes.iter().flat_map(|hash| hash.get().to_le_bytes()));
    frame(2, &body)
}

pub fn publish(node: u32, contents: &[u8]) -> Vec<u8> {
    assert!(contents.len().is_multiple_of(PAGE));
    frame(3, &[&node.to_le_bytes(), contents].concat())
}

/// 1 shared, 2 released, 3 unused, 4 retired.
pub fn change(change: u8, slot: StableSlot) -> Vec<u8> {
    let mut body = vec![change];
    body.extend(slot.segment.to_le_bytes());
    body.extend(slot.index.to_le_bytes());
    frame(4, &body)
}

pub fn ask_notifications() -> Vec<u8> {
    frame(5, &[])
}

/// A connection without a client behind it.
pub struct Raw(pub UnixStream);

impl Raw {
    pub fn connect(path: &Path) -> Self {
        let stream = UnixStream::connect(path).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        stream.set_write_timeout(Some(LONG)).unwrap();
        Self(stream)
    }

    /// A client of a domain.
    pub fn join(path: &Path, domain: &str) -> Self {
        let mut raw = Self::connect(path);
        raw.send(&[PREAMBLE.to_vec(), hello(domain)].concat());
        assert_eq!(raw.reply().unwrap().0, WELCOME);
        raw
    }

    pub fn send(&mut self, bytes: &[u8]) {
        self.0.write_all(bytes).unwrap();
    }

    /// The next message; `None` at the end.
    pub fn reply(&mut self) -> Option<(u8, Vec<u8>)> {
        let mut header = [0; 5];
        self.0.read_exact(&mut header).ok()?;
        let length = u32::from_le_bytes([header[0], header[1], header[2], header[3]]);
        let mut body = vec![0; length as usize];
        self.0.read_exact(&mut body).ok()?;
        Some((header[4], body))
    }

    /// The next message other than announcements.
    pub fn answer(&mut self) -> Option<(u8, Vec<u8>)> {
        loop {
            let reply = self.reply()?;
            if reply.0 != SEGMENT {
                return Some(reply);
            }
        }
    }

    /// The slots of an answer to a publication.
    pub fn slots(&mut self) -> Vec<StableSlot> {
        let (kind, body) = self.answer().unwrap();
        assert_eq!(kind, SLOTS);
        let number = |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().unwrap());
        body.chunks_exact(8)
            .map(|slot| StableSlot { segment: number(&slot[..4]), index: number(&slot[4..]) })
            .collect()
    }

    /// The reason why the broker refuses this connection, which has ended.
    pub fn refusal(mut self) -> String {
        let (kind, body) = self.answer().expect("a reason");
        assert_eq!(kind, REFUSED, "{:?}", String::from_utf8_lossy(&body));
        assert!(self.reply().is_none(), "it continues");
        String::from_utf8(body).unwrap()
    }
}
