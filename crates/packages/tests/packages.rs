//! Builds the Debian packages from the programs of this build, and installs, uses, upgrades and
//! removes them in a clean Debian tree.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const RELEASE: &str = "bookworm";
/// Beside the essential packages and apt.
const TREE_PACKAGES: &str = "man-db,systemd";
/// Used if the machine has no source of this release.
const MIRROR: &str = "http://deb.debian.org/debian";
/// Makes the archive `$1` of a tree. In memory this is several times faster, but only root may
/// mount.
const MAKE_TREE: &str = r#"
set -eu
new=$1.new.tar packages=$2 release=$3 mirror=$4
set -- mmdebstrap --quiet --variant=minbase --dpkgopt=force-unsafe-io --include="$packages" \
    "$release" "$new" "$mirror"
if [ "$(id -u)" = 0 ]; then
    unshare --mount --propagation private \
        sh -c 'mount -t tmpfs tree /mnt && TMPDIR=/mnt exec "$@"' sh "$@"
else
    "$@"
fi
mv "$new" "${new%.new.tar}"
"#;

fn run(program: impl AsRef<OsStr>, arguments: &[impl AsRef<OsStr>]) -> String {
    let program = program.as_ref();
    let name = program.display();
    let output = Command::new(program)
        .args(arguments)
        // The packages of a test are not distributed: compressing them well takes long.
        .env("DPKG_DEB_COMPRESSOR_LEVEL", "0")
        .output()
        .unwrap_or_else(|error| {
            panic!("{name}: {error}; scripts/install-deps.sh installs what is missing")
        });
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{name}: {}\n{text}{errors}", output.status);
    text.into_owned()
}

/// The archive of a clean tree, made once.
fn tree() -> PathBuf {
    let name = format!("{RELEASE}-{}.tar", TREE_PACKAGES.replace(',', "-"));
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    if !path.exists() {
        let release = format!("Release: {RELEASE}");
        let sources = ["Created-By: Packages", "Component: main", &release];
        let mirrors =
            run("apt-get", &[&["indextargets", "--format", "$(REPO_URI)"], &sources[..]].concat());
        let mirror = mirrors.lines().find(|line| line.starts_with("http")).unwrap_or(MIRROR);
        let archive = path.to_str().expect("a path of text");
        run("sh", &["-c", MAKE_TREE, "sh", archive, TREE_PACKAGES, RELEASE, mirror]);
    }
    path
}

/// Packages of this version, in a directory of their own.
fn build(version: &str, output: &Path) -> PathBuf {
    let programs = Path::new(env!("CARGO_BIN_EXE_ebb-packages")).parent().unwrap();
    for program in ["ebb", "ebb-guest-agent"] {
        let file = programs.join(program);
        assert!(file.exists(), "no {}: cargo build -p ebb -p ebb-guest-agent", file.display());
    }
    run(
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/build-deb.sh"),
        &[programs.as_os_str(), output.as_os_str(), version.as_ref()],
    );
    output.to_owned()
}

#[test]
fn packages_in_a_clean_debian_tree() {
    let directory = tempfile::tempdir().unwrap();
    let version = env!("CARGO_PKG_VERSION");
    let old = build(version, &directory.path().join("old"));
    let new = build(&format!("{version}.1"), &directory.path().join("new"));

    let again = build(version, &directory.path().join("again"));
    for package in ["ebb", "ebb-guest-agent"] {
        let name = format!("{package}_{version}-1_amd64.deb");
        let [first, second] =
            [&old, &again].map(|each| fs::read(each.join(&name)).expect("a package"));
        assert!(first == second, "{name} is another one each time");
    }

    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/clean_tree.sh");
    print!("{}", run(script, &[tree(), old, new]));
}
