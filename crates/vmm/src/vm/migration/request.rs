//! Translates requests of the API into terms of the migration engine and session.

use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::time::Duration;

use ebb_migration::session::{Address, Security, TlsFiles};
use ebb_migration::{AutoConverge, Config, Holes, TimeLimit, ZeroPages};
use rustix::fs::FileType;

use crate::api::control::ControlError;
use crate::api::migration::MigrationRequest;

/// Certificate, key and authorities.
const TLS_FILES: usize = 3;

/// A requested migration with everything that it needs from outside of the monitor.
#[derive(Debug)]
pub(in crate::vm) struct Order {
    pub request: MigrationRequest,
    /// Name of the receiver.
    pub address: Address,
    /// Connected to it: the control connection, then one for each data stream.
    pub sockets: Vec<OwnedFd>,
    pub security: Security,
}

impl Order {
    /// Checks the request and the descriptors that came with it: connected sockets, followed by
    /// certificate, key and authorities for TLS.
    pub(in crate::vm) fn new(
        request: MigrationRequest,
        mut descriptors: Vec<OwnedFd>,
    ) -> Result<Self, ControlError> {
        let address = request
            .to
            .parse()
            .map_err(|error: ebb_migration::session::AddressError| to(error.to_string(), None))?;
        if descriptors.is_empty() {
            // The monitor itself may not connect. A process that may could do it here.
            return Err(to(
                "the request came without connected sockets, and the monitor does not connect \
                 itself"
                    .to_owned(),
                Some("use `ebb migrate`, which sends them along"),
            ));
        }
        let sockets = 1 + usize::from(request.streams);
        let found = descriptors.len();
        if found != sockets && found != sockets + TLS_FILES {
            return Err(ControlError::Invalid {
                field: "streams",
                message: format!(
                    "a migration over {} data streams takes {sockets} connected sockets, and {} \
                     descriptors with the files for TLS, but {found} came with the request",
                    request.streams,
                    sockets + TLS_FILES
                ),
                remedy: Some("use `ebb migrate`, which sends them along".to_owned()),
            });
        }
        let expected = (0..found)
            .map(|index| if index < sockets { FileType::Socket } else { FileType::RegularFile });
        for ((number, descriptor), expected) in (1..).zip(&descriptors).zip(expected) {
            check_kind(number, descriptor, expected)?;
        }
        let files = descriptors.split_off(sockets);
        let security = security(&request, sockets, files)?;
        Ok(Self { request, address, sockets: descriptors, security })
    }
}

fn to(message: String, remedy: Option<&str>) -> ControlError {
    ControlError::Invalid { field: "to", message, remedy: remedy.map(str::to_owned) }
}

/// Refuses a descriptor of another kind. A socket that is not a connected stream fails later: only
/// calls that the monitor does not make find that out.
fn check_kind(
    number: usize,
    descriptor: impl AsFd,
    expected: FileType,
) -> Result<(), ControlError> {
    let stat = rustix::fs::fstat(descriptor).map_err(ControlError::failed)?;
    let found = FileType::from_raw_mode(stat.st_mode);
    if found == expected {
        return Ok(());
    }
    let name = |kind| match kind {
        FileType::RegularFile => "a regular file",
        FileType::Socket => "a socket",
        FileType::Directory => "a directory",
        FileType::Fifo => "a FIFO",
        FileType::CharacterDevice | FileType::BlockDevice => "a device",
        _ => "something else",
    };
    let message = format!("descriptor {number} must be {}, but is {}", name(expected), name(found));
    Err(to(
        message,
        Some(
            "send one connected socket for control and one for each data stream, then for TLS \
             certificate, key and authorities",
        ),
    ))
}

/// The peers that the connection trusts. `first` is the number of descriptors before `files`.
fn security(
    request: &MigrationRequest,
    first: usize,
    files: Vec<OwnedFd>,
) -> Result<Security, ControlError> {
    let names: Vec<_> = request.tls_name.iter().cloned().collect();
    let named = (first + 1..)
        .zip(files)
        .map(|(number, file)| (PathBuf::from(format!("descriptor {number}")), file));
    if let Ok(files) = <[_; TLS_FILES]>::try_from(named.collect::<Vec<_>>()) {
        return Ok(Security::Tls(TlsFiles::from_descriptors(files, names)));
    }
    if !names.is_empty() {
        return Err(ControlError::Invalid {
            field: "tls_name",
            message:
                "a name in a certificate was given, but no files for TLS came with the request"
                    .to_owned(),
            remedy: Some("send certificate, key and authorities, or omit the name".to_owned()),
        });
    }
    Ok(if request.insecure { Security::Insecure } else { Security::Local })
}

/// How memory is sent.
pub(super) fn config(request: &MigrationRequest) -> Config {
    let then = request.on_timeout;
    Config {
        downtime_limit: Duration::from_millis(request.downtime_ms),
        bandwidth_limit: request.bandwidth_bytes_per_s,
        time_limit: request
            .timeout_seconds
            .map(|seconds| TimeLimit { after: Duration::from_secs(seconds), then }),
        auto_converge: if request.auto_converge { AutoConverge::On } else { AutoConverge::Off },
        zero_pages: if request.zero_pages { ZeroPages::Detect } else { ZeroPages::Send },
        holes: if request.holes { Holes::Skip } else { Holes::Read },
        ..Config::default()
    }
}

#[cfg(test)]
mod tests {
    use ebb_migration::AtTimeLimit;

    use super::*;

    fn socket() -> OwnedFd {
        std::os::unix::net::UnixStream::pair().unwrap().0.into()
    }

    fn file() -> OwnedFd {
        tempfile::tempfile().unwrap().into()
    }

    fn pipe() -> OwnedFd {
        rustix::pipe::pipe().unwrap().0
    }

    #[test]
    fn wrong_descriptors_are_refused() {
        let two = MigrationRequest { streams: 2, ..MigrationRequest::new("tcp:192.0.2.1:1") };
        let refused = |request: &MigrationRequest, descriptors: Vec<OwnedFd>| match Order::new(
            request.clone(),
            descriptors,
        )
        .unwrap_err()
        {
            ControlError::Invalid { field, message, remedy: Some(_) } => {
                format!("{field}: {message}")
            }
            error => panic!("{error:?}"),
        };
        let sockets = |count: usize| (0..count).map(|_| socket()).collect::<Vec<_>>();
        let with = |sockets: usize, more: Vec<OwnedFd>| {
            (0..sockets).map(|_| socket()).chain(more).collect::<Vec<_>>()
        };
        assert!(refused(&two, Vec::new()).starts_with("to: the request came without connected"));
        for descriptors in [sockets(2), sockets(4), sockets(5), sockets(7), with(3, vec![file()])] {
            let found = descriptors.len();
            let text = refused(&two, descriptors);
            assert!(text.starts_with("streams: ") && text.contains(&format!("{found} came")));
        }
        for (descriptors, words) in [
            (with(2, vec![file()]), "descriptor 3 must be a socket, but is a regular file"),
            (with(2, vec![pipe()]), "descriptor 3 must be a socket, but is a FIFO"),
            (vec![pipe(), socket(), socket()], "descriptor 1 must be a socket, but is a FIFO"),
            (sockets(6), "descriptor 4 must be a regular file, but is a socket"),
            (
                with(3, vec![file(), pipe(), file()]),
                "descriptor 5 must be a regular file, but is a FIFO",
            ),
            (
                with(3, vec![file(), file(), std::fs::File::open("/dev/null").unwrap().into()]),
                "descriptor 6 must be a regular file, but is a device",
            ),
        ] {
            let text = refused(&two, descriptors);
            assert_eq!(text, format!("to: {words}"));
        }
        let named = MigrationRequest { tls_name: Some("a.example".to_owned()), ..two.clone() };
        assert!(refused(&named, sockets(3)).starts_with("tls_name: "));
        let nowhere = MigrationRequest::new("10.0.0.1:1");
        let error = Order::new(nowhere, sockets(2)).unwrap_err();
        assert!(error.to_string().contains("tcp:HOST:PORT"), "{error}");
    }

    #[test]
    fn descriptors_decide_about_tls() {
        let request = MigrationRequest::new("tcp:a.example:1");
        let order = |request: &MigrationRequest, files: usize| {
            let files = (0..files).map(|_| file());
            Order::new(request.clone(), [socket(), socket()].into_iter().chain(files).collect())
                .unwrap()
        };
        assert!(matches!(order(&request, 0).security, Security::Local));
        assert!(matches!(order(&request, 3).security, Security::Tls(_)));
        let insecure = MigrationRequest { insecure: true, ..request.clone() };
        assert!(matches!(order(&insecure, 0).security, Security::Insecure));
        let named = MigrationRequest { tls_name: Some("b.example".to_owned()), ..request };
        let Order { security, sockets, .. } = order(&named, 3);
        let Security::Tls(files) = security else { panic!("{security:?}") };
        assert_eq!((files.peer_names, sockets.len()), (vec!["b.example".to_owned()], 2));
    }

    #[test]
    fn every_option_reaches_the_engine() {
        let plain = MigrationRequest::new("unix:/x");
        assert_eq!(config(&plain), Config::default());
        let wishes = MigrationRequest {
            downtime_ms: 7,
            bandwidth_bytes_per_s: Some(1 << 20),
            timeout_seconds: Some(3),
            on_timeout: AtTimeLimit::Force,
            auto_converge: true,
            zero_pages: false,
            holes: false,
            ..plain.clone()
        };
        let wanted = Config {
            downtime_limit: Duration::from_millis(7),
            bandwidth_limit: Some(1 << 20),
            time_limit: Some(TimeLimit { after: Duration::from_secs(3), then: AtTimeLimit::Force }),
            auto_converge: AutoConverge::On,
            zero_pages: ZeroPages::Send,
            holes: Holes::Read,
            ..Config::default()
        };
        assert_eq!(config(&wishes), wanted);
    }
}
