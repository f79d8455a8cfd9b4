#!/bin/sh
# Installs the Debian packages that are needed to build and test Ebb and to run its experiments. It
# may be run repeatedly: installed packages are kept, and apt runs only if a package is missing.
#
#   sudo scripts/install-deps.sh            install missing packages
#   scripts/install-deps.sh --check         only report missing packages (exit code 1 if any)
#   sudo scripts/install-deps.sh --debian   also what Debian guests are made of (ebb-lab debian)
#
# Debian 12 has no kernel that supports merging: one from its backports is unpacked into
# /var/lib/ebb/kernels, for virtual hosts only. The kernel that this machine boots does not change;
# to uninstall, remove the directory.
set -eu

# linux-image-cloud-...  kernel and modules of the virtual host and of the test guests
# linux-headers-cloud-.. building the guests' kernel module (guest/linux)
# busybox-static         programs inside the virtual host
# numactl                the real memhog
# iproute2               shaped links between network namespaces of the virtual host
# gcc libc6-dev make     linking the static binaries, and the Makefile
# passt                  the network of guests without any rights (--net user)
# debhelper dh-dkms      building the Debian packages
# mmdebstrap uidmap      the clean Debian trees in which they are tested
# lintian                checking them
# chromium               the daemon's page, in a real browser
# cpio                   the root file system of a host with systemd, for the daemon's test
# libvirt-daemon libvirt-daemon-driver-qemu libvirt-clients
#                        a private libvirtd, for the tests of ebbd
# ca-certificates        cargo fetches crates over TLS
#
# With --debian:
# e2fsprogs              root file systems of Debian guests and of virtual hosts
# linux-source flex bison bc libelf-dev xz-utils
#                        a guest kernel with its drivers built in
# python3-pip            clients of Firecracker's API, for tests
packages="linux-image-cloud-amd64 linux-headers-cloud-amd64 busybox-static numactl iproute2"
packages="$packages gcc libc6-dev make passt ca-certificates"
packages="$packages libvirt-daemon libvirt-daemon-driver-qemu libvirt-clients"
packages="$packages debhelper dh-dkms mmdebstrap uidmap lintian cpio chromium"
debian_packages="e2fsprogs linux-source flex bison bc libelf-dev xz-utils python3-pip"

# QEMU runs the virtual host, on machines whose KVM cannot run Linux, and serves as a peer for
# comparison. It has to be 8.1 or newer: older emulators may keep executing a translation of code
# that another processor has just changed. Linux patches its own code often, so that guests hang or
# crash once in a few hundred boots. Debian 12 has 7.2, its backports have 10.0.
emulator=qemu-system-x86
emulator_needed=1:8.1

# Merging pages in the monitor's own memory needs Linux 6.8 or newer under the monitor
# (UFFDIO_MOVE). Guests keep the distribution's kernel, whose headers their module is built with. A
# newer one for virtual hosts is unpacked into a separate directory: installing the package would
# make this machine itself boot it.
host_kernel_needed=6.8
host_kernels=/var/lib/ebb/kernels

say() { printf 'install-deps: %s\n' "$*"; }
fail() { printf 'install-deps: %s\n' "$*" >&2; exit 1; }

case "${1:-}" in
    '') check_only=no ;;
    --check) check_only=yes ;;
    --debian) check_only=no packages="$packages $debian_packages" ;;
    *) printf 'usage: %s [--check | --debian]\n' "$0" >&2; exit 2 ;;
esac

command -v dpkg-query >/dev/null 2>&1 ||
    fail "this script needs a Debian system (dpkg); elsewhere install the equivalents of: $packages"
[ "$(uname -m)" = x86_64 ] || fail "Ebb supports only x86_64; this machine is $(uname -m)"

installed() {
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" = installed ]
}

emulator_is_new() {
    installed "$emulator" &&
        dpkg --compare-versions "$(dpkg-query -W -f '${Version}' "$emulator")" ge "$emulator_needed"
}

# Whether the machine's package sources have a new enough emulator, as in Debian 13.
candidate_is_new() {
    candidate=$(apt-cache policy "$emulator" | sed -n 's/^  Candidate: //p')
    case "$candidate" in '' | '(none)') return 1 ;; esac
    dpkg --compare-versions "$candidate" ge "$emulator_needed"
}

is_bookworm() {
    grep -q '^VERSION_CODENAME=bookworm' /etc/os-release
}

# Prints the release of a kernel for virtual hosts that supports merging: an unpacked one, or the
# distribution's, as in Debian 13. Fails if there is none.
host_kernel() {
    for image in "$host_kernels"/*/boot/vmlinuz-* /boot/vmlinuz-*-cloud-amd64; do
        release=${image##*/vmlinuz-}
        if [ -r "$image" ] && [ -e "${image%/boot/*}/lib/modules/$release/modules.dep" ] &&
            dpkg --compare-versions "$release" ge "$host_kernel_needed"; then
            echo "$release"
            return
        fi
    done
    return 1
}

# Prints EBB_BACKPORTS or the Debian mirror of the machine's package sources. apt knows the origin
# of a source only after its lists were fetched; before that the release's first source is used.
mirror() {
    if [ -n "${EBB_BACKPORTS:-}" ]; then
        echo "$EBB_BACKPORTS"
        return
    fi
    for origin in 'Origin: Debian' 'Component: main'; do
        # shellcheck disable=SC2016 # apt replaces the word in parentheses
        found=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' \
            'Release: bookworm' "$origin" 2>/dev/null | grep -v '^cdrom:' | head -n 1)
        if [ -n "$found" ]; then
            echo "${found%/}"
            return
        fi
    done
    return 1
}

# Runs a function with apt-get arguments for Debian 12's backports. They use separate source lists,
# so that the machine's lists do not change.
with_backports() {
    if ! backports=$(mirror); then
        backports='a mirror'
        say "warning: no source of Debian bookworm in /etc/apt"
        return 1
    fi
    own=$(mktemp -d) || return 1
    # Separate from the sources: apt removes unknown files from its lists directory.
    mkdir -p "$own/lists/partial"
    key=/usr/share/keyrings/debian-archive-keyring.gpg
    for suite in bookworm bookworm-backports; do
        printf 'deb [signed-by=%s] %s %s main\n' "$key" "$backports" "$suite"
    done >"$own/sources.list"
    # apt reads lists as the user _apt.
    chmod -R a+rX "$own"
    what=$1
    # A short timeout, so that an unreachable mirror fails soon; the next run tries again.
    set -- -q -o Dir::Etc::sourcelist="$own/sources.list" -o Dir::Etc::sourceparts="$own/none" \
        -o Dir::State::lists="$own/lists" -o Acquire::http::Timeout=20
    mkdir "$own/none"
    result=0
    apt-get "$@" update && "$what" "$@" || result=1
    rm -rf "$own"
    return "$result"
}

emulator_from_backports() {
    apt-get "$@" install -y --no-install-recommends -t bookworm-backports "$emulator"
}

# Unpacks the package of the newest cloud kernel, atomically.
kernel_from_backports() {
    package=$(apt-cache "$@" depends -t bookworm-backports linux-image-cloud-amd64 |
        sed -n 's/^  Depends: \(linux-image-.*-cloud-amd64\)$/\1/p' | head -n 1)
    [ -n "$package" ] || return 1
    release=${package#linux-image-}
    mkdir -p "$own/package" "$host_kernels" &&
        new=$(mktemp -d "$host_kernels/.new-XXXXXX") || return 1
    # apt downloads as the user _apt if that may write here.
    if id _apt >/dev/null 2>&1; then chown _apt "$own/package"; fi
    (cd "$own/package" && apt-get "$@" download "$package") &&
        dpkg-deb -x "$own"/package/*.deb "$new" &&
        { [ -d "$new/lib/modules" ] || ln -s usr/lib "$new/lib"; } &&
        depmod -b "$new" "$release" && chmod 755 "$new" && rm -rf "${host_kernels:?}/$release" &&
        mv "$new" "$host_kernels/$release" && return
    rm -rf "$new"
    return 1
}

install_emulator() {
    if ! candidate_is_new && is_bookworm; then
        say "installing: $emulator, from backports"
        with_backports emulator_from_backports && return
        say "warning: no $emulator from backports at $backports (EBB_BACKPORTS selects another" \
            "mirror); Debian 12's version sometimes misses changes of code: tests on real guests" \
            "may hang or crash through no fault of Ebb"
    fi
    installed "$emulator" || apt-get install -q -y --no-install-recommends "$emulator" ||
        fail "apt-get could not install: $emulator (see above)"
}

install_host_kernel() {
    if is_bookworm; then
        say "unpacking: a kernel for virtual hosts, from backports, into $host_kernels"
        with_backports kernel_from_backports && return
        say "warning: no kernel for virtual hosts from backports at $backports (EBB_BACKPORTS" \
            "selects another mirror): tests and experiments on merging need Linux" \
            "$host_kernel_needed or newer and will fail; nothing else is affected"
    else
        say "warning: the cloud kernel in /boot is older than Linux $host_kernel_needed: tests" \
            "and experiments on merging will fail unless EBB_HOST_KERNEL names a newer one;" \
            "nothing else is affected"
    fi
}

missing=
for package in $packages; do
    if ! installed "$package"; then
        missing="$missing $package"
    fi
done
emulator_is_new || missing="$missing $emulator"
newer=
host_kernel >/dev/null || newer=" a kernel for virtual hosts (Linux $host_kernel_needed or newer)"

if [ -z "$missing$newer" ]; then
    say "everything is installed:" $packages $emulator
elif [ "$check_only" = yes ]; then
    fail "missing:$missing$newer (install with: sudo $0)"
elif [ "$(id -u)" != 0 ]; then
    [ -z "$missing" ] || fail "missing:$missing; run this script as root: sudo $0"
    say "warning: missing:$newer: tests and experiments on merging will fail;" \
        "install it with: sudo $0"
elif [ -n "$missing" ]; then
    say "installing:$missing"
    export DEBIAN_FRONTEND=noninteractive
    # The lists of a new machine are missing or old: they may name packages that the mirror no
    # longer has.
    apt-get update -q ||
        fail "apt-get update failed: is there a network, and are the sources in /etc/apt right?"
    others=${missing% "$emulator"}
    if [ -n "$others" ]; then
        # Headers fit only one kernel: next to an older installed kernel the matching one is
        # installed.
        case "$others" in *linux-headers*) others="$others linux-image-cloud-amd64" ;; esac
        # shellcheck disable=SC2086 # the list is split into words on purpose
        apt-get install -q -y --no-install-recommends $others ||
            fail "apt-get could not install:$others (see above)"
    fi
    emulator_is_new || install_emulator
fi
if [ -n "$newer" ] && [ "$(id -u)" = 0 ]; then
    # The kernel that was just installed may be sufficient.
    host_kernel >/dev/null || install_host_kernel
fi

# Verify that the packages provide the required programs and a kernel.
for program in qemu-system-x86_64 busybox memhog ip tc gcc make; do
    command -v "$program" >/dev/null 2>&1 ||
        fail "$program is not in PATH although its package is installed"
done
kernel=
for image in /boot/vmlinuz-*-cloud-amd64; do
    release=${image#/boot/vmlinuz-}
    if [ -r "$image" ] && [ -e "/lib/modules/$release/modules.dep" ]; then
        kernel=$release
    fi
done
[ -n "$kernel" ] || fail "no readable /boot/vmlinuz-*-cloud-amd64 with its /lib/modules directory"
say "kernel for guests: $kernel; for virtual hosts that merge: $(host_kernel || echo none)"

# rustc is not taken from Debian: bookworm's is too old.
if ! command -v cargo >/dev/null 2>&1; then
    say "note: no cargo in PATH; Ebb needs Rust 1.88 or newer, from https://rustup.rs"
fi
