//! Translates requests of the API into terms of the migration engine and session.

use std::time::Duration;

use ebb_migration::session::{Address, Security, TlsFiles};
use ebb_migration::{AutoConverge, Config, Holes, TimeLimit, ZeroPages};

use crate::api::control::ControlError;
use crate::api::migration::MigrationRequest;

/// Refuses an address that cannot be used. Host names are not resolved here: a resolver needs
/// system calls that a monitor does not make.
pub(in crate::vm) fn check_address(text: &str) -> Result<(), ControlError> {
    let invalid = |message: String, remedy: Option<&str>| ControlError::Invalid {
        field: "to",
        message,
        remedy: remedy.map(str::to_owned),
    };
    match text.parse::<Address>().map_err(|error| invalid(error.to_string(), None))? {
        Address::Tcp { host, .. }
            if host.parse::<std::net::IpAddr>().is_err()
                && !host.eq_ignore_ascii_case("localhost") =>
        {
            let message = format!(
                "the host {host:?} in {text:?} is a name, and the monitor does not resolve names"
            );
            Err(invalid(message, Some("give an IP address; `ebb migrate` resolves names itself")))
        }
        Address::Unix { path } if path.is_relative() => {
            let message = format!(
                "the path in {text:?} is relative, \
                 and the monitor may have another working directory"
            );
            Err(invalid(
                message,
                Some("give an absolute path; `ebb migrate` converts paths itself"),
            ))
        }
        _ => Ok(()),
    }
}

/// The peers that the connection trusts.
pub(super) fn security(request: &MigrationRequest) -> Security {
    match (&request.tls_cert, &request.tls_key, &request.tls_ca) {
        (Some(certificate), Some(key), Some(authorities)) => Security::Tls(TlsFiles {
            certificate: certificate.clone(),
            key: key.clone(),
            authorities: authorities.clone(),
            peer_names: request.tls_name.iter().cloned().collect(),
        }),
        _ if request.insecure => Security::Insecure,
        _ => Security::Local,
    }
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

    #[test]
    fn unusable_addresses_are_refused_with_a_remedy() {
        for good in ["tcp:127.0.0.1:1", "tcp:[::1]:1", "tcp:localhost:1", "unix:/run/x"] {
            assert_eq!(check_address(good), Ok(()), "{good}");
        }
        for (bad, words) in [
            ("10.0.0.1:1", "tcp:HOST:PORT"),
            ("tcp:receiver.example:1", "is a name"),
            ("unix:x", "relative"),
        ] {
            let error = check_address(bad).unwrap_err();
            assert!(matches!(error, ControlError::Invalid { field: "to", .. }), "{error}");
            assert!(error.to_string().contains(words), "{bad}: {error}");
        }
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
        assert_eq!(security(&plain), Security::Local);
        assert_eq!(security(&MigrationRequest { insecure: true, ..plain }), Security::Insecure);
    }
}
