//! Sessions over mutual TLS, accepted and refused.

use std::thread::JoinHandle;
use std::time::Duration;

use ebb_migration::session::{Address, Listener, Security, SessionError, TimeLimits};

use rcgen::ExtendedKeyUsagePurpose;

use crate::certificates::{Authority, Files, Validity, tls, try_tls};
use crate::drive::{self, DestinationEnd, SourceEnd, both, connect, greeting, handle, listen};

/// Returns the source's error at a destination, and the destination's log of it.
fn refused(at_destination: &Security, at_source: &Security) -> (SessionError, String) {
    let limits = TimeLimits::default();
    let mut listener = listen(&drive::loopback(), at_destination, &limits);
    let address = listener.address().clone();
    let destination: JoinHandle<Listener> = std::thread::spawn(move || {
        while listener.refusals().count() == 0 {
            let error = listener.accept(Some(Duration::from_millis(10))).unwrap_err();
            assert!(matches!(error, SessionError::NobodyCame { .. }), "{error}");
        }
        listener
    });
    let error =
        connect(&address, at_source, &greeting("source 1"), &limits, &handle()).unwrap_err();
    let listener = destination.join().unwrap();
    (error, listener.refusals().last().unwrap().to_owned())
}

#[test]
fn a_machine_moves_over_tls() {
    let authority = Authority::new("authority");
    let security = tls(&authority.files("127.0.0.1", &Validity::Now));
    let ends = both(&drive::loopback(), &security);
    assert!(matches!(ends, (SourceEnd::Moved, DestinationEnd::Runs)), "{ends:?}");
}

#[test]
fn a_certificate_must_be_for_the_host_or_the_configured_name() {
    let authority = Authority::new("authority");
    let limits = TimeLimits::default();
    for (host, name) in [("localhost", None), ("127.0.0.1", Some("b.example"))] {
        let certificate = authority.files(name.unwrap_or(host), &Validity::Now);
        let listener = listen(&drive::loopback(), &tls(&certificate), &limits);
        let Address::Tcp { port, .. } = *listener.address() else { panic!("not TCP") };
        let destination = drive::spawn(listener);
        let files = authority.files("a.example", &Validity::Now);
        let files = Files { peer_names: name.into_iter().map(str::to_owned).collect(), ..files };
        let end =
            drive::source(&Address::Tcp { host: host.to_owned(), port }, &tls(&files), &limits);
        assert!(matches!(end, SourceEnd::Moved), "{end:?}");
        assert!(matches!(destination.join().unwrap(), DestinationEnd::Runs));
    }
}

#[test]
fn a_source_of_another_authority_is_refused_there() {
    let (ours, other) = (Authority::new("ours"), Authority::new("other"));
    let mut source = other.files("a.example", &Validity::Now);
    source.authorities = ours.path();
    let (error, logged) = refused(&tls(&ours.files("127.0.0.1", &Validity::Now)), &tls(&source));
    assert!(matches!(error, SessionError::CertificateRefusedThere { .. }), "{error:?}");
    assert!(error.to_string().contains("--tls-ca"), "{error}");
    assert!(
        logged.contains("this side refuses the certificate") && logged.contains("--tls-ca"),
        "{logged}"
    );
}

#[test]
fn a_destination_of_another_authority_is_refused_here() {
    let (ours, other) = (Authority::new("ours"), Authority::new("other"));
    let mut destination = other.files("127.0.0.1", &Validity::Now);
    destination.authorities = ours.path();
    let (error, logged) =
        refused(&tls(&destination), &tls(&ours.files("a.example", &Validity::Now)));
    assert!(matches!(error, SessionError::CertificateRefusedHere { .. }), "{error:?}");
    assert!(error.to_string().contains("--tls-ca"), "{error}");
    assert!(logged.contains("refuses the certificate of this side"), "{logged}");
}

#[test]
fn an_expired_certificate_is_refused_on_either_side() {
    let authority = Authority::new("authority");
    let good = |name| tls(&authority.files(name, &Validity::Now));
    let expired = |name| tls(&authority.files(name, &Validity::Past));
    let (error, logged) = refused(&expired("127.0.0.1"), &good("a.example"));
    assert!(matches!(error, SessionError::CertificateRefusedHere { .. }), "{error:?}");
    assert!(
        error.to_string().contains("expired") && error.to_string().contains("renew"),
        "{error}"
    );
    assert!(logged.contains("expired"), "{logged}");
    let (error, logged) = refused(&good("127.0.0.1"), &expired("a.example"));
    assert!(matches!(error, SessionError::CertificateRefusedThere { .. }), "{error:?}");
    assert!(error.to_string().contains("expired"), "{error}");
    assert!(logged.contains("expired"), "{logged}");
}

#[test]
fn a_certificate_of_the_future_points_to_the_clock() {
    let authority = Authority::new("authority");
    let future = tls(&authority.files("127.0.0.1", &Validity::Future));
    let (error, _) = refused(&future, &tls(&authority.files("a.example", &Validity::Now)));
    assert!(matches!(error, SessionError::CertificateRefusedHere { .. }), "{error:?}");
    assert!(error.to_string().contains("clock"), "{error}");
}

#[test]
fn a_certificate_for_another_name_is_refused_here() {
    let authority = Authority::new("authority");
    let destination = tls(&authority.files("b.example", &Validity::Now));
    let (error, _) = refused(&destination, &tls(&authority.files("a.example", &Validity::Now)));
    assert!(matches!(error, SessionError::CertificateRefusedHere { .. }), "{error:?}");
    let text = error.to_string();
    assert!(text.contains("--peer-name") && text.contains("b.example"), "{text}");
}

/// A certificate of the authority is not enough: its holder could send a machine to any host.
#[test]
fn a_source_with_another_name_is_refused_there() {
    let authority = Authority::new("authority");
    let destination = tls(&authority.files("127.0.0.1", &Validity::Now));
    let (error, logged) =
        refused(&destination, &tls(&authority.files("b.example", &Validity::Now)));
    assert!(matches!(error, SessionError::CertificateRefusedThere { .. }), "{error:?}");
    assert!(logged.contains("--peer-name") && logged.contains("b.example"), "{logged}");
}

#[test]
fn a_destination_needs_the_names_of_its_sources() {
    let authority = Authority::new("authority");
    let bind = |names: &[&str]| {
        let peer_names = names.iter().map(|&name| name.to_owned()).collect();
        let files = Files { peer_names, ..authority.files("127.0.0.1", &Validity::Now) };
        let limits = TimeLimits::default();
        Listener::bind(&drive::loopback(), &tls(&files), &greeting("d"), &limits, &handle())
            .unwrap_err()
            .to_string()
    };
    assert!(bind(&[]).contains("--peer-name is missing"), "{}", bind(&[]));
    assert!(
        bind(&["not a name"]).contains("--peer-name \"not a name\""),
        "{}",
        bind(&["not a name"])
    );
}

/// An authority can issue certificates only for receiving, or only for sending (RFC 5280 section
/// 4.2.1.12).
#[test]
fn a_certificate_is_valid_only_for_its_role() {
    let authority = Authority::new("authority");
    let receiving = |name| {
        tls(&authority.files_for(name, &Validity::Now, &[ExtendedKeyUsagePurpose::ServerAuth]))
    };
    let sending = |name| {
        tls(&authority.files_for(name, &Validity::Now, &[ExtendedKeyUsagePurpose::ClientAuth]))
    };
    let (error, logged) = refused(&receiving("127.0.0.1"), &receiving("a.example"));
    assert!(matches!(error, SessionError::CertificateRefusedThere { .. }), "{error:?}");
    assert!(error.to_string().contains("clientAuth"), "{error}");
    assert!(logged.contains("extended key usage clientAuth"), "{logged}");
    let (error, logged) = refused(&sending("127.0.0.1"), &sending("a.example"));
    assert!(matches!(error, SessionError::CertificateRefusedHere { .. }), "{error:?}");
    assert!(error.to_string().contains("extended key usage serverAuth"), "{error}");
    assert!(logged.contains("serverAuth"), "{logged}");
    let listener = listen(&drive::loopback(), &receiving("127.0.0.1"), &TimeLimits::default());
    let address = listener.address().clone();
    let destination = drive::spawn(listener);
    let end = drive::source(&address, &sending("a.example"), &TimeLimits::default());
    assert!(matches!(end, SourceEnd::Moved), "{end:?}");
    assert!(matches!(destination.join().unwrap(), DestinationEnd::Runs));
}

#[test]
fn a_source_without_a_certificate_is_refused() {
    use std::io::{Read, Write};
    use std::sync::Arc;

    let authority = Authority::new("authority");
    let mut listener = listen(
        &drive::loopback(),
        &tls(&authority.files("127.0.0.1", &Validity::Now)),
        &TimeLimits::default(),
    );
    let Address::Tcp { port, .. } = *listener.address() else { panic!("not TCP") };
    // Ebb's own source always presents one, so this is another client.
    let client = std::thread::spawn(move || {
        use rustls_pki_types::pem::PemObject;
        let mut roots = rustls::RootCertStore::empty();
        roots
            .add(rustls_pki_types::CertificateDer::from_pem_file(authority.path()).unwrap())
            .unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut config = rustls::ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        config.alpn_protocols = vec![b"ebb-migration".to_vec()];
        let name = rustls_pki_types::ServerName::try_from("127.0.0.1").unwrap();
        let tls = rustls::ClientConnection::new(Arc::new(config), name).unwrap();
        let socket = std::net::TcpStream::connect(("127.0.0.1", port)).unwrap();
        let mut stream = rustls::StreamOwned::new(tls, socket);
        stream.write_all(b"EBB-MIG\n").unwrap();
        stream.read_exact(&mut [0]).unwrap_err().to_string()
    });
    while listener.refusals().count() == 0 {
        listener.accept(Some(Duration::from_millis(10))).unwrap_err();
    }
    let logged = listener.refusals().last().unwrap().to_owned();
    assert!(logged.contains("it presented none"), "{logged}");
    drop(listener);
    let seen = client.join().unwrap();
    assert!(seen.contains("CertificateRequired"), "{seen}");
}

#[test]
fn tls_on_one_side_only_is_reported_as_such() {
    let authority = Authority::new("authority");
    let security = tls(&authority.files("127.0.0.1", &Validity::Now));
    let (error, logged) = refused(&Security::Insecure, &security);
    assert!(matches!(error, SessionError::NotEbb { .. } | SessionError::Cut { .. }), "{error:?}");
    assert!(logged.contains("it speaks TLS"), "{logged}");
    let (error, logged) = refused(&security, &Security::Insecure);
    assert!(
        matches!(&error, SessionError::NotEbb { found, .. } if found == "it speaks TLS"),
        "{error:?}"
    );
    assert!(error.to_string().contains("whether both sides use TLS"), "{error}");
    assert!(logged.contains("not TLS"), "{logged}");
}

#[test]
fn errors_of_files_name_the_option() {
    let authority = Authority::new("authority");
    let good = || authority.files("127.0.0.1", &Validity::Now);
    let problem = |files: Files| {
        let address = drive::loopback();
        let limits = TimeLimits::default();
        let destination =
            Listener::bind(&address, &tls(&files), &greeting("d"), &limits, &handle()).unwrap_err();
        let address = "tcp:127.0.0.1:1".parse().unwrap();
        // Found before anything connects.
        let source =
            connect(&address, &tls(&files), &greeting("s"), &limits, &handle()).unwrap_err();
        assert!(matches!(source, SessionError::TlsFile { .. }), "{source:?}");
        assert_eq!(source.to_string(), destination.to_string());
        source.to_string()
    };
    let unopened = |files: Files| {
        let error = try_tls(&files).unwrap_err();
        assert!(matches!(error, SessionError::TlsFile { .. }), "{error:?}");
        error.to_string()
    };
    let text = unopened(Files { certificate: "/nowhere/cert.pem".into(), ..good() });
    assert!(
        text.contains("--tls-cert")
            && text.contains("/nowhere/cert.pem")
            && text.contains("No such file"),
        "{text}"
    );
    // Reading these could wait for ever.
    let fifo = authority.write("fifo", "");
    std::fs::remove_file(&fifo).unwrap();
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, 0o600.into(), 0)
        .unwrap();
    for path in [fifo, "/dev/zero".into()] {
        let text = unopened(Files { key: path, ..good() });
        assert!(text.contains("--tls-key") && text.contains("not a regular file"), "{text}");
    }
    let text =
        problem(Files { authorities: authority.write("long.pem", &"a".repeat(2 << 20)), ..good() });
    assert!(text.contains("longer than 1 MiB"), "{text}");
    let text = problem(Files { key: authority.path(), ..good() });
    assert!(text.contains("--tls-key") && text.contains("no unencrypted private key"), "{text}");
    let text = problem(Files { authorities: authority.write("empty.pem", "nothing"), ..good() });
    assert!(text.contains("--tls-ca") && text.contains("no certificate"), "{text}");
    let text = problem(Files { key: good().key, ..good() });
    assert!(text.contains("does not belong to the certificate"), "{text}");
}

#[test]
fn tls_is_not_for_unix_sockets() {
    let authority = Authority::new("authority");
    let security = tls(&authority.files("127.0.0.1", &Validity::Now));
    let address = drive::unix("/tmp/never-made.sock".into());
    let error =
        Listener::bind(&address, &security, &greeting("d"), &TimeLimits::default(), &handle())
            .unwrap_err();
    assert!(matches!(error, SessionError::TlsOverUnix { .. }), "{error}");
}
