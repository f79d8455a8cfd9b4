//! The control queue (virtio 1.3 section 5.1.6.5): the driver confirms that it has announced its
//! addresses.

use std::io::Write as _;

use ebb_guest_ram::GuestMemory;
use virtio_bindings::virtio_net as net;
use virtio_queue::Queue;

use crate::devices::virtio::ring::{Unwritable, pop, publish};

/// Most requests in one call.
const REQUESTS_A_CALL: usize = 16;

/// What was asked.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Answered {
    pub(super) requests: usize,
    /// The driver has announced its addresses.
    pub(super) announced: bool,
    pub(super) more: bool,
}

/// Answers the driver's requests.
pub(super) fn answer(queue: &mut Queue, memory: &GuestMemory) -> Result<Answered, Unwritable> {
    let mut answered = Answered::default();
    if !virtio_queue::QueueT::ready(queue) {
        return Ok(answered);
    }
    for _ in 0..REQUESTS_A_CALL {
        let Some(chain) = pop(queue, memory) else { return Ok(answered) };
        let head = chain.head_index();
        let mut written = 0;
        let reader = chain.clone().reader(memory).ok();
        let request = reader.and_then(|mut reader| reader.read_obj::<[u8; 2]>().ok());
        let announced = request.map(|[class, command]| (u32::from(class), u32::from(command)))
            == Some((net::VIRTIO_NET_CTRL_ANNOUNCE, net::VIRTIO_NET_CTRL_ANNOUNCE_ACK));
        let status = if announced { net::VIRTIO_NET_OK } else { net::VIRTIO_NET_ERR };
        if let Ok(mut writer) = chain.writer(memory)
            && writer.write_all(&[status as u8]).is_ok()
        {
            written = 1;
        }
        publish(queue, memory, &[(head, written)])?;
        answered.announced |= announced;
        answered.requests += 1;
    }
    answered.more = true;
    Ok(answered)
}
