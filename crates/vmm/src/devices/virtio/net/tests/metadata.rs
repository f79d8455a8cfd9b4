//! The metadata service at a device.

use std::str::FromStr as _;

use super::*;
use crate::mmds::Served;

/// A question for the address of the metadata service is answered by the device; other frames go
/// to the backend.
#[test]
fn frames_to_the_metadata_service_stay_in_the_machine() {
    let served = || {
        let service = crate::mmds::Metadata::new(100);
        Some(Served { service, address: crate::mmds::DEFAULT_ADDRESS })
    };
    let mut question = vec![0xff; 6];
    question.extend([2; 6]);
    question.extend([8, 6, 0, 1, 8, 0, 6, 4, 0, 1, 2, 2, 2, 2, 2, 2, 10, 0, 0, 2]);
    question.extend([0, 0, 0, 0, 0, 0, 169, 254, 169, 254]);
    let mut other = question.clone();
    other[41] = 1;
    let config = || NetConfig { metadata: served(), ..NetConfig::from_str("fd=9").unwrap() };
    let (ours, theirs) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::NONBLOCK, None)
            .unwrap();
    let over_tap = pair_with(&config(), OpenNet::tap(Port::Open(ours.into())), MERGEABLE);
    let (ours, mut stream) = UnixStream::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    let port = Port::Open(OwnedFd::from(ours).into());
    let over_stream = pair_with(&config(), OpenNet::stream(port), MERGEABLE);
    for mut pair in [over_tap, over_stream] {
        for frame in [&other, &question, &other] {
            pair.send(frame);
        }
        // Without a buffer, the answer waits for one.
        assert!(pair.net.process_queue(TRANSMIT).interrupt);
        assert_eq!((pair.used(TRANSMIT), pair.used(RECEIVE)), (3, 0));
        pair.add(RECEIVE, DATA + 0x8_0000, 2048);
        assert!(pair.net.process_queue(RECEIVE).interrupt);
        assert_eq!(pair.used(RECEIVE), 1);
        let answer = pair.bytes(DATA + 0x8_0000 + HEADER_BYTES as u64, 42);
        assert_eq!((&answer[..6], &answer[20..22]), (&[2; 6][..], &[0, 2][..]));
        assert_eq!(answer[28..32], [169, 254, 169, 254]);
        assert_eq!((pair.count(|c| &c.sent), pair.count(|c| &c.received)), (3, 1));
        pair.net.reset();
    }
    let mut buffer = [0; 300];
    for _ in 0..2 {
        let length = rustix::io::read(&theirs, &mut buffer).unwrap();
        assert_eq!(buffer[HEADER_BYTES..length], other);
    }
    // Nothing else.
    assert_eq!(rustix::io::read(&theirs, &mut buffer).unwrap_or(0), 0);
    let length = stream.read(&mut buffer).unwrap();
    let framed = [&42_u32.to_be_bytes(), &other[..]].concat();
    assert_eq!(buffer[..length], [&framed[..], &framed].concat());
}

/// Another TCP, Linux's, and an HTTP client that is not ours. Makes an interface: `cargo test -p
/// ebb-vmm linux_and_curl -- --ignored` as root.
#[test]
#[ignore = "makes a tap interface and needs curl"]
fn linux_and_curl_read_metadata() {
    use std::process::{Command, Stdio};
    let name = "ebbmmds0";
    let ip = |line: &str| {
        assert!(Command::new("ip").args(line.split(' ')).status().unwrap().success(), "ip {line}");
    };
    ip(&format!("tuntap add dev {name} mode tap"));
    let tap = Tap::open(name).unwrap();
    ip(&format!("addr add 10.97.0.2/24 dev {name}"));
    ip(&format!("link set {name} up"));
    ip(&format!("route add 169.254.169.254 dev {name}"));
    let service = crate::mmds::Metadata::new(100_000);
    let large = "y".repeat(60_000);
    service.lock().store.put(serde_json::json!({ "a": { "b": "c" }, "large": large })).unwrap();
    let served = Served { service: service.clone(), address: crate::mmds::DEFAULT_ADDRESS };
    let mut stack = Stack::new(served, None, Instant::now());
    let fd = tap.port.fd().unwrap().clone();
    let mut curl = |line: &str| {
        let mut child = Command::new("curl")
            .args(["-s", "-m", "20"])
            .args(line.split(' '))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut output = child.stdout.take().unwrap();
        let reader = std::thread::spawn(move || {
            let mut text = String::new();
            output.read_to_string(&mut text).unwrap();
            text
        });
        let mut buffer = vec![0; 70_000];
        while child.try_wait().unwrap().is_none() {
            while let Ok(length) = rustix::io::read(&fd, &mut buffer) {
                let frame = &buffer[HEADER_BYTES..length];
                if stack.takes(frame) {
                    stack.receive(frame, Instant::now());
                }
            }
            stack.run(Instant::now());
            while let Some(frame) = stack.frame() {
                rustix::io::write(&fd, &with_header(frame)).unwrap();
                stack.skip();
            }
            let mut fds = [rustix::event::PollFd::new(&fd, PollFlags::IN)];
            let wait = rustix::event::Timespec { tv_sec: 0, tv_nsec: 2_000_000 };
            rustix::event::poll(&mut fds, Some(&wait)).unwrap();
        }
        reader.join().unwrap()
    };
    let at = "http://169.254.169.254";
    assert_eq!(curl(&format!("{at}/a/b")), "c");
    // Two requests on a connection.
    assert_eq!(curl(&format!("{at}/a {at}/")), "ba/\nlarge");
    assert_eq!(curl(&format!("{at}/large")), large);
    assert_eq!(curl(&format!("-H Accept:application/json {at}/a")), r#"{"b":"c"}"#);
    service.lock().sessions = crate::mmds::Sessions::Required;
    assert_eq!(curl(&format!("-o /dev/null -w %{{http_code}} {at}/a")), "401");
    let token =
        curl(&format!("-X PUT -H X-aws-ec2-metadata-token-ttl-seconds:60 {at}/latest/api/token"));
    assert_eq!(curl(&format!("-H X-aws-ec2-metadata-token:{token} {at}/a")), "b");
    assert_eq!(curl(&format!("-o /dev/null -w %{{http_code}} -X POST {at}/a")), "501");
    ip(&format!("link del {name}"));
}
