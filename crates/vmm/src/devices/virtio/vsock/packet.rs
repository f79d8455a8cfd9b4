//! The header of a packet (virtio 1.3 section 5.10.6).
//!
//! It is decoded here and not by the crate `virtio-vsock`, whose packets have their data in one
//! descriptor: a driver may divide a packet as it likes (section 2.7.4.2), and Linux sends large
//! ones in several descriptors since 6.17. The tests compare both.

/// Size of a header in bytes.
pub(super) const HEADER_BYTES: usize = 44;
/// `VIRTIO_VSOCK_TYPE_STREAM`.
pub(super) const TYPE_STREAM: u16 = 1;
/// CID of the host (section 5.10.4).
pub(super) const HOST_CID: u64 = 2;
/// Flag of [`Op::Shutdown`]: the sender will not receive any more (section 5.10.6.6).
pub(super) const SHUTDOWN_RECEIVE: u32 = 1;
/// Flag of [`Op::Shutdown`]: the sender will not send any more.
pub(super) const SHUTDOWN_SEND: u32 = 2;
/// Both flags.
pub(super) const SHUTDOWN_BOTH: u32 = SHUTDOWN_RECEIVE | SHUTDOWN_SEND;

/// Operations (section 5.10.6).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u16)]
pub(super) enum Op {
    Request = 1,
    Response = 2,
    Reset = 3,
    Shutdown = 4,
    Data = 5,
    CreditUpdate = 6,
    CreditRequest = 7,
}

impl Op {
    /// The operation of this number.
    pub(super) fn of(number: u16) -> Option<Self> {
        Some(match number {
            1 => Self::Request,
            2 => Self::Response,
            3 => Self::Reset,
            4 => Self::Shutdown,
            5 => Self::Data,
            6 => Self::CreditUpdate,
            7 => Self::CreditRequest,
            _ => return None,
        })
    }
}

/// The header; numbers are little-endian in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Header {
    pub src_cid: u64,
    pub dst_cid: u64,
    pub src_port: u32,
    pub dst_port: u32,
    /// Length of the data in bytes.
    pub len: u32,
    /// Type of the socket.
    pub kind: u16,
    /// See [`Op`].
    pub op: u16,
    pub flags: u32,
    /// Size of the sender's buffer in bytes.
    pub buf_alloc: u32,
    /// Bytes that have left the sender's buffer, modulo 2^32.
    pub fwd_cnt: u32,
}

impl Header {
    pub(super) fn from_bytes(bytes: &[u8; HEADER_BYTES]) -> Self {
        Self {
            src_cid: u64::from_le_bytes(part(bytes, 0)),
            dst_cid: u64::from_le_bytes(part(bytes, 8)),
            src_port: u32::from_le_bytes(part(bytes, 16)),
            dst_port: u32::from_le_bytes(part(bytes, 20)),
            len: u32::from_le_bytes(part(bytes, 24)),
            kind: u16::from_le_bytes(part(bytes, 28)),
            op: u16::from_le_bytes(part(bytes, 30)),
            flags: u32::from_le_bytes(part(bytes, 32)),
            buf_alloc: u32::from_le_bytes(part(bytes, 36)),
            fwd_cnt: u32::from_le_bytes(part(bytes, 40)),
        }
    }

    pub(super) fn to_bytes(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        let mut rest = &mut bytes[..];
        let mut put = |part: &[u8]| {
            let (here, after) = std::mem::take(&mut rest).split_at_mut(part.len());
            here.copy_from_slice(part);
            rest = after;
        };
        put(&self.src_cid.to_le_bytes());
        put(&self.dst_cid.to_le_bytes());
        put(&self.src_port.to_le_bytes());
        put(&self.dst_port.to_le_bytes());
        put(&self.len.to_le_bytes());
        put(&self.kind.to_le_bytes());
        put(&self.op.to_le_bytes());
        put(&self.flags.to_le_bytes());
        put(&self.buf_alloc.to_le_bytes());
        put(&self.fwd_cnt.to_le_bytes());
        bytes
    }
}

/// `N` bytes of a header from `start`, which is a constant below its end.
fn part<const N: usize>(bytes: &[u8; HEADER_BYTES], start: usize) -> [u8; N] {
    let mut part = [0; N];
    part.copy_from_slice(&bytes[start..start + N]);
    part
}
