//! Root file systems: Debian 12 in an ext4 image.

use std::fs;
use std::path::{Path, PathBuf};

use super::{run, scratch, tool};
use crate::cache::{Cache, Key};
use crate::error::HostError;

/// Debian's release.
const RELEASE: &str = "bookworm";
/// Change this when the commands below change.
const VERSION: u32 = 1;
/// Name of the image in its directory of the cache.
const IMAGE: &str = "root.ext4";
/// The Python of that release, for which packages are fetched.
const PYTHON: &str = "3.11";
/// The C libraries with which that Python's packages may have been built.
const PLATFORMS: [&str; 4] =
    ["manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "any"];

/// What a root file system consists of.
#[derive(Debug, Clone, Copy)]
pub struct Root {
    /// Its name.
    pub name: &'static str,
    /// Debian's packages besides the essential ones.
    pub packages: &'static [&'static str],
    /// Python's packages, as lines of pip's requirements; they are installed in the virtual
    /// environment `/opt/python`.
    pub python: &'static str,
    /// A shell script that completes the tree, whose path is its first argument.
    pub script: &'static str,
    /// Free space in the file system, in MiB.
    pub free_mib: u64,
}

impl Root {
    /// The root of a guest with systemd, network by DHCP, ssh, Python, and what measures network
    /// and disks.
    pub const GUEST: Self = Self {
        name: "guest",
        packages: &[
            "systemd-sysv",
            "udev",
            "dbus",
            "iproute2",
            "openssh-server",
            "python3-minimal",
            "socat",
            "iperf3",
            "fio",
            "curl",
        ],
        python: "",
        script: include_str!("guest.sh"),
        free_mib: 128,
    };

    /// The root of a guest that works: a C compiler with a source to build, Python with its own
    /// tests. It needs the initramfs of test guests, whose agent becomes a service of it.
    pub const WORK: Self = Self {
        name: "work",
        packages: &[
            "systemd-sysv",
            "udev",
            "dbus",
            "gcc",
            "libc6-dev",
            "make",
            "python3",
            "libpython3.11-testsuite",
        ],
        python: "",
        script: include_str!("work.sh"),
        free_mib: 256,
    };

    /// The root of a virtual host, for programs that start guests: Firecracker's clients, passt,
    /// ssh.
    pub const HOST: Self = Self {
        name: "host",
        packages: &[
            "iproute2",
            "iptables",
            "nftables",
            "python3-nftables",
            "procps",
            "openssh-client",
            "python3",
            "python3-venv",
            "passt",
            "socat",
            "curl",
            "e2fsprogs",
            "openssl",
            "kmod",
            "iperf3",
        ],
        python: include_str!("clients.txt"),
        script: include_str!("host.sh"),
        free_mib: 6 << 10,
    };
}

/// The image of a root file system, made if the cache does not have it: a minute, from Debian's
/// mirror. Needs root, because the files of the tree belong to several users.
pub fn root(root: &Root, cache: &Cache) -> Result<PathBuf, HostError> {
    let directory = cache.directory(key(root), |directory| make(root, directory))?;
    Ok(directory.join(IMAGE))
}

/// The same if the cache has it.
pub(super) fn made(root: &Root, cache: &Cache) -> Option<PathBuf> {
    Some(cache.existing(key(root))?.join(IMAGE))
}

fn key(root: &Root) -> Key {
    Key::new("Debian root", VERSION)
        .with_bytes(root.packages.join(",").as_bytes())
        .with_bytes(root.python.as_bytes())
        .with_bytes(root.script.as_bytes())
        .with_bytes(&root.free_mib.to_le_bytes())
}

fn make(root: &Root, target: &Path) -> Result<(), HostError> {
    let mut mkfs = tool("mkfs.ext4", "e2fsprogs")?;
    let mut mmdebstrap = tool("mmdebstrap", "mmdebstrap")?;
    if !rustix::process::geteuid().is_root() {
        return Err(HostError::Configuration(format!(
            "the root file system `{}` of Debian's packages is made as root, once: run `ebb-lab \
             debian` as root with this user's HOME",
            root.name
        )));
    }
    tracing::info!(name = root.name, "making a Debian root file system, which takes a minute");
    let scratch = scratch()?;
    let tree = scratch.path().join("tree");
    let script = scratch.path().join("script.sh");
    fs::write(&script, root.script).map_err(HostError::io("cannot write a script"))?;
    mmdebstrap.args(["--mode=root", "--variant=minbase", "--dpkgopt=force-unsafe-io"]);
    for directory in ["doc", "man", "locale"] {
        mmdebstrap.arg(format!("--dpkgopt=path-exclude=/usr/share/{directory}/*"));
    }
    mmdebstrap.arg(format!("--include={}", root.packages.join(",")));
    if !root.python.is_empty() {
        let wheels = wheels(root.python, scratch.path())?;
        mmdebstrap.arg(format!("--customize-hook=copy-in {} /var/tmp", wheels.display()));
        mmdebstrap.arg(
            "--customize-hook=chroot \"$1\" python3 -m venv /opt/python && \
             chroot \"$1\" env -u PIP_FIND_LINKS -u PIP_CERT /opt/python/bin/pip install -q \
             --no-index --find-links /var/tmp/wheels -r /var/tmp/wheels/requirements.txt && \
             rm -r \"$1/var/tmp/wheels\"",
        );
    }
    mmdebstrap.arg(format!("--customize-hook=sh -eu {} \"$1\"", script.display()));
    run(mmdebstrap.arg(RELEASE).arg(&tree), "making a root file system of Debian's packages")?;
    let mut usage = tool("du", "coreutils")?;
    let usage = run(usage.args(["-sm"]).arg(&tree), "measuring a root file system")?;
    let used_mib: u64 = String::from_utf8_lossy(&usage)
        .split_whitespace()
        .next()
        .and_then(|number| number.parse().ok())
        .ok_or_else(|| HostError::Protocol("du has printed no number".to_owned()))?;
    // File systems of many small files need an eighth more than their files.
    let size_mib = used_mib + used_mib / 8 + root.free_mib;
    mkfs.args(["-q", "-m", "0", "-L", root.name, "-d"]).arg(&tree);
    mkfs.arg(target.join(IMAGE)).arg(format!("{size_mib}M"));
    run(&mut mkfs, "making an ext4 image")?;
    Ok(())
}

/// Fetches Python's packages into a directory, which is returned.
fn wheels(requirements: &str, scratch: &Path) -> Result<PathBuf, HostError> {
    let directory = scratch.join("wheels");
    let list = directory.join("requirements.txt");
    fs::create_dir(&directory)
        .and_then(|()| fs::write(&list, requirements))
        .map_err(HostError::io("cannot write the list of Python's packages"))?;
    let mut pip = tool("pip3", "python3-pip")?;
    pip.args(["download", "-q", "--no-deps", "--only-binary=:all:", "--implementation=cp"]);
    pip.arg(format!("--python-version={PYTHON}"));
    for platform in PLATFORMS {
        pip.arg(format!("--platform={platform}"));
    }
    run(pip.arg("-d").arg(&directory).arg("-r").arg(&list), "fetching Python's packages")?;
    Ok(directory)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pythons_packages_are_pinned() {
        let lines: Vec<_> =
            Root::HOST.python.lines().filter(|line| !line.starts_with('#')).collect();
        assert!(lines.iter().all(|line| line.contains("==")), "{lines:?}");
        for client in ["microheart", "firecracker-python", "smolvm"] {
            assert!(lines.iter().any(|line| line.starts_with(client)), "{client}");
        }
    }
}
