#!/bin/sh
# Runs the tests of the guests' modules (names that begin with `module`) on guests whose kernel
# checks memory, locks and RCU: KASAN, lockdep, DEBUG_VM and others. A report in a guest's log fails
# its test.
#
#   scripts/module-debug.sh [NAME]     only tests whose names contain NAME
#
# The kernel is compiled from Debian's linux-source (scripts/install-deps.sh --debian) with
# guest/kernel/config and debug.config, which takes a processor half an hour. The result, 3 GiB, is
# kept in target/module-debug until the sources or the configuration change.
set -eu
# Where depmod is.
PATH=$PATH:/usr/sbin:/sbin

say() { printf 'module-debug: %s\n' "$*"; }
fail() { printf 'module-debug: %s\n' "$*" >&2; exit 1; }

cd "$(dirname "$0")/.."
trees=$PWD/target/module-debug
source=$(find /usr/src -name 'linux-source-*.tar.xz' | sort -V | tail -n 1)
[ -n "$source" ] || fail "no /usr/src/linux-source-*.tar.xz: run scripts/install-deps.sh --debian"
key=$({ stat -L -c '%n %s %Y' "$source"; cat guest/kernel/config guest/kernel/debug.config; } |
    sha256sum | cut -c 1-16)
tree=$trees/$key

# An option that depends on another is left out without a word.
check() {
    while read -r option; do
        case "$option" in
            CONFIG_* | '# CONFIG_'*) grep -qxF "$option" "$1" || echo "$option" ;;
        esac
    done <guest/kernel/debug.config
}

compile() {
    say "compiling: $(basename "$source" .tar.xz), into $tree"
    mkdir -p "$trees"
    rm -rf "$tree.new"
    mkdir -p "$tree.new/build" "$tree.new/boot"
    tar --strip-components=1 -C "$tree.new/build" -xJf "$source"
    cat guest/kernel/config guest/kernel/debug.config >"$tree.new/build/ebb.config"
    quiet make -C "$tree.new/build" allnoconfig KCONFIG_ALLCONFIG="$tree.new/build/ebb.config"
    missing=$(check "$tree.new/build/.config")
    [ -z "$missing" ] || fail "the sources do not take: $missing"
    quiet make -C "$tree.new/build" -j "$(nproc)" bzImage modules
    release=$(make -s -C "$tree.new/build" kernelrelease)
    quiet make -C "$tree.new/build" modules_install INSTALL_MOD_PATH="$tree.new"
    # Links to the place of the sources, which is not final.
    rm -f "$tree.new/lib/modules/$release/build" "$tree.new/lib/modules/$release/source"
    cp "$tree.new/build/arch/x86/boot/bzImage" "$tree.new/boot/vmlinuz-$release"
    mv "$tree.new" "$tree"
}

# Runs a command at the lowest priority and shows its output only if it fails.
quiet() {
    nice -n 19 "$@" >"$trees/log" 2>&1 ||
        { tail -n 30 "$trees/log" >&2; fail "failed: $* (all of its output is in $trees/log)"; }
}

[ -d "$tree" ] || compile
release=$(ls "$tree/lib/modules")
say "building: the modules for $release"
make --no-print-directory module MODULE_KERNEL="$release" MODULE_HEADERS="$tree/build"
# Guests are tested, and not the host under them: that has the machine's own cloud kernel.
host_kernel=$(find /boot -name 'vmlinuz-*-cloud-amd64' | sort -V | tail -n 1)
say "testing: guests with $release"
EBB_TESTS=debug EBB_GUEST_TESTS_HOST_KERNEL=$host_kernel EBB_KERNEL=$tree/boot/vmlinuz-$release \
    EBB_MODULES=$tree/lib/modules/$release \
    cargo test --locked -p ebb --test guests -- "${1:-module}"
