//! Authentication of the two sides of a session.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;

use super::address::Address;
use super::error::SessionError;
use super::tls::TlsClient;

/// Most bytes of a file of certificates: several times the size of all authorities that a
/// distribution trusts.
const MOST_BYTES: usize = 1 << 20;

/// How the two sides authenticate each other.
#[derive(Debug, Clone, Default)]
pub enum Security {
    /// Unix sockets, where the other process must belong to the same user or root.
    #[default]
    Local,
    /// Also TCP without encryption and authentication: any process that reaches the port, or
    /// listens there, can send or receive a guest's memory. On loopback these are the processes of
    /// all users of the host. Only on explicit request of the operator.
    Insecure,
    /// TLS 1.3 with certificates on both sides, for TCP.
    Tls(TlsFiles),
}

/// Certificates and keys, as PEM files.
#[derive(Debug, Clone)]
pub struct TlsFiles {
    /// The own certificate, followed by intermediate certificates.
    pub certificate: TlsFile,
    /// The own certificate's private key (PKCS #8, PKCS #1 or SEC 1).
    pub key: TlsFile,
    /// The authorities that may have issued the other side's certificate.
    pub authorities: TlsFile,
    /// Names or addresses of which the other side's certificate must have one. A source uses the
    /// first, or else the host of the address that it connects to; a destination needs at least
    /// one.
    pub peer_names: Vec<String>,
}

/// An opened file of certificates or a key.
#[derive(Debug, Clone)]
pub struct TlsFile {
    option: &'static str,
    name: PathBuf,
    file: Arc<OwnedFd>,
}

impl TlsFiles {
    /// Opens the files.
    ///
    /// # Errors
    /// [`SessionError::TlsFile`]: one cannot be opened, or is not a regular file.
    pub fn open(
        certificate: &Path,
        key: &Path,
        authorities: &Path,
        peer_names: Vec<String>,
    ) -> Result<Self, SessionError> {
        Ok(Self {
            certificate: TlsFile::open("--tls-cert", certificate)?,
            key: TlsFile::open("--tls-key", key)?,
            authorities: TlsFile::open("--tls-ca", authorities)?,
            peer_names,
        })
    }

    /// Takes over files that another process has opened: certificate, key, authorities, each with
    /// a name for messages.
    pub fn from_descriptors(files: [(PathBuf, OwnedFd); 3], peer_names: Vec<String>) -> Self {
        let [certificate, key, authorities] = files;
        let file = |option, (name, file)| TlsFile { option, name, file: Arc::new(file) };
        Self {
            certificate: file("--tls-cert", certificate),
            key: file("--tls-key", key),
            authorities: file("--tls-ca", authorities),
            peer_names,
        }
    }

    /// The files for another process: certificate, key, authorities.
    pub fn into_descriptors(self) -> std::io::Result<Vec<OwnedFd>> {
        [self.certificate, self.key, self.authorities]
            .into_iter()
            .map(|file| file.file.try_clone())
            .collect()
    }
}

impl TlsFile {
    fn open(option: &'static str, path: &Path) -> Result<Self, SessionError> {
        // A FIFO must not block, and a terminal must not become the process's own.
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let file = rustix::fs::open(path, flags, Mode::empty()).map_err(|errno| {
            let problem = std::io::Error::from(errno).to_string();
            SessionError::TlsFile { option, path: path.to_owned(), problem }
        })?;
        let file = Self { option, name: path.to_owned(), file: Arc::new(file) };
        file.check_kind()?;
        Ok(file)
    }

    /// Reads all of the file, from its beginning: other processes may have read from it.
    ///
    /// System calls: `fstat`, `pread64`.
    pub(super) fn read(&self) -> Result<Vec<u8>, SessionError> {
        let size_bytes = usize::try_from(self.check_kind()?).unwrap_or(usize::MAX);
        // No more than is needed: an allocator that clears what is freed leaves out large pieces.
        let mut bytes = vec![0; size_bytes.min(MOST_BYTES) + 1];
        let mut filled = 0;
        while filled < bytes.len() {
            match rustix::io::pread(&*self.file, &mut bytes[filled..], filled as u64) {
                Ok(0) => break,
                Ok(count) => filled += count,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(self.unusable(std::io::Error::from(errno))),
            }
        }
        if filled > MOST_BYTES {
            return Err(self.unusable("it is longer than 1 MiB; a PEM file is needed"));
        }
        bytes.truncate(filled);
        Ok(bytes)
    }

    /// An error with this file.
    pub(super) fn unusable(&self, problem: impl std::fmt::Display) -> SessionError {
        SessionError::TlsFile {
            option: self.option,
            path: self.name.clone(),
            problem: problem.to_string(),
        }
    }

    /// The file's name, for messages.
    pub(super) fn name(&self) -> &Path {
        &self.name
    }

    /// Returns the file's size. Reading anything else than a regular file could wait without a limit.
    fn check_kind(&self) -> Result<i64, SessionError> {
        let stat = rustix::fs::fstat(&*self.file)
            .map_err(|errno| self.unusable(std::io::Error::from(errno)))?;
        if FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile {
            return Ok(stat.st_size);
        }
        Err(self.unusable("it is not a regular file; a PEM file is needed"))
    }
}

/// Transport of a session's connections, once addresses are known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Transport {
    Plain,
    Tls,
}

impl Security {
    /// Checks for a source whether it may connect to `address`, and with TLS whether the files can
    /// be used, before anything is sent.
    pub fn check(&self, address: &Address) -> Result<(), SessionError> {
        self.client(address).map(drop)
    }

    /// The TLS configuration of a source, or `None` for plain connections.
    pub(super) fn client(&self, address: &Address) -> Result<Option<TlsClient>, SessionError> {
        match (self.transport(address)?, self, address) {
            (Transport::Tls, Self::Tls(files), Address::Tcp { host, .. }) => {
                TlsClient::load(files, host).map(Some)
            }
            _ => Ok(None),
        }
    }

    /// Returns the transport for `address`, or an error if the address may not be used.
    pub(super) fn transport(&self, address: &Address) -> Result<Transport, SessionError> {
        match (self, address) {
            (Self::Tls(_), Address::Tcp { .. }) => Ok(Transport::Tls),
            (Self::Tls(_), Address::Unix { .. }) => {
                Err(SessionError::TlsOverUnix { address: address.to_string() })
            }
            (Self::Local, Address::Tcp { .. }) => {
                Err(SessionError::Unencrypted { address: address.to_string() })
            }
            (Self::Local | Self::Insecure, _) => Ok(Transport::Plain),
        }
    }
}
