//! The host's side of network devices: opened before the monitor gives up its rights.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::FileType;

use super::error::NetError;
use super::parts::Port;
use super::passt::{self, Passt};
use super::stream::Stream;
use super::tap::Tap;
use crate::config::{MacAddress, NetBackend, NetConfig};

/// What connects a device with the host.
pub(super) enum Backend {
    Tap(Tap),
    Stream(Stream),
}

impl Backend {
    /// Its name for messages.
    pub(super) fn kind(&self) -> &'static str {
        match self {
            Self::Tap(_) => "tap interface",
            Self::Stream(_) => "connection with passt",
        }
    }
}

/// An open backend.
pub struct OpenNet {
    backend: Backend,
    passt: Option<Passt>,
}

/// Opens the backends of all devices, with the rights of the user who starts the monitor.
///
/// # Errors
/// The first one that cannot be used.
pub fn open_all(nets: &[NetConfig]) -> Result<Vec<OpenNet>, NetError> {
    nets.iter().map(OpenNet::open).collect()
}

impl OpenNet {
    fn open(net: &NetConfig) -> Result<Self, NetError> {
        let of = |backend| Self { backend, passt: None };
        match &net.backend {
            NetBackend::Tap(name) => Tap::open(name).map(Backend::Tap).map(of),
            NetBackend::Descriptor(number) => {
                let problem = |problem| NetError::Descriptor { number: *number, problem };
                adopt(*number).map(of).map_err(problem)
            }
            NetBackend::User(ports) => {
                let (stream, passt) = passt::start(net, ports)?;
                Ok(Self { backend: Backend::Stream(stream), passt: Some(passt) })
            }
        }
    }

    /// The backend in an open descriptor.
    pub(crate) fn of(fd: OwnedFd) -> Result<Self, String> {
        Ok(Self { backend: backend_of(fd)?, passt: None })
    }

    /// The descriptor, for another process; `None` for a backend that is more than that.
    pub(crate) fn descriptor(&self) -> Option<Arc<OwnedFd>> {
        if self.passt.is_some() {
            return None;
        }
        match &self.backend {
            Backend::Tap(tap) => tap.port.fd().cloned(),
            Backend::Stream(stream) => stream.port.fd().cloned(),
        }
    }

    /// Waits until the backend works. What it says later is logged by a thread, which calls
    /// `restrict` first.
    pub fn wait_ready(
        &mut self,
        device: &str,
        mac: MacAddress,
        restrict: impl FnOnce() + Send + 'static,
    ) -> Result<(), NetError> {
        let Some(mut passt) = self.passt.take() else { return Ok(()) };
        if let Backend::Stream(stream) = &mut self.backend {
            passt.wait_ready(stream, mac)?;
        }
        let (words, name) = (passt.into_words(), device.to_owned());
        let log = move || {
            restrict();
            passt::log(&name, words);
        };
        // Ends with passt, which ends with the monitor.
        std::thread::Builder::new().name(format!("{device}-log")).spawn(log).map(drop).map_err(
            |source| NetError::Failed {
                backend: "user".to_owned(),
                action: "start a thread",
                source,
            },
        )
    }

    pub(super) fn into_backend(self) -> Backend {
        self.backend
    }

    /// A connection over a socket, for tests.
    #[cfg(any(test, feature = "testing"))]
    pub(super) fn stream(port: Port) -> Self {
        Self { backend: Backend::Stream(Stream::new(port)), passt: None }
    }

    /// A stand-in for a tap interface, for tests.
    #[cfg(any(test, feature = "testing"))]
    pub(super) fn tap(port: Port) -> Self {
        Self { backend: Backend::Tap(Tap::over(port)), passt: None }
    }
}

/// Duplicates an inherited descriptor, if it is of a kind that can be used: the monitor has no
/// others of these kinds that its user could name by mistake.
fn adopt(number: i32) -> Result<Backend, String> {
    let named = format!("/proc/self/fd/{number}");
    std::fs::metadata(&named).map_err(|_| "it is not open".to_owned())?;
    // SAFETY: the descriptor is open, as was just found, and this process has one thread. It is
    // borrowed for the time of the duplication only.
    let borrowed = unsafe { BorrowedFd::borrow_raw(number) };
    let failed = |error: rustix::io::Errno| error.to_string();
    let fd: OwnedFd = rustix::io::fcntl_dupfd_cloexec(borrowed, 3).map_err(failed)?;
    // Processes that the monitor starts must not inherit it.
    rustix::io::fcntl_setfd(borrowed, rustix::io::FdFlags::CLOEXEC).map_err(failed)?;
    backend_of(fd)
}

/// The backend in an open descriptor: a tap interface, or a connected stream socket.
fn backend_of(fd: OwnedFd) -> Result<Backend, String> {
    let failed = |error: rustix::io::Errno| error.to_string();
    let kind = rustix::fs::fstat(&fd).map_err(failed)?.st_mode;
    if FileType::from_raw_mode(kind) != FileType::Socket {
        return Tap::adopt(fd).map(Backend::Tap);
    }
    let stream = rustix::net::sockopt::socket_type(&fd).map_err(failed)?;
    if stream != rustix::net::SocketType::STREAM || rustix::net::getpeername(&fd).is_err() {
        return Err("it is not a connected stream socket".to_owned());
    }
    rustix::io::ioctl_fionbio(&fd, true).map_err(failed)?;
    Ok(Backend::Stream(Stream::new(Port::Open(Arc::new(fd)))))
}
