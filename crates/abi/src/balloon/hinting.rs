//! Command identifiers of free page hinting (virtio 1.3 section 5.5.6.4).

/// Size of a command identifier on the free page hinting queue, in bytes.
pub const COMMAND_ID_BYTES: usize = 4;

/// A command identifier as it appears in the configuration space and, from the driver, on the
/// hinting queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HintCommand {
    /// Hinting is to stop, or has stopped; hinted pages stay with the driver.
    Stop,
    /// The device has finished; the driver may use the hinted pages again.
    Done,
    /// Hinting is wanted, or under way, under this number, which is at least 2.
    Start(u32),
}

impl HintCommand {
    /// `VIRTIO_BALLOON_CMD_ID_STOP`.
    pub const STOP_ID: u32 = 0;
    /// `VIRTIO_BALLOON_CMD_ID_DONE`.
    pub const DONE_ID: u32 = 1;
    /// The smallest number of a start command.
    pub const FIRST_START_ID: u32 = 2;

    /// The number's meaning.
    pub const fn from_id(id: u32) -> Self {
        match id {
            Self::STOP_ID => Self::Stop,
            Self::DONE_ID => Self::Done,
            start => Self::Start(start),
        }
    }

    /// The number on the wire.
    pub const fn id(self) -> u32 {
        match self {
            Self::Stop => Self::STOP_ID,
            Self::Done => Self::DONE_ID,
            Self::Start(start) => start,
        }
    }

    /// The start command to use after one with the number `previous`; 0 and 1 are skipped when the
    /// numbers wrap.
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
    fn start_numbers_skip_the_reserved_ones() {
        assert_eq!(HintCommand::start_after(0), HintCommand::Start(2));
        assert_eq!(HintCommand::start_after(2), HintCommand::Start(3));
        assert_eq!(HintCommand::start_after(u32::MAX), HintCommand::Start(2));
    }

    #[test]
    fn numbers_and_meanings_correspond() {
        for id in [0, 1, 2, 3, u32::MAX] {
            assert_eq!(HintCommand::from_id(id).id(), id);
        }
        assert_eq!(HintCommand::from_id(0), HintCommand::Stop);
        assert_eq!(HintCommand::from_id(1), HintCommand::Done);
    }
}
