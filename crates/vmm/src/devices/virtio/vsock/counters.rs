//! Counters of the device, for metrics.

/// Counters since the monitor started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct VsockCounters {
    /// Connections of host clients that the guest accepted.
    pub accepted_from_host: u64,
    /// Connections of the guest that a host socket accepted.
    pub accepted_from_guest: u64,
    /// Connections of host clients that were refused: by the guest, for a wrong first line, or for
    /// lack of room.
    pub refused_from_host: u64,
    /// Connections of the guest that were refused.
    pub refused_from_guest: u64,
    /// Open connections that one side ended with a reset, and that a time limit ended.
    pub resets: u64,
    /// Data for the guest in bytes.
    pub bytes_to_guest: u64,
    /// Data from the guest that the host's sockets have taken, in bytes.
    pub bytes_from_guest: u64,
    /// Packets of the guest.
    pub packets_from_guest: u64,
    /// Packets and buffers of the guest that are invalid.
    pub invalid: InvalidPackets,
}

/// Invalid packets and buffers of the guest, by kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct InvalidPackets {
    /// A chain without room for a header, outside of memory, or with an indirect table.
    pub chain: u64,
    /// More data than the chain has or than the largest packet.
    pub length: u64,
    /// Another sender than the guest, or another receiver than the host.
    pub address: u64,
    /// Another type than a stream.
    pub socket_type: u64,
    /// An operation that does not exist, or at the wrong time.
    pub operation: u64,
    /// More data than there was credit for.
    pub credit: u64,
    /// Answers to invalid packets that were dropped because the guest did not take them.
    pub unanswered: u64,
}

impl InvalidPackets {
    /// Names and values.
    pub fn kinds(&self) -> [(&'static str, u64); 7] {
        [
            ("chain", self.chain),
            ("length", self.length),
            ("address", self.address),
            ("type", self.socket_type),
            ("operation", self.operation),
            ("credit", self.credit),
            ("unanswered", self.unanswered),
        ]
    }
}
