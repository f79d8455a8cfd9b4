#!/bin/sh
# Compiles a guest kernel from Debian's linux-source (scripts/install-deps.sh --debian) with
# guest/kernel/config, modules.config and NAME.config, builds the guests' modules for it
# (target/ebb_balloon), and prints its directory, which has boot/vmlinuz-RELEASE and
# lib/modules/RELEASE. It is kept in target/guest-kernel-NAME until the sources or the configuration
# change.
#
#   scripts/guest-kernel.sh debug      for `make module-debug`: half an hour of a processor, 3 GiB
#   scripts/guest-kernel.sh locks      for `make zone-lock`: ten minutes, 2 GiB
set -eu
# Where depmod is.
PATH=$PATH:/usr/sbin:/sbin

say() { printf 'guest-kernel: %s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }

cd "$(dirname "$0")/.."
name=${1:?the name of a configuration in guest/kernel, such as debug}
configurations="guest/kernel/modules.config guest/kernel/$name.config"
[ -f "guest/kernel/$name.config" ] || fail "no guest/kernel/$name.config: debug or locks"
trees=$PWD/target/guest-kernel-$name
source=$(find /usr/src -name 'linux-source-*.tar.xz' | sort -V | tail -n 1)
[ -n "$source" ] || fail "no /usr/src/linux-source-*.tar.xz: run scripts/install-deps.sh --debian"
# shellcheck disable=SC2086 # a list of files
key=$({ stat -L -c '%n %s %Y' "$source"; cat guest/kernel/config $configurations; } |
    sha256sum | cut -c 1-16)
tree=$trees/$key

# An option that depends on another is left out without a word.
check() {
    # shellcheck disable=SC2086
    cat $configurations | while read -r option; do
        case "$option" in
            CONFIG_* | '# CONFIG_'*) grep -qxF "$option" "$1" || echo "$option" ;;
        esac
    done
}

compile() {
    say "compiling: $(basename "$source" .tar.xz), into $tree"
    mkdir -p "$trees"
    rm -rf "$tree.new"
    mkdir -p "$tree.new/build" "$tree.new/boot"
    tar --strip-components=1 -C "$tree.new/build" -xJf "$source"
    # shellcheck disable=SC2086
    cat guest/kernel/config $configurations >"$tree.new/build/ebb.config"
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
make --no-print-directory module MODULE_KERNEL="$release" MODULE_HEADERS="$tree/build" >&2
echo "$tree"
