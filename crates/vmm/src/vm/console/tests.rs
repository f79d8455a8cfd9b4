use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;

use super::*;

/// A client, its other end, and the output that it receives. The sockets block.
fn client() -> (Client, UnixStream, ConsoleOutput) {
    let (socket, other) = UnixStream::pair().unwrap();
    let wake = EventFd::new(libc::EFD_NONBLOCK).unwrap();
    let output = ConsoleOutput::nowhere().keeping(wake);
    let client = Client { socket: socket.into(), position: 0, is_full: false, ended: false };
    (client, other, output)
}

#[test]
fn output_comes_in_order_also_if_the_rest_is_discarded() {
    let (mut client, mut other, mut output) = client();
    let recent = output.recent().unwrap().clone();
    output.write_all(b"early ").unwrap();
    client.send(&recent).unwrap();
    output.write_all(b"late").unwrap();
    client.send(&recent).unwrap();
    let mut seen = [0; 10];
    other.read_exact(&mut seen).unwrap();
    assert_eq!(&seen, b"early late");
}

#[test]
fn a_client_that_does_not_read_is_not_waited_for() {
    let (mut client, mut other, mut output) = client();
    let recent = output.recent().unwrap().clone();
    while !client.is_full {
        output.write_all(&[b'x'; 4096]).unwrap();
        client.send(&recent).unwrap();
    }
    output.write_all(&vec![b'y'; 64 << 10]).unwrap();
    client.send(&recent).unwrap();
    assert!(client.is_full);
    other.set_nonblocking(true).unwrap();
    let mut seen = Vec::new();
    let _ = other.read_to_end(&mut seen);
    assert!(seen.iter().all(|&byte| byte == b'x'), "nothing later was sent");
    client.send(&recent).unwrap();
    assert!(!client.is_full);
    let mut seen = Vec::new();
    let _ = other.read_to_end(&mut seen);
    assert!(!seen.is_empty() && seen.iter().all(|&byte| byte == b'y'), "old output is missed");
}

#[test]
fn input_is_taken_in_parts() {
    let (mut client, mut other, _output) = client();
    assert_eq!(client.receive(), Ok(Vec::new()), "the socket blocks, the call does not");
    other.write_all(&[7; INPUT_BYTES + 1]).unwrap();
    assert_eq!(client.receive().unwrap().len(), INPUT_BYTES);
    assert_eq!(client.receive().unwrap(), [7]);
    assert!(!client.ended);
    other.shutdown(std::net::Shutdown::Write).unwrap();
    assert_eq!(client.receive(), Ok(Vec::new()));
    assert!(client.ended, "but it may still read");
}

#[test]
fn a_client_that_is_gone_is_an_error() {
    let (mut client, other, mut output) = client();
    drop(other);
    output.write_all(b"x").unwrap();
    let recent = output.recent().unwrap().clone();
    assert_eq!(client.send(&recent), Err(Errno::PIPE));
}

#[test]
fn a_socket_of_another_kind_is_an_error() {
    let (mut client, _other, _output) = client();
    client.socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap().into();
    assert!(client.receive().is_err());
}
