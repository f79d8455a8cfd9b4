//! Builds the Debian packages from the programs of this build, and installs, uses, upgrades and
//! removes them in clean Debian trees.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

const RELEASE: &str = "bookworm";
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

/// The archive of a clean tree with these packages beside the essential ones and apt, made once.
fn tree(packages: &[&str]) -> PathBuf {
    let name = format!("{RELEASE}-{}.tar", packages.join("-"));
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    if !path.exists() {
        let release = format!("Release: {RELEASE}");
        let sources = ["Created-By: Packages", "Component: main", &release];
        let mirrors =
            run("apt-get", &[&["indextargets", "--format", "$(REPO_URI)"], &sources[..]].concat());
        let mirror = mirrors.lines().find(|line| line.starts_with("http")).unwrap_or(MIRROR);
        let archive = path.to_str().expect("a path of text");
        run("sh", &["-c", MAKE_TREE, "sh", archive, &packages.join(","), RELEASE, mirror]);
    }
    path
}

/// Packages of this version, alone in a directory.
fn build(version: &str, name: &str) -> PathBuf {
    let programs = Path::new(env!("CARGO_BIN_EXE_ebb-packages")).parent().unwrap();
    for program in ["ebb", "ebbd", "ebb-guest-agent"] {
        let file = programs.join(program);
        let remedy = "cargo build -p ebb -p ebbd -p ebb-guest-agent";
        assert!(file.exists(), "no {}: {remedy}", file.display());
    }
    let output = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("packages-{name}"));
    if output.exists() {
        fs::remove_dir_all(&output).unwrap();
    }
    run(
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/build-deb.sh"),
        &[programs.as_os_str(), output.as_os_str(), version.as_ref()],
    );
    output
}

const VERSION: &str = env!("CARGO_PKG_VERSION");
static OLD: LazyLock<PathBuf> = LazyLock::new(|| build(VERSION, "old"));
static NEW: LazyLock<PathBuf> = LazyLock::new(|| build(&format!("{VERSION}.1"), "new"));

/// Runs a script of this directory with a tree of these packages and both versions.
fn in_a_clean_tree(script: &str, packages: &[&str]) {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(script);
    print!("{}", run(script, &[&tree(packages), &OLD, &NEW]));
}

#[test]
fn programs_in_a_clean_debian_tree() {
    in_a_clean_tree("program_tree.sh", &["man-db", "systemd"]);
}

#[test]
fn service_in_a_clean_debian_system() {
    in_a_clean_tree("service_tree.sh", &["dbus", "systemd-sysv"]);
}

#[test]
fn module_in_a_clean_debian_tree() {
    let packages = ["dkms", "linux-headers-cloud-amd64", "linux-image-cloud-amd64", "openssl"];
    in_a_clean_tree("module_tree.sh", &packages);
}

#[test]
fn the_same_programs_make_the_same_packages() {
    let again = build(VERSION, "again");
    for name in ["ebb", "ebbd", "ebb-guest-agent", "ebb-balloon-dkms"] {
        let architecture = if name == "ebb-balloon-dkms" { "all" } else { "amd64" };
        let name = format!("{name}_{VERSION}-1_{architecture}.deb");
        let [first, second] =
            [&*OLD, &again].map(|each| fs::read(each.join(&name)).expect("a package"));
        assert!(first == second, "{name} is another one each time");
    }
}

#[test]
fn lintian_has_no_complaints() {
    let packages = fs::read_dir(&*OLD).unwrap().map(|entry| entry.unwrap().path());
    let options = ["--allow-root", "--fail-on=error,warning"].map(PathBuf::from);
    run("lintian", &options.into_iter().chain(packages).collect::<Vec<_>>());
}
