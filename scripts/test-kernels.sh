#!/bin/sh
# Builds the guests' modules for the newest cloud kernels of Debian's backports and runs the
# modules' tests (names that begin with `module`) on guests with these kernels. As root. Nothing of
# the machine changes: kernel, headers and their compiler are unpacked into
# /var/lib/ebb/test-kernels, one directory for each release of Debian, which can be removed.
#
#   scripts/test-kernels.sh                    bookworm (Linux 6.12) and trixie (7.3)
#   scripts/test-kernels.sh trixie [NAME]      only that one, and only tests whose names contain this
#   scripts/test-kernels.sh --build [SUITE]    only builds, with warnings as errors (W=1)
#   scripts/test-kernels.sh --host SUITE [NAME...]
#                                              the other way round: the tests on this machine's
#                                              guests, or those whose names contain one of these,
#                                              in virtual hosts with that kernel
#
# EBB_BACKPORTS names another mirror. An unpacked kernel is kept; remove its directory for a newer
# one. The modules stay in target/ebb_balloon/RELEASE, where ebb-lab finds them as well.
set -eu

trees=/var/lib/ebb/test-kernels
key=/usr/share/keyrings/debian-archive-keyring.gpg
# The kernel, and what Kbuild runs.
packages="linux-image-cloud-amd64 linux-headers-cloud-amd64 gcc make base-files dash bash coreutils"
packages="$packages findutils grep sed mawk perl python3"

say() { printf 'test-kernels: %s\n' "$*"; }
fail() { printf 'test-kernels: %s\n' "$*" >&2; exit 1; }

# EBB_BACKPORTS, or the Debian mirror of the machine's package sources.
mirror() {
    if [ -n "${EBB_BACKPORTS:-}" ]; then
        echo "$EBB_BACKPORTS"
        return
    fi
    # shellcheck disable=SC2016 # apt replaces the word in parentheses
    found=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' \
        'Origin: Debian' 2>/dev/null | grep -v -e '^cdrom:' -e security | head -n 1)
    echo "${found:-http://deb.debian.org/debian}"
}

# Unpacks the packages without running their scripts.
unpack() {
    suite=$1 tree=$2
    say "unpacking: the kernel of $suite-backports, into $tree"
    mkdir -p "$trees"
    new=$(mktemp -d "$trees/.new-XXXXXX")
    source="deb [signed-by=$key] $(mirror)"
    if ! mmdebstrap --quiet --mode=root --variant=extract --include="$packages" \
        --aptopt="APT::Default-Release \"$suite-backports\"" "$suite" "$new" \
        "$source $suite main" "$source $suite-backports main"; then
        rm -rf "$new"
        fail "no kernel of $suite-backports (EBB_BACKPORTS selects another mirror)"
    fi
    # What the packages' scripts would have done.
    for folder in bin sbin lib lib64; do
        [ -e "$new/$folder" ] || ln -s "usr/$folder" "$new/$folder"
    done
    [ -e "$new/bin/sh" ] || ln -s dash "$new/bin/sh"
    [ -e "$new/usr/bin/awk" ] || ln -s mawk "$new/usr/bin/awk"
    release=$(ls "$new/lib/modules")
    mkdir -p "$new/boot"
    [ -e "$new/boot/vmlinuz-$release" ] ||
        cp "$new/lib/modules/$release/vmlinuz" "$new/boot/vmlinuz-$release"
    depmod -b "$new" "$release"
    chmod 755 "$new"
    mv "$new" "$tree"
}

# Builds both modules with the compiler of that release of Debian.
build() {
    tree=$1 release=$2
    output=target/ebb_balloon/$release
    rm -rf "$tree/modules"
    cp -r guest/linux "$tree/modules"
    say "building: the modules for $release"
    mkdir -p "$tree/proc"
    # objtool reads its stack's limit from /proc. Types of the whole kernel are not needed, and nor
    # is the program that would convert them.
    unshare --mount sh -ec 'mount -t proc proc "$1/proc"; exec env LANG=C chroot "$@"' sh \
        "$tree" make -s -C "/lib/modules/$release/build" M=/modules W=1 \
        KCFLAGS=-Werror CONFIG_DEBUG_INFO_BTF_MODULES= EBB_VERSION="$version" modules
    mkdir -p "$output"
    for module in ebb_balloon ebb_trackers; do
        strip --strip-debug -o "$output/$module.ko" "$tree/modules/$module/$module.ko"
    done
}

# Runs the tests in virtual hosts with the kernel of a suite; those that merge, too.
test_host() {
    suite=$1
    shift
    tree=$trees/$suite
    [ -d "$tree" ] || unpack "$suite" "$tree"
    image=$(ls "$tree"/boot/vmlinuz-*)
    failed=
    [ $# != 0 ] || set -- ''
    for name in "$@"; do
        say "testing: ${name:-all tests} on hosts with ${image##*/vmlinuz-}"
        EBB_GUEST_TESTS_HOST_KERNEL=$image EBB_HOST_KERNEL=$image \
            cargo test --locked -p ebb --test guests -- ${name:+"$name"} ||
            failed="$failed ${name:-all}"
    done
    [ -z "$failed" ] || fail "tests have failed on ${image##*/vmlinuz-}:$failed"
}

version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$(dirname "$0")/../Cargo.toml")
only_build=no
if [ "${1:-}" = --build ]; then
    only_build=yes
    shift
fi
[ "$(id -u)" = 0 ] || fail "run this script as root"
cd "$(dirname "$0")/.."
if [ "${1:-}" = --host ]; then
    shift
    test_host "$@"
    exit
fi
suites=${1:-bookworm trixie}
[ $# = 0 ] || shift

# Guests are tested, and not the host under them: that has the machine's own cloud kernel.
host_kernel=$(find /boot -name 'vmlinuz-*-cloud-amd64' | sort -V | tail -n 1)
failed=
for suite in $suites; do
    tree=$trees/$suite
    [ -d "$tree" ] || unpack "$suite" "$tree"
    release=$(ls "$tree/lib/modules")
    build "$tree" "$release"
    [ "$only_build" = no ] || continue
    say "testing: guests with $release"
    EBB_GUEST_TESTS_HOST_KERNEL=$host_kernel EBB_KERNEL=$tree/boot/vmlinuz-$release \
        EBB_MODULES=$tree/lib/modules/$release \
        cargo test --locked -p ebb --test guests -- "${1:-module}" || failed="$failed $release"
done
[ -z "$failed" ] || fail "tests have failed on:$failed"
