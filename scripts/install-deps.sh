#!/bin/sh
# Installs from Debian's packages what building, testing and running Ebb's experiments needs. May be run again at any
# time: what is there already is left alone, and without anything to do apt is not even asked.
#
#   sudo scripts/install-deps.sh            install what is missing
#   scripts/install-deps.sh --check         only say what is missing (exit code 1 if anything is)
set -eu

# qemu-system-x86        the virtual host, on machines whose KVM cannot run Linux; also a peer to compare with
# linux-image-cloud-...  kernel and modules of the virtual host and of the test guests
# busybox-static         programs inside the virtual host
# numactl                the real memhog
# gcc libc6-dev make     linking the static binaries, and the Makefile
# ca-certificates        cargo fetches crates over TLS
packages="qemu-system-x86 linux-image-cloud-amd64 busybox-static numactl gcc libc6-dev make ca-certificates"

say() { printf 'install-deps: %s\n' "$*"; }
fail() { printf 'install-deps: %s\n' "$*" >&2; exit 1; }

case "${1:-}" in
    '') check_only=no ;;
    --check) check_only=yes ;;
    *) printf 'usage: %s [--check]\n' "$0" >&2; exit 2 ;;
esac

command -v dpkg-query >/dev/null 2>&1 ||
    fail "this script needs a Debian system (dpkg); elsewhere install the equivalents of: $packages"
[ "$(uname -m)" = x86_64 ] || fail "Ebb runs on x86_64 so far; this machine is $(uname -m)"

installed() {
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" = installed ]
}

missing=
for package in $packages; do
    if ! installed "$package"; then
        missing="$missing $package"
    fi
done

if [ -z "$missing" ]; then
    say "everything is installed:" $packages
elif [ "$check_only" = yes ]; then
    fail "missing:$missing (install with: sudo $0)"
else
    [ "$(id -u)" = 0 ] || fail "missing:$missing; run this script as root: sudo $0"
    say "installing:$missing"
    export DEBIAN_FRONTEND=noninteractive
    # The lists of a fresh machine are missing or old: packages they name may be gone from the mirror.
    apt-get update -q || fail "apt-get update failed: is there a network, and are the sources in /etc/apt right?"
    # shellcheck disable=SC2086 # the list is split into words on purpose
    apt-get install -q -y --no-install-recommends $missing ||
        fail "apt-get could not install:$missing (see above)"
fi

# What the packages are for must really be there.
for program in qemu-system-x86_64 busybox memhog gcc make; do
    command -v "$program" >/dev/null 2>&1 || fail "$program is not in PATH although its package is installed"
done
kernel=
for image in /boot/vmlinuz-*-cloud-amd64; do
    release=${image#/boot/vmlinuz-}
    if [ -r "$image" ] && [ -e "/lib/modules/$release/modules.dep" ]; then
        kernel=$release
    fi
done
[ -n "$kernel" ] || fail "no readable /boot/vmlinuz-*-cloud-amd64 with its /lib/modules directory"
say "kernel for guests: $kernel"

# rustc is not taken from Debian: bookworm's is too old.
if ! command -v cargo >/dev/null 2>&1; then
    say "note: no cargo in PATH; Ebb needs Rust 1.88 or newer, from https://rustup.rs"
fi
