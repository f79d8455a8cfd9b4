//! Contents of replies (libvirt src/remote/remote_protocol.x; the names of values are in its
//! documentation of `virConnectGetAllDomainStats`).

use ebb_host_policy::Statistics;
use serde::{Deserialize, Serialize};

use super::super::Trouble;
use super::xdr::{Reader, put_text};

const KIB: u64 = 1024;

/// A domain while it is active: another one, and the same when it is started again, differ from it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Domain {
    /// Its UUID, in the usual notation.
    pub uuid: String,
    /// The number of this start.
    pub id: i32,
}

/// A domain in messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Named {
    /// Its name: any text.
    pub name: String,
    /// Its UUID.
    pub uuid: [u8; 16],
    /// The number of this start; -1 if it is not active.
    pub id: i32,
}

impl Named {
    /// Reads one.
    ///
    /// # Errors
    /// The message ends before.
    pub fn read(reader: &mut Reader<'_>) -> Result<Self, Trouble> {
        Ok(Self { name: reader.text()?, uuid: reader.array()?, id: reader.i32()? })
    }

    /// Writes it.
    pub fn put(&self, message: &mut Vec<u8>) {
        put_text(message, &self.name);
        message.extend(self.uuid);
        message.extend(self.id.to_be_bytes());
    }

    /// What identifies it.
    pub fn domain(&self) -> Domain {
        let digits = format!("{:032x}", u128::from_be_bytes(self.uuid));
        let parts = [0..8, 8..12, 12..16, 16..20, 20..32].map(|part| &digits[part]);
        Domain { uuid: parts.join("-"), id: self.id }
    }
}

impl Domain {
    /// The bytes of the UUID; `None` if it is none.
    pub fn uuid_bytes(&self) -> Option<[u8; 16]> {
        let digits: String = self.uuid.chars().filter(|it| *it != '-').collect();
        let number = u128::from_str_radix(&digits, 16).ok()?;
        (digits.len() == 32).then(|| number.to_be_bytes())
    }
}

/// The domains in the reply to a request for all.
///
/// # Errors
/// It is no list.
pub fn domains(content: &[u8]) -> Result<Vec<Named>, Trouble> {
    Reader::new(content).list(Named::read)
}

/// State and memory of a domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stats {
    /// Its state, and why (`virDomainState` of include/libvirt/libvirt-domain.h).
    pub state: (u64, u64),
    /// All memory, in bytes.
    pub maximum_bytes: u64,
    /// What the balloon leaves, in bytes.
    pub current_bytes: u64,
    /// When the guest has answered last: the real-time clock in seconds. 0 if it never did.
    pub last_update: u64,
    /// Whether QEMU was asked: without waiting it is not while another job runs.
    pub is_whole: bool,
    said: Statistics,
}

impl Stats {
    /// Reads a reply; `None` if the domain has gone.
    ///
    /// # Errors
    /// It is no reply of this kind, or lacks the state or sizes.
    pub fn read(content: &[u8]) -> Result<Option<Self>, Trouble> {
        let mut reader = Reader::new(content);
        if reader.u32()? == 0 {
            return Ok(None);
        }
        Named::read(&mut reader)?;
        let mut said = Statistics {
            taken_ms: 0,
            total_bytes: None,
            available_bytes: None,
            free_bytes: None,
            caches_bytes: None,
            major_faults: None,
            swap_out_bytes: None,
            oom_kills: None,
        };
        let (mut last_update, mut is_whole) = (0, false);
        let (mut state, mut reason, mut sizes) = (None, None, (None, None));
        for (name, value) in reader.list(parameter)? {
            let bytes = value.and_then(|kib| kib.checked_mul(KIB));
            match name.as_str() {
                "state.state" => state = value,
                "state.reason" => reason = value,
                "balloon.maximum" => sizes.0 = bytes,
                "balloon.current" => sizes.1 = bytes,
                // Of QEMU's process; it is there whenever QEMU was asked.
                "balloon.rss" => is_whole = true,
                "balloon.last-update" => last_update = value.unwrap_or(0),
                // libvirt's names are not those of the device: this is the whole memory.
                "balloon.available" => said.total_bytes = bytes,
                "balloon.usable" => said.available_bytes = bytes,
                "balloon.unused" => said.free_bytes = bytes,
                "balloon.disk_caches" => said.caches_bytes = bytes,
                "balloon.major_fault" => said.major_faults = value,
                "balloon.swap_out" => said.swap_out_bytes = bytes,
                _ => {}
            }
        }
        let lacks = || Trouble::Nonsense("statistics without state or sizes".to_owned());
        let ((Some(maximum), Some(current)), Some(state), Some(reason)) = (sizes, state, reason)
        else {
            return Err(lacks());
        };
        Ok(Some(Self {
            state: (state, reason),
            maximum_bytes: maximum,
            current_bytes: current.min(maximum),
            last_update,
            is_whole,
            said,
        }))
    }

    /// The size of the balloon.
    pub fn inflated_bytes(&self) -> u64 {
        self.maximum_bytes - self.current_bytes
    }

    /// What the guest has said, at a moment of the snapshot's clock.
    pub fn taken(&self, taken_ms: u64) -> Statistics {
        Statistics { taken_ms, ..self.said }
    }
}

/// A typed parameter; `None` for what is not a number that is at least 0.
fn parameter(reader: &mut Reader<'_>) -> Result<(String, Option<u64>), Trouble> {
    let name = reader.text()?;
    let value = match reader.u32()? {
        1 => u64::try_from(reader.i32()?).ok(),
        2 | 6 => Some(reader.u32()?.into()),
        3 => i64::from_be_bytes(reader.array()?).try_into().ok(),
        4 => Some(reader.u64()?),
        5 => reader.u64().map(|_| None)?,
        7 => reader.text().map(|_| None)?,
        kind => return Err(Trouble::Nonsense(format!("a parameter of type {kind}"))),
    };
    Ok((name, value))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A reply about one domain.
    fn reply(parameters: &[(&str, u32, u64)]) -> Vec<u8> {
        let mut content = vec![0, 0, 0, 1];
        let named = Named { name: "guest".to_owned(), uuid: [7; 16], id: 1 };
        named.put(&mut content);
        content.extend((parameters.len() as u32).to_be_bytes());
        for (name, kind, value) in parameters {
            put_text(&mut content, name);
            content.extend(kind.to_be_bytes());
            let bytes = value.to_be_bytes();
            content.extend(if *kind < 3 { &bytes[4..] } else { &bytes[..] });
        }
        content
    }

    const SIZES: [(&str, u32, u64); 4] = [
        ("state.state", 1, 1),
        ("state.reason", 1, 1),
        ("balloon.maximum", 4, 262_144),
        ("balloon.current", 4, 204_800),
    ];

    #[test]
    fn libvirts_names_are_not_the_devices() {
        let more = [
            ("balloon.available", 4, 166_288),
            ("balloon.usable", 4, 142_604),
            ("balloon.unused", 4, u64::MAX),
            ("balloon.last-update", 4, 5),
            ("balloon.rss", 4, 1),
        ];
        let stats = Stats::read(&reply(&[&SIZES[..], &more].concat())).unwrap().unwrap();
        assert_eq!((stats.last_update, stats.is_whole), (5, true));
        assert_eq!(stats.inflated_bytes(), (262_144 - 204_800) * KIB);
        let said = stats.taken(9);
        assert_eq!(
            (said.total_bytes, said.available_bytes),
            (Some(170_278_912), Some(146_026_496))
        );
        // More than there can be.
        assert_eq!((said.free_bytes, said.caches_bytes, said.taken_ms), (None, None, 9));
    }

    #[test]
    fn what_lacks_is_told() {
        let stats = Stats::read(&reply(&SIZES)).unwrap().unwrap();
        assert_eq!((stats.last_update, stats.is_whole), (0, false));
        assert_eq!(Stats::read(&[0; 4]).unwrap(), None);
        assert!(Stats::read(&reply(&SIZES[..3])).is_err());
        assert!(Stats::read(&reply(&[("x", 9, 0)])).is_err());
        let whole = reply(&SIZES);
        for length in 0..whole.len() {
            assert!(Stats::read(&whole[..length]).is_err(), "{length}");
        }
        // More balloon than memory.
        let absurd = [&SIZES[..3], &[("balloon.current", 4, 1 << 40)]].concat();
        assert_eq!(Stats::read(&reply(&absurd)).unwrap().unwrap().inflated_bytes(), 0);
    }
}
