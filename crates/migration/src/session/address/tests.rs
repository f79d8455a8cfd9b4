use proptest::prelude::*;

use super::*;

fn parse(text: &str) -> Result<Address, String> {
    text.parse().map_err(|error: AddressError| error.to_string())
}

fn tcp(host: &str, port: u16) -> Address {
    Address::Tcp { host: host.to_owned(), port }
}

#[test]
fn addresses_survive_a_round_trip() {
    for (text, address) in [
        ("tcp:127.0.0.1:4444", tcp("127.0.0.1", 4444)),
        ("tcp:host-b.example:0", tcp("host-b.example", 0)),
        ("tcp:[::1]:65535", tcp("::1", 65535)),
        ("tcp:[fe80::1:2]:1", tcp("fe80::1:2", 1)),
        ("unix:/run/ebb/in.sock", Address::Unix { path: "/run/ebb/in.sock".into() }),
        ("unix:with space:and:colons", Address::Unix { path: "with space:and:colons".into() }),
    ] {
        assert_eq!(parse(text), Ok(address), "{text}");
        assert_eq!(parse(text).unwrap().to_string(), text);
    }
}

#[test]
fn invalid_addresses_are_refused_with_the_syntax() {
    let too_long_host = format!("tcp:{}:1", "h".repeat(254));
    for (text, part) in [
        ("", "neither tcp: nor unix:"),
        ("127.0.0.1:4444", "neither tcp: nor unix:"),
        ("TCP:127.0.0.1:4444", "neither tcp: nor unix:"),
        ("tcp:host", "has no port"),
        ("tcp:[::1]", "has no port"),
        ("tcp:[::1]4444", "has no port"),
        ("tcp:host:", "is not a number"),
        ("tcp:host:65536", "is not a number"),
        ("tcp:host:+1", "is not a number"),
        ("tcp:host:http", "is not a number"),
        ("tcp::4444", "it is empty"),
        ("tcp:::1:4444", "must be in brackets"),
        ("tcp:[::1:4444", "a ] is missing"),
        ("tcp:[host]:4444", "an IPv6 address"),
        ("tcp:ho st:4444", "characters"),
        ("tcp:host/path:4444", "characters"),
        (&too_long_host, "longer than 253"),
    ] {
        let error = parse(text).unwrap_err();
        assert!(error.contains(part), "{text}: {error}");
        assert!(error.contains("write tcp:HOST:PORT"), "{text}: {error}");
    }
    let too_long_path = format!("unix:/{}", "p".repeat(LONGEST_UNIX_PATH_BYTES));
    for (text, part) in
        [("unix:", "empty"), (&too_long_path, "107 bytes"), ("unix:a\0b", "zero byte")]
    {
        let error = parse(text).unwrap_err();
        assert!(error.contains(part), "{text}: {error}");
    }
    assert!(parse(&too_long_path[..too_long_path.len() - 1]).is_ok());
}

#[test]
fn relative_paths_are_made_absolute() {
    let absolute = |text: &str| parse(text).unwrap().absolute(Path::new("/home/user")).to_string();
    assert_eq!(absolute("unix:in.sock"), "unix:/home/user/in.sock");
    assert_eq!(absolute("unix:/run/in.sock"), "unix:/run/in.sock");
    assert_eq!(absolute("tcp:a:1"), "tcp:a:1");
}

#[test]
fn numbers_and_localhost_need_no_resolver() {
    let resolve = |host: &str| Address::resolve(host, 5).unwrap();
    assert_eq!(resolve("192.0.2.7"), ["192.0.2.7:5".parse().unwrap()]);
    assert_eq!(resolve("LocalHost"), ["127.0.0.1:5".parse().unwrap(), "[::1]:5".parse().unwrap()]);
}

proptest! {
    #[test]
    fn any_valid_address_survives_a_round_trip(
        text in "(tcp|unix|udp)?:?[a-z0-9.:\\[\\]/ -]{0,40}",
    ) {
        if let Ok(address) = parse(&text) {
            prop_assert_eq!(parse(&address.to_string()), Ok(address));
        }
    }
}
