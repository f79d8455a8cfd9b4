//! TLS 1.3 with certificates on both sides (RFC 8446), by rustls with the ring provider.

use std::sync::Arc;

use rustls::client::danger::HandshakeSignatureValid;
use rustls::client::verify_server_name;
use rustls::crypto::CryptoProvider;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use rustls::{
    AlertDescription, CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName,
    ExtendedKeyPurpose, RootCertStore, ServerConfig, SignatureScheme,
};
use rustls_pki_types::pem::{Error as PemError, PemObject};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};

use super::error::SessionError;
use super::security::{TlsFile, TlsFiles};

/// Detects servers and clients of other services in the handshake.
const ALPN: &[u8] = b"ebb-migration";

/// TLS configuration of the source's connections.
#[derive(Debug, Clone)]
pub(super) struct TlsClient {
    config: Arc<ClientConfig>,
    name: ServerName<'static>,
}

/// TLS configuration of the destination's connections.
#[derive(Debug, Clone)]
pub(super) struct TlsServer {
    config: Arc<ServerConfig>,
}

impl TlsClient {
    /// Reads the files. The destination must present a certificate for `host`, or for the
    /// configured name.
    pub(super) fn load(files: &TlsFiles, host: &str) -> Result<Self, SessionError> {
        let named = files.peer_names.first();
        let name =
            named.map_or_else(|| peer_name("--to", host), |name| peer_name("--peer-name", name))?;
        let mut config = ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(|error| files.certificate.unusable(error))?
            .with_root_certificates(authorities(&files.authorities)?)
            .with_client_auth_cert(certificates(&files.certificate)?, key(&files.key)?)
            .map_err(|error| pair_unusable(files, &error))?;
        config.alpn_protocols = vec![ALPN.to_vec()];
        config.resumption = rustls::client::Resumption::disabled();
        Ok(Self { config: Arc::new(config), name })
    }

    pub(super) fn connection(&self) -> Result<rustls::Connection, SessionError> {
        let failed = |error| explain(&error, format!("the destination {}", self.name.to_str()));
        let connection = rustls::ClientConnection::new(Arc::clone(&self.config), self.name.clone());
        connection.map(Into::into).map_err(failed)
    }
}

impl TlsServer {
    /// Reads the files. Each source must present a certificate of the authorities for one of the
    /// names.
    pub(super) fn load(files: &TlsFiles) -> Result<Self, SessionError> {
        let authorities = Arc::new(authorities(&files.authorities)?);
        let verifier = WebPkiClientVerifier::builder_with_provider(authorities, provider())
            .build()
            .map_err(|error| files.authorities.unusable(error))?;
        let names = files.peer_names.iter().map(|name| peer_name("--peer-name", name));
        let names = names.collect::<Result<Vec<_>, _>>()?;
        if names.is_empty() {
            return Err(SessionError::NoPeerName);
        }
        let verifier = Arc::new(NamedClients { authorities: verifier, names });
        let mut config = ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(|error| files.certificate.unusable(error))?
            .with_client_cert_verifier(verifier)
            .with_single_cert(certificates(&files.certificate)?, key(&files.key)?)
            .map_err(|error| pair_unusable(files, &error))?;
        config.alpn_protocols = vec![ALPN.to_vec()];
        // Every connection presents its certificate again.
        config.send_tls13_tickets = 0;
        Ok(Self { config: Arc::new(config) })
    }

    pub(super) fn connection(&self) -> Result<rustls::Connection, rustls::Error> {
        rustls::ServerConnection::new(Arc::clone(&self.config)).map(Into::into)
    }
}

/// Accepts clients that have a certificate of the authorities for one of the names. `rustls` itself
/// leaves the names of clients to its user.
#[derive(Debug)]
struct NamedClients {
    authorities: Arc<dyn ClientCertVerifier>,
    names: Vec<ServerName<'static>>,
}

impl ClientCertVerifier for NamedClients {
    fn verify_client_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        let verified = self.authorities.verify_client_cert(certificate, intermediates, now)?;
        let parsed = ParsedCertificate::try_from(certificate)?;
        let mut refused = rustls::Error::InvalidCertificate(CertificateError::NotValidForName);
        for name in &self.names {
            match verify_server_name(&parsed, name) {
                Ok(()) => return Ok(verified),
                Err(error) => refused = error,
            }
        }
        Err(refused)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.authorities.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.authorities.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.authorities.supported_verify_schemes()
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.authorities.root_hint_subjects()
    }
}

/// Parses a name or an address that a certificate can be issued for.
fn peer_name(option: &'static str, name: &str) -> Result<ServerName<'static>, SessionError> {
    ServerName::try_from(name.to_owned()).map_err(|_| SessionError::TlsFile {
        option,
        path: name.into(),
        problem: "it is neither a name nor an address that a certificate could be issued for"
            .to_owned(),
    })
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

fn pair_unusable(files: &TlsFiles, error: &rustls::Error) -> SessionError {
    let problem = match error {
        rustls::Error::InconsistentKeys(_) => {
            format!(
                "it does not belong to the certificate in {}; give the certificate's own key",
                files.certificate.name().display()
            )
        }
        error => error.to_string(),
    };
    files.key.unusable(problem)
}

fn pem_problem(error: &PemError, wanted: &str) -> String {
    match error {
        PemError::NoItemsFound => format!("there is no {wanted} in it; a PEM file is needed"),
        error => format!("{error}; a PEM file is needed"),
    }
}

fn certificates(file: &TlsFile) -> Result<Vec<CertificateDer<'static>>, SessionError> {
    let failed = |error: PemError| file.unusable(pem_problem(&error, "certificate"));
    let certificates = CertificateDer::pem_slice_iter(&file.read()?)
        .collect::<Result<Vec<_>, _>>()
        .map_err(failed)?;
    if certificates.is_empty() {
        return Err(failed(PemError::NoItemsFound));
    }
    Ok(certificates)
}

fn authorities(file: &TlsFile) -> Result<RootCertStore, SessionError> {
    let mut store = RootCertStore::empty();
    for certificate in certificates(file)? {
        store.add(certificate).map_err(|error| file.unusable(error))?;
    }
    Ok(store)
}

fn key(file: &TlsFile) -> Result<PrivateKeyDer<'static>, SessionError> {
    PrivateKeyDer::from_pem_slice(&file.read()?)
        .map_err(|error| file.unusable(pem_problem(&error, "unencrypted private key")))
}

/// Converts a TLS error into one for the operator, by the side that refused.
pub(super) fn explain(error: &rustls::Error, peer: String) -> SessionError {
    match error {
        rustls::Error::InvalidCertificate(error) => {
            SessionError::CertificateRefusedHere { peer, problem: refused_here(error) }
        }
        rustls::Error::NoCertificatesPresented => SessionError::CertificateRefusedHere {
            peer,
            problem: "it presented none; give it --tls-cert and --tls-key".to_owned(),
        },
        rustls::Error::AlertReceived(alert) => match refused_there(*alert) {
            Some(problem) => {
                SessionError::CertificateRefusedThere { peer, problem: problem.to_owned() }
            }
            None if *alert == AlertDescription::NoApplicationProtocol => {
                SessionError::NotEbb { peer, found: "its TLS is for another service".to_owned() }
            }
            None => SessionError::Tls { peer, problem: format!("it sent the alert {alert:?}") },
        },
        rustls::Error::NoApplicationProtocol => {
            SessionError::NotEbb { peer, found: "its TLS is for another service".to_owned() }
        }
        rustls::Error::InvalidMessage(_) => {
            SessionError::NotEbb { peer, found: "what it sent is not TLS".to_owned() }
        }
        error => SessionError::Tls { peer, problem: error.to_string() },
    }
}

fn refused_here(error: &CertificateError) -> String {
    let advice = match error {
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
            "renew it, or correct the clock of this host"
        }
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
            "correct the clock of this host"
        }
        CertificateError::UnknownIssuer | CertificateError::BadSignature => {
            "it does not come from the authorities in --tls-ca: give the one that signed it"
        }
        CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
            "if this is the intended peer, give the certificate's name with --peer-name"
        }
        CertificateError::InvalidPurposeContext {
            required: ExtendedKeyPurpose::ClientAuth,
            ..
        } => "a source needs one with the extended key usage clientAuth: issue one for sending",
        CertificateError::InvalidPurposeContext {
            required: ExtendedKeyPurpose::ServerAuth,
            ..
        } => {
            "a destination needs one with the extended key usage serverAuth: issue one for receiving"
        }
        _ => "make a new one",
    };
    format!("{error}; {advice}")
}

/// RFC 8446 section 6.2.
fn refused_there(alert: AlertDescription) -> Option<&'static str> {
    Some(match alert {
        AlertDescription::UnknownCA => {
            "it does not come from the authorities in its --tls-ca; give it the one that signed \
             this side's"
        }
        AlertDescription::CertificateExpired => {
            "it has expired, or is not valid yet by its clock; renew it, or correct the clock of \
             that host"
        }
        AlertDescription::CertificateRequired => {
            "none was presented; give --tls-cert and --tls-key"
        }
        AlertDescription::CertificateRevoked => "it has been revoked; make a new one",
        AlertDescription::BadCertificate => {
            "it is not issued for the name that the peer expects, or is damaged; see the message \
             there"
        }
        AlertDescription::UnsupportedCertificate => {
            "it is of a kind that the other side cannot use, or lacks the extended key usage of \
             its role, clientAuth for a source and serverAuth for a destination; make a new one"
        }
        AlertDescription::CertificateUnknown
        | AlertDescription::AccessDenied
        | AlertDescription::DecryptError => "see the message there",
        _ => return None,
    })
}
