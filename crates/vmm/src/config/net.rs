//! Network devices.

use std::fmt;
use std::str::FromStr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::options::Pairs;
use super::{ConfigError, RateLimits};
use crate::mmds::Served;

/// Form of `--net`.
pub const NET_FORM: &str = "tap=NAME|fd=N|user[,mac=MAC|random][,mtu=N][,ports=8080:80+2222:22]\
    [,rx_bandwidth=SIZE][,rx_bandwidth_burst=SIZE][,rx_ops=N][,rx_ops_burst=N]\
    [,tx_bandwidth=SIZE][,tx_bandwidth_burst=SIZE][,tx_ops=N][,tx_ops_burst=N]";
/// Smallest MTU that a device may announce (virtio 1.3 section 5.1.4.1).
const LEAST_MTU: u16 = 68;
/// Longest name of an interface (Linux `IFNAMSIZ`, less the final zero).
const MOST_NAME_BYTES: usize = 15;
/// Most forwarded ports of a device.
const MOST_PORTS: usize = 64;

/// A network device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetConfig {
    /// What connects it with the host.
    pub backend: NetBackend,
    /// Its address; `None` until the machine is built, for a random one.
    pub mac: Option<MacAddress>,
    /// The MTU that it announces to the guest; `None` for no announcement.
    pub mtu: Option<u16>,
    /// Limits of the frames to the guest. Like those of disks, not part of the machine's
    /// description.
    #[serde(skip)]
    pub receive_limits: RateLimits,
    /// Limits of the frames from the guest.
    #[serde(skip)]
    pub transmit_limits: RateLimits,
    /// The metadata service that it reaches, which Firecracker's API sets up.
    #[serde(skip)]
    pub metadata: Option<Served>,
}

/// What connects a network device with the host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NetBackend {
    /// The tap interface with this name, which exists.
    Tap(String),
    /// An open descriptor of the monitor: a tap interface, or a stream socket with frames like
    /// those of passt.
    Descriptor(i32),
    /// passt, which needs no rights, and forwards these TCP ports of the host.
    User(Vec<PortForward>),
}

impl fmt::Display for NetBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tap(name) => write!(f, "tap={name}"),
            Self::Descriptor(number) => write!(f, "fd={number}"),
            Self::User(_) => f.write_str("user"),
        }
    }
}

/// A TCP port of the host whose connections go to the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortForward {
    /// Port of the host.
    pub host: u16,
    /// Port of the guest.
    pub guest: u16,
}

impl FromStr for PortForward {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let (host, guest) = text.split_once(':').unwrap_or((text, text));
        let port = |text: &str| text.parse().ok().filter(|port| *port != 0).ok_or(());
        Ok(Self { host: port(host)?, guest: port(guest)? })
    }
}

/// A MAC address of one interface (IEEE 802: 48 bits, not a group's).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(try_from = "String", into = "String")]
#[schemars(with = "String")]
pub struct MacAddress([u8; 6]);

impl MacAddress {
    /// A random address that is administered locally.
    pub fn random() -> Self {
        let mut bytes = [0; 6];
        // Six bytes are never cut short, nor interrupted (getrandom(2)).
        let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
        bytes[0] = bytes[0] & 0xfc | 0x02;
        Self(bytes)
    }

    /// Its bytes in the order of the network.
    pub fn bytes(self) -> [u8; 6] {
        self.0
    }
}

impl fmt::Display for MacAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = self.0.map(|byte| format!("{byte:02x}"));
        f.write_str(&parts.join(":"))
    }
}

impl fmt::Debug for MacAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for MacAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let invalid = || format!("{text:?} is not the MAC address of an interface");
        let parts: Vec<u8> = text
            .split(':')
            .map(|part| match part.len() {
                2 => u8::from_str_radix(part, 16).map_err(|_| invalid()),
                _ => Err(invalid()),
            })
            .collect::<Result<_, _>>()?;
        let bytes: [u8; 6] = parts.try_into().map_err(|_| invalid())?;
        if bytes == [0; 6] || bytes[0] & 1 != 0 || text.contains('+') {
            return Err(invalid());
        }
        Ok(Self(bytes))
    }
}

impl TryFrom<String> for MacAddress {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<MacAddress> for String {
    fn from(mac: MacAddress) -> Self {
        mac.to_string()
    }
}

impl FromStr for NetConfig {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        // `user` stands alone.
        let rest =
            text.strip_prefix("user").filter(|rest| matches!(rest.as_bytes(), [] | [b',', ..]));
        let named = rest.map(|rest| format!("user=on{rest}"));
        let mut pairs = Pairs::parse("--net", NET_FORM, named.as_deref().unwrap_or(text))?;
        let tap = pairs.take("tap").map(str::to_owned);
        let descriptor = pairs.take_parsed("fd", "the number of an open descriptor")?;
        let user = pairs.take("user");
        let ports = take_ports(&mut pairs)?;
        let backend = match (tap, descriptor, user) {
            (Some(name), None, None) => NetBackend::Tap(name),
            (None, Some(number), None) => NetBackend::Descriptor(number),
            (None, None, Some("on")) => NetBackend::User(ports.clone().unwrap_or_default()),
            _ => {
                return Err(ConfigError::new(
                    "--net",
                    format!("`{text}` does not name one backend"),
                    format!("use {NET_FORM}"),
                ));
            }
        };
        if ports.is_some() && !matches!(backend, NetBackend::User(_)) {
            let remedy = "on a tap interface, the host's own routing and firewall forward";
            return Err(ConfigError::new("--net", "`ports` is for `user` only", remedy));
        }
        let config = Self {
            backend,
            mac: take_mac(&mut pairs)?,
            mtu: pairs.take_parsed("mtu", "a number from 68 to 65535")?,
            receive_limits: RateLimits::take_prefixed(&mut pairs, "rx_")?,
            transmit_limits: RateLimits::take_prefixed(&mut pairs, "tx_")?,
            metadata: None,
        };
        pairs.finish()?;
        config.validate()?;
        Ok(config)
    }
}

/// `random` is another address also for a machine that continues, which otherwise keeps its own.
fn take_mac(pairs: &mut Pairs<'_>) -> Result<Option<MacAddress>, ConfigError> {
    let Some(text) = pairs.take("mac") else { return Ok(None) };
    if text == "random" {
        return Ok(Some(MacAddress::random()));
    }
    let form = "an address of one interface, 02:…, or `random`";
    text.parse().map(Some).map_err(|_| pairs.error("mac", text, form))
}

fn take_ports(pairs: &mut Pairs<'_>) -> Result<Option<Vec<PortForward>>, ConfigError> {
    let Some(text) = pairs.take("ports") else { return Ok(None) };
    let ports: Result<Vec<_>, ()> = text.split('+').map(str::parse).collect();
    let ports = ports.ok().filter(|ports| ports.len() <= MOST_PORTS);
    let form = "ports of the host and of the guest, 8080:80+2222:22";
    ports.map(Some).ok_or_else(|| pairs.error("ports", text, form))
}

impl NetConfig {
    /// Checks the values. Nothing is opened.
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        if let NetBackend::Tap(name) = &self.backend {
            let is_name = |byte: u8| byte.is_ascii_graphic() && byte != b'/' && byte != b'%';
            let fits = (1..=MOST_NAME_BYTES).contains(&name.len());
            if !fits || !name.bytes().all(is_name) {
                return Err(ConfigError::new(
                    "--net",
                    format!("tap={name:?} is not the name of an interface"),
                    "give one of at most 15 characters, as `ip link` shows it",
                ));
            }
        }
        if let NetBackend::Descriptor(number) = self.backend
            && number < 3
        {
            return Err(ConfigError::new(
                "--net",
                format!("fd={number} is a standard stream"),
                "give the number of a descriptor that the monitor inherits, from 3 on",
            ));
        }
        if self.mtu.is_some_and(|mtu| mtu < LEAST_MTU) {
            return Err(ConfigError::new(
                "--net",
                format!("mtu={} is too small", self.mtu.unwrap_or_default()),
                format!("give a number from {LEAST_MTU} to 65535"),
            ));
        }
        Ok(())
    }
}

/// Checks each device, and that no two have the same address or the same interface.
pub(super) fn validate(nets: &[NetConfig]) -> Result<(), ConfigError> {
    for (index, net) in nets.iter().enumerate() {
        net.validate()?;
        for other in &nets[..index] {
            let is_user = matches!(net.backend, NetBackend::User(_));
            if net.backend == other.backend && !is_user {
                return Err(ConfigError::new(
                    "--net",
                    format!("{} is given twice", net.backend),
                    "give each device an interface of its own",
                ));
            }
            if let Some(mac) = net.mac.filter(|_| net.mac == other.mac) {
                return Err(ConfigError::new(
                    "--net",
                    format!("mac={mac} is given twice"),
                    "give each device an address of its own",
                ));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn options_are_parsed() {
        let parse = |text: &str| text.parse::<NetConfig>();
        let net =
            parse("tap=tap0,mac=02:00:00:00:00:0A,mtu=9000,tx_ops=5,rx_bandwidth=1M").unwrap();
        assert_eq!(net.backend, NetBackend::Tap("tap0".to_owned()));
        assert_eq!(net.mac.unwrap().to_string(), "02:00:00:00:00:0a");
        assert_eq!(net.mtu, Some(9000));
        assert_eq!(
            (net.transmit_limits.ops, net.receive_limits.bandwidth),
            (Some(5), Some(1 << 20))
        );
        let net = parse("user,ports=8080:80+22").unwrap();
        let ports = [PortForward { host: 8080, guest: 80 }, PortForward { host: 22, guest: 22 }];
        assert_eq!(net.backend, NetBackend::User(ports.to_vec()));
        assert_eq!(parse("user").unwrap().backend, NetBackend::User(Vec::new()));
        assert_eq!(parse("fd=7").unwrap().backend, NetBackend::Descriptor(7));
        for (wrong, found) in [
            ("", "does not name one"),
            ("userx", "not of the form"),
            ("user=off", "does not name one"),
            ("tap=a,fd=3", "does not name one"),
            ("tap=", "not the name"),
            ("tap=a/b", "not the name"),
            ("tap=tap%d", "not the name"),
            ("tap=sixteen-letters-", "not the name"),
            ("fd=2", "standard stream"),
            ("fd=x", "fd=x"),
            ("tap=a,mtu=67", "mtu=67"),
            ("tap=a,mtu=65536", "mtu=65536"),
            ("tap=a,mac=01:00:00:00:00:00", "mac=01"),
            ("tap=a,mac=00:00:00:00:00:00", "mac=00"),
            ("tap=a,mac=02:00:00:00:00", "mac=02"),
            ("tap=a,mac=02:00:00:00:00:0g", "mac=02"),
            ("tap=a,ports=1:2", "`ports`"),
            ("user,ports=0:2", "ports=0:2"),
            ("user,ports=1:2+", "ports=1:2+"),
            ("tap=a,tx_ops_burst=1", "tx_ops_burst"),
            ("tap=a,bandwidth=1", "`bandwidth` is unknown"),
        ] {
            let error = parse(wrong).unwrap_err();
            assert!(
                error.option == "--net" && error.to_string().contains(found),
                "{wrong}: {error}"
            );
        }
    }

    #[test]
    fn devices_share_neither_interface_nor_address() {
        let parse = |texts: [&str; 2]| validate(&texts.map(|text| text.parse().unwrap()));
        parse(["user", "user"]).unwrap();
        parse(["tap=a", "tap=b"]).unwrap();
        for texts in [
            ["tap=a", "tap=a"],
            ["fd=3", "fd=3"],
            ["user,mac=02:00:00:00:00:01", "tap=a,mac=02:00:00:00:00:01"],
        ] {
            assert!(parse(texts).unwrap_err().to_string().contains("twice"), "{texts:?}");
        }
    }

    #[test]
    fn random_addresses_are_local_and_differ() {
        let (first, second) = (MacAddress::random(), MacAddress::random());
        assert_ne!(first, second);
        let given = || "tap=a,mac=random".parse::<NetConfig>().unwrap().mac.unwrap();
        let (third, fourth) = (given(), given());
        assert_ne!(third, fourth);
        for mac in [first, second, third, fourth] {
            assert_eq!(mac.bytes()[0] & 3, 2);
            assert_eq!(mac.to_string().parse(), Ok(mac));
        }
    }

    proptest! {
        #[test]
        fn any_text_is_parsed(text in "(tap=|fd=|user|,|mac=|mtu=|ports=|:|[+]|[0-9a-f]{1,3}|.)*") {
            if let Ok(net) = text.parse::<NetConfig>() {
                prop_assert!(net.validate().is_ok());
            }
        }
    }
}
