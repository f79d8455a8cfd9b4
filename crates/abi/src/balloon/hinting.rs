//! Command identifiers of free page hinting (virtio 1.3 section 5.5.6.5).

/// Size of a command identifier on the free page hinting queue, in bytes.
pub const COMMAND_ID_BYTES: usize = 4;

/// A command identifier as it appears in the configuration space and, from the driver, on the
/// hinting queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HintCommand {
    /// Hinting must stop, or has stopped; the driver keeps the hinted pages.
    Stop,
    /// The device has finished; the driver may reuse the hinted pages.
    Done,
    /// Hinting is requested, or running, under this identifier, which is at least 2.
    Start(u32),
}

impl HintCommand {
    /// `VIRTIO_BALLOON_CMD_ID_STOP`.
    pub const STOP_ID: u32 = 0;
    /// `VIRTIO_BALLOON_CMD_ID_DONE`.
    pub const DONE_ID: u32 = 1;
    /// The smallest identifier of a start command.
    pub const FIRST_START_ID: u32 = 2;

    /// Decodes an identifier.
    pub const fn from_id(id: u32) -> Self {
        match id {
            Self::STOP_ID => Self::Stop,
            Self::DONE_ID => Self::Done,
            start => Self::Start(start),
        }
    }

    /// The identifier on the wire.
    pub const fn id(self) -> u32 {
        match self {
            Self::Stop => Self::STOP_ID,
            Self::Done => Self::DONE_ID,
            Self::Start(start) => start,
        }
    }

    /// The start command that follows the identifier `previous`; the identifiers wrap and skip 0
    /// and 1.
    #[must_use]
    pub const fn start_after(previous: u32) -> Self {
        match previous.wrapping_add(1) {
            Self::STOP_ID | Self::DONE_ID => Self::Start(Self::FIRST_START_ID),
            next => Self::Start(next),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn start_identifiers_skip_the_reserved_ones() {
        assert_eq!(HintCommand::start_after(0), HintCommand::Start(2));
        assert_eq!(HintCommand::start_after(2), HintCommand::Start(3));
        assert_eq!(HintCommand::start_after(u32::MAX), HintCommand::Start(2));
    }

    #[test]
    fn identifiers_survive_decoding() {
        for id in [0, 1, 2, 3, u32::MAX] {
            assert_eq!(HintCommand::from_id(id).id(), id);
        }
        assert_eq!(HintCommand::from_id(0), HintCommand::Stop);
        assert_eq!(HintCommand::from_id(1), HintCommand::Done);
    }
}
