//! Certificates generated for tests.

use std::path::{Path, PathBuf};

use ebb_migration::session::{Security, SessionError, TlsFiles};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair, KeyUsagePurpose, date_time_ymd,
};
use tempfile::TempDir;

/// An authority and the certificates it has issued, as files.
pub struct Authority {
    folder: TempDir,
    issuer: CertifiedIssuer<'static, KeyPair>,
}

/// The paths of [`TlsFiles`].
#[derive(Clone)]
pub struct Files {
    pub certificate: PathBuf,
    pub key: PathBuf,
    pub authorities: PathBuf,
    pub peer_names: Vec<String>,
}

/// Period in which a certificate is valid.
pub enum Validity {
    Now,
    Past,
    Future,
}

impl Authority {
    pub fn new(name: &str) -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("ca.pem"), issuer.pem()).unwrap();
        Self { folder, issuer }
    }

    pub fn path(&self) -> PathBuf {
        self.folder.path().join("ca.pem")
    }

    /// Issues a certificate for `name` (a host's name or address) with its key, for both roles. It
    /// trusts certificates of this authority for 127.0.0.1 and, as a destination, for a.example.
    pub fn files(&self, name: &str, validity: &Validity) -> Files {
        self.files_for(
            name,
            validity,
            &[ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth],
        )
    }

    /// Like [`Self::files`], for these roles only.
    pub fn files_for(
        &self,
        name: &str,
        validity: &Validity,
        roles: &[ExtendedKeyUsagePurpose],
    ) -> Files {
        let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        params.extended_key_usages = roles.to_vec();
        match validity {
            Validity::Now => {}
            Validity::Past => params.not_after = date_time_ymd(2020, 1, 1),
            Validity::Future => params.not_before = date_time_ymd(4000, 1, 1),
        }
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        let serial = std::fs::read_dir(self.folder.path()).unwrap().count();
        let certificate_path = self.write(&format!("{serial}.pem"), &certificate.pem());
        let key_path = self.write(&format!("{serial}.key"), &key.serialize_pem());
        let peer_names = ["127.0.0.1", "a.example"].map(str::to_owned).to_vec();
        Files { certificate: certificate_path, key: key_path, authorities: self.path(), peer_names }
    }

    pub fn write(&self, name: &str, text: &str) -> PathBuf {
        let path: &Path = self.folder.path();
        let path = path.join(name);
        std::fs::write(&path, text).unwrap();
        path
    }
}

/// TLS security with these files.
pub fn tls(files: &Files) -> Security {
    try_tls(files).unwrap()
}

/// The same, unless one cannot be opened.
pub fn try_tls(files: &Files) -> Result<Security, SessionError> {
    let Files { certificate, key, authorities, peer_names } = files;
    TlsFiles::open(certificate, key, authorities, peer_names.clone()).map(Security::Tls)
}
