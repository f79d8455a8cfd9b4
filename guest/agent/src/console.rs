//! The line to the host: the guest's console in raw mode, or standard input and output.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd};

use ebb_agent::protocol::Event;
use rustix::termios::{OptionalActions, tcgetattr, tcsetattr};

/// Where the agent runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// As process 1 of a guest.
    Init,
    /// As an ordinary process.
    Process,
}

/// Both directions of the line.
pub struct Console {
    input: ManuallyDrop<File>,
    output: ManuallyDrop<File>,
}

impl Console {
    /// Opens the line; a terminal is put into raw mode, so that nothing is echoed or changed.
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

    /// Reads what has arrived; 0 at the end.
    pub fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.input.read(buffer)
    }

    /// To wait for input.
    pub fn input(&self) -> BorrowedFd<'_> {
        self.input.as_fd()
    }
}

/// A standard stream as a file, without the buffers of the standard library, which would split
/// writes.
fn standard(number: i32) -> File {
    // SAFETY: the standard streams stay open for the life of the process: the file is kept in a
    // `ManuallyDrop` that is never dropped, and nothing else closes them.
    unsafe { File::from_raw_fd(number) }
}
