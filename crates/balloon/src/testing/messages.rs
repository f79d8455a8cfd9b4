//! The extension's part of the test driver.

use ebb_abi::balloon::extension::{
    BitmapWriter, Encoding, Header, HostRequest, Layout, Purpose, REQUEST_BYTES, Shape,
    encode_range,
};
use ebb_abi::balloon::{Features, QueueKind};
use ebb_abi::{PageRange, Pfn};
use vm_memory::{Bytes, GuestAddress};

use super::{Buffer, Guest, Setup};
use crate::Progress;

/// A message that names these blocks, which must fit into one.
pub fn message(purpose: Purpose, encoding: Encoding, blocks: &[PageRange]) -> Vec<u8> {
    let shape = Shape::of(blocks.iter().copied());
    let (layout, payload) = match encoding {
        Encoding::Pfns => {
            let pages = blocks.iter().flat_map(|block| block.start.0..block.end().0);
            (
                Layout::Pfns { count: shape.pages as u32 },
                pages.flat_map(|page| (page as u32).to_le_bytes()).collect(),
            )
        }
        Encoding::Ranges => {
            let layout = Layout::Ranges { count: blocks.len() as u32 };
            (layout, blocks.iter().flat_map(|block| encode_range(*block)).collect())
        }
        Encoding::Bitmap => {
            let (start, page_shift) = (Pfn(shape.first_page()), shape.page_shift());
            let bits = shape.bits() as u32;
            let mut bytes = vec![0; bits.div_ceil(8) as usize];
            let mut writer =
                BitmapWriter::new(&mut bytes, start, page_shift, bits).expect("a valid window");
            for block in blocks {
                assert_eq!(writer.set(*block), *block);
            }
            (Layout::Bitmap { start, page_shift, bits }, bytes)
        }
    };
    let header = Header::new(purpose, layout).expect("a valid message");
    [&header.to_bytes()[..], &payload].concat()
}

impl Guest {
    /// A guest whose device offers everything and whose driver accepted these features.
    pub fn with_extension(negotiated: Features) -> Self {
        Self::new(Setup { offered: Features::ALL_WITH_EXTENSION, negotiated, ..Setup::default() })
    }

    /// Sends bytes in one buffer and kicks.
    pub fn send_bytes(&mut self, kind: QueueKind, bytes: &[u8]) -> Progress {
        let buffer = self.buffer(bytes);
        self.send(kind, &[buffer])
    }

    /// Inflates by these blocks in one message.
    pub fn inflate_blocks(&mut self, encoding: Encoding, blocks: &[PageRange]) -> Progress {
        self.send_bytes(QueueKind::Inflate, &message(Purpose::Inflate, encoding, blocks))
    }

    /// Deflates by these blocks in one message.
    pub fn deflate_blocks(&mut self, encoding: Encoding, blocks: &[PageRange]) -> Progress {
        self.send_bytes(QueueKind::Deflate, &message(Purpose::Deflate, encoding, blocks))
    }

    /// Leaves a request buffer with the device; returns it.
    pub fn leave_request_buffer(&mut self) -> Buffer {
        let buffer = Buffer { writable: true, ..self.buffer(&[0xee; REQUEST_BYTES]) };
        let _ = self.send(QueueKind::HostRequest, &[buffer]);
        buffer
    }

    /// The bytes of a buffer.
    pub fn content(&self, buffer: Buffer) -> Vec<u8> {
        let mut bytes = vec![0; buffer.length as usize];
        self.ram
            .memory()
            .read_slice(&mut bytes, GuestAddress(buffer.address))
            .expect("an address in memory");
        bytes
    }

    /// The request in a buffer that the device returned.
    pub fn request_in(&self, buffer: Buffer) -> Option<HostRequest> {
        HostRequest::from_bytes(self.content(buffer).try_into().ok()?).ok()
    }
}
