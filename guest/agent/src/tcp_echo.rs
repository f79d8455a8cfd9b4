//! A server that sends back what arrives on each TCP connection, for measurements of requests.

use std::io::{self, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::thread;

/// Size of a read in bytes.
const BLOCK_BYTES: usize = 4096;
/// Stack of a connection's thread in bytes.
const STACK_BYTES: usize = 128 << 10;

/// Serves connections, each in a thread, until the process is killed.
///
/// # Errors
/// Those of the listener.
pub fn serve(listener: &TcpListener) -> io::Result<()> {
    loop {
        let (stream, _) = listener.accept()?;
        let thread = thread::Builder::new().stack_size(STACK_BYTES);
        // The client sees the end of a connection that fails.
        thread.spawn(move || drop(echo(stream)))?;
    }
}

fn echo(mut stream: TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut block = [0; BLOCK_BYTES];
    loop {
        match stream.read(&mut block)? {
            0 => return Ok(()),
            length => stream.write_all(&block[..length])?,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_get_their_own_bytes_back() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let address = listener.local_addr().unwrap();
        thread::spawn(move || serve(&listener));
        let mut clients =
            [b"first", b"other"].map(|text| (TcpStream::connect(address).unwrap(), text));
        for (client, text) in &mut clients {
            client.write_all(*text).unwrap();
        }
        for (client, text) in &mut clients {
            let mut back = [0; 5];
            client.read_exact(&mut back).unwrap();
            assert_eq!(back, **text);
        }
    }
}
