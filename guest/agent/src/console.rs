//! The connection to the host: the guest's console in raw mode, or standard input and output.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd};

use ebb_agent::protocol::Event;
use rustix::termios::{OptionalActions, tcgetattr, tcsetattr};

/// Environment of the agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// It is process 1 of a guest.
    Init,
    /// It is an ordinary process.
    Process,
}

/// Both directions of the connection.
pub struct Console {
    input: ManuallyDrop<File>,
    output: ManuallyDrop<File>,
}

impl Console {
    /// Opens the connection; a terminal is set to raw mode, so that no data is echoed or changed.
    pub fn open(place: Place) -> io::Result<Self> {
        let (input, output) = match place {
            Place::Init => {
                let input = OpenOptions::new().read(true).write(true).open("/dev/console")?;
                let output = input.try_clone()?;
                (input, output)
            }
            Place::Process => (standard(0), standard(1)),
        };
        if let Ok(mut attributes) = tcgetattr(&input) {
            attributes.make_raw();
            tcsetattr(&input, OptionalActions::Now, &attributes)?;
        }
        Ok(Self { input: ManuallyDrop::new(input), output: ManuallyDrop::new(output) })
    }

    /// Sends an event with one write.
    pub fn send(&mut self, event: &Event) -> io::Result<()> {
        let line = event.to_line()?;
        self.output.write_all(&line)
    }

    /// Reads available input; returns 0 at its end.
    pub fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.input.read(buffer)
    }

    /// Descriptor to wait for input.
    pub fn input(&self) -> BorrowedFd<'_> {
        self.input.as_fd()
    }
}

/// A standard stream as a file, without the standard library's buffers, which would split writes.
fn standard(number: i32) -> File {
    // SAFETY: the standard streams stay open for the life of the process: the file is kept in a
    // `ManuallyDrop` that is never dropped, and nothing else closes them.
    unsafe { File::from_raw_fd(number) }
}
