//! The socket device.

use std::path::PathBuf;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::ConfigError;
use super::options::Pairs;

/// Form of `--vsock`.
pub const VSOCK_FORM: &str = "path=PATH[,cid=N]";
/// The smallest CID of a guest (virtio 1.3 section 5.10.4); also the default.
pub const FIRST_GUEST_CID: u32 = 3;
/// Longest path in bytes: a socket's address has 107, and the longest port appended to the path has
/// 11 with its separator.
const MOST_PATH_BYTES: usize = 96;
/// Longest file name in bytes, for the companion's connections.
const MOST_NAME_BYTES: usize = 64;

/// The socket device of a machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VsockConfig {
    /// CID of the guest.
    pub cid: u32,
    /// The socket that clients of the host connect to. The guest's connections arrive at this path
    /// with `_` and the port appended.
    pub path: PathBuf,
}

/// The option `--vsock`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VsockOption {
    /// CID of the guest; `None` for that in a machine's description, or the default.
    pub cid: Option<u32>,
    /// As [`VsockConfig::path`].
    pub path: PathBuf,
}

impl VsockOption {
    /// The device, with this CID if the option has none.
    pub fn with_default_cid(self, cid: u32) -> VsockConfig {
        VsockConfig { cid: self.cid.unwrap_or(cid), path: self.path }
    }
}

impl FromStr for VsockOption {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let mut pairs = Pairs::parse("--vsock", VSOCK_FORM, text)?;
        let path = pairs.take("path").filter(|path| !path.is_empty()).map(PathBuf::from);
        let path = path.ok_or_else(|| {
            ConfigError::new("--vsock", "`path` is missing", format!("use {VSOCK_FORM}"))
        })?;
        let expected = "a number from 3 to 4294967294";
        let cid = pairs.take_parsed("cid", expected)?;
        if let Some(cid) = cid.filter(|cid| !is_guest_cid(*cid)) {
            return Err(pairs.error("cid", &cid.to_string(), expected));
        }
        pairs.finish()?;
        let option = Self { cid, path };
        option.clone().with_default_cid(FIRST_GUEST_CID).validate()?;
        Ok(option)
    }
}

/// Whether a guest may have this CID: not one of the reserved ones, of which the largest number
/// means any.
fn is_guest_cid(cid: u32) -> bool {
    (FIRST_GUEST_CID..u32::MAX).contains(&cid)
}

impl VsockConfig {
    /// Checks CID and path. Files are not opened.
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        if !is_guest_cid(self.cid) {
            return Err(ConfigError::new(
                "--vsock",
                format!("the CID {} is reserved", self.cid),
                "give cid=N with a number from 3 to 4294967294",
            ));
        }
        let name_bytes = self.path.file_name().map_or(0, std::ffi::OsStr::len);
        let path_bytes = self.path.as_os_str().len();
        if name_bytes == 0 || name_bytes > MOST_NAME_BYTES || path_bytes > MOST_PATH_BYTES {
            return Err(ConfigError::new(
                "--vsock",
                format!("the path has {path_bytes} bytes, {name_bytes} of them in the file name"),
                format!(
                    "give a path of at most {MOST_PATH_BYTES} bytes whose file name has 1 to \
                     {MOST_NAME_BYTES}"
                ),
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts() {
        let parse = |text: &str| text.parse::<VsockOption>();
        let option = parse("cid=7,path=/run/vm.vsock").unwrap();
        assert_eq!(option, VsockOption { cid: Some(7), path: "/run/vm.vsock".into() });
        assert_eq!(parse("path=a").unwrap().cid, None);
        assert_eq!(parse("path=a,cid=4294967294").unwrap().cid, Some(u32::MAX - 1));
        let long = format!("path=/{}", "x".repeat(65));
        let deep = format!("path=/{}x", "d/".repeat(50));
        for wrong in [
            "",
            "cid=3",
            "path=",
            "path=a,cid=2",
            "path=a,cid=0",
            "path=a,cid=4294967295",
            "path=a,cid=4294967296",
            "path=a,cid=-3",
            "path=a,cid=x",
            "path=a,port=3",
            "path=..",
            &long,
            &deep,
        ] {
            let error = parse(wrong).unwrap_err();
            assert_eq!(error.option, "--vsock", "{wrong}");
        }
    }
}
