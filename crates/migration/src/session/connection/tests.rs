//! Writes that fail half-way, with TLS and without.

use std::os::unix::net::UnixStream;
use std::sync::Arc;

use rustls_pki_types::{PrivateKeyDer, ServerName};

use super::*;

/// Two ends of TLS without client certificates.
fn tls_pair() -> (rustls::Connection, rustls::Connection) {
    let made = rcgen::generate_simple_self_signed(vec!["a.example".to_owned()]).unwrap();
    let key = PrivateKeyDer::try_from(made.signing_key.serialize_der()).unwrap();
    let provider = || Arc::new(rustls::crypto::ring::default_provider());
    let mut roots = rustls::RootCertStore::empty();
    roots.add(made.cert.der().clone()).unwrap();
    let server = rustls::ServerConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![made.cert.der().clone()], key)
        .unwrap();
    let client = rustls::ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let name = ServerName::try_from("a.example").unwrap();
    let client = rustls::ClientConnection::new(Arc::new(client), name).unwrap();
    let server = rustls::ServerConnection::new(Arc::new(server)).unwrap();
    (client.into(), server.into())
}

fn connection(socket: UnixStream, tls: Option<rustls::Connection>, limit: Duration) -> Connection {
    socket.set_nonblocking(true).unwrap();
    let cancel = CancelHandle::new().unwrap();
    Connection::new(
        Wire::new(socket.into(), tls),
        "the other".to_owned(),
        Limit::Progress(limit),
        cancel,
    )
}

/// Reads everything up to the end of the connection.
fn read_all(connection: &mut Connection) -> Vec<u8> {
    let mut bytes = Vec::new();
    // With TLS an end without `close_notify` is an error, after the bytes before it.
    let _ = connection.read_to_end(&mut bytes);
    bytes
}

#[test]
fn the_rest_of_a_failed_write_is_never_sent() {
    for encrypted in [false, true] {
        let (near, far) = UnixStream::pair().unwrap();
        let (client, server) = tls_pair();
        let mut near = connection(near, encrypted.then_some(client), Duration::from_millis(200));
        let mut far = connection(far, encrypted.then_some(server), Duration::from_secs(20));
        std::thread::scope(|scope| {
            scope.spawn(|| near.handshake().unwrap());
            far.handshake().unwrap();
        });
        assert_eq!(near.is_encrypted(), encrypted);

        // The other end does not read, so the kernel accepts only a part of this.
        let frame: Vec<u8> = (0..8 << 20_u32).map(|index| (index % 251) as u8).collect();
        let (error, begun) = near.write_frame(&frame).unwrap_err();
        assert_eq!((error.kind(), begun), (io::ErrorKind::TimedOut, Begun::Perhaps));

        // The other side writes, which makes TLS process its queue, then reads everything.
        far.write_all(b"last words").unwrap();
        let mut heard = [0; 10];
        let (heard, received) = std::thread::scope(|scope| {
            let reader = scope.spawn(|| read_all(&mut far));
            near.read_exact(&mut heard).unwrap();
            assert_eq!(near.write(b"more").unwrap_err().kind(), io::ErrorKind::BrokenPipe);
            near.end_of_output();
            (heard, reader.join().unwrap())
        });
        assert_eq!(&heard, b"last words");
        assert!(received.len() < frame.len(), "all {} bytes have arrived", received.len());
        assert!(frame.starts_with(&received));
    }
}

#[test]
fn another_frame_may_follow_one_cancelled_before_its_first_byte() {
    let (near, far) = UnixStream::pair().unwrap();
    let mut near = connection(near, None, Duration::from_secs(20));
    let mut far = connection(far, None, Duration::from_secs(20));
    near.cancel.as_ref().unwrap().cancel();
    let (error, begun) = near.write_frame(b"never").unwrap_err();
    assert_eq!((Trouble::of(&error), begun), (Some(Trouble::Cancelled), Begun::No));
    near.ignore_cancel();
    near.write_frame(b"farewell").unwrap();
    near.end_of_output();
    assert_eq!(read_all(&mut far), b"farewell");
}

#[test]
fn a_vectored_write_accepts_all_buffers() {
    let (near, far) = UnixStream::pair().unwrap();
    let mut near = connection(near, None, Duration::from_secs(20));
    let mut far = connection(far, None, Duration::from_secs(20));
    let pieces: Vec<[u8; 3]> = (0..2000_u32).map(|piece| [piece as u8; 3]).collect();
    let slices: Vec<_> = pieces.iter().map(|piece| IoSlice::new(piece)).collect();
    // More than the kernel accepts at a time: an ordinary short write.
    let written = near.write_vectored(&slices).unwrap();
    assert_eq!(written, 1024 * 3);
    near.end_of_output();
    assert_eq!(read_all(&mut far), pieces.concat()[..written]);
}
