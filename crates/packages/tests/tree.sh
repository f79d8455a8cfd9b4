# A clean Debian tree for a test that sources this file: unpacked into memory in namespaces of the
# test's own, so that nothing on this machine changes; the tree has no network. The test's arguments
# are those of `program_tree.sh`.
set -eu

if [ "${CLEAN_TREE:-}" != inside ]; then
    # Without root's rights, in a user namespace with the subordinate ids of this user.
    map=
    [ "$(id -u)" = 0 ] || map='--map-root-user --map-auto'
    # shellcheck disable=SC2086 # two options
    CLEAN_TREE=inside exec unshare $map --mount --net --pid --fork --kill-child "$0" "$@"
fi

tree=$(mktemp -d)
log=$tree/tmp/log
check() { printf 'packages: %s\n' "$*"; }
fail() {
    printf 'packages: failed: %s\n' "$*" >&2
    [ ! -e "$log" ] || cat "$log" >&2
    exit 1
}
inside() {
    env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8 DEBIAN_FRONTEND=noninteractive \
        MANWIDTH=80 chroot "$tree" "$@"
}
# Runs a command in the tree, and prints its output only if it fails.
quietly() { inside "$@" >"$log" 2>&1 || fail "$*"; }
equal() { [ "$2" = "$3" ] || fail "$1: $2 instead of $3"; }

mount -t tmpfs -o size=2g,mode=755 tree "$tree"
# Devices cannot be created in a user namespace.
tar -C "$tree" --exclude='./dev/*' -xf "$1"
for device in null zero random urandom tty; do
    touch "$tree/dev/$device"
    mount --bind "/dev/$device" "$tree/dev/$device"
done
ln -s /proc/self/fd "$tree/dev/fd"
mount -t proc proc "$tree/proc"
cp -r "$2" "$tree/tmp/old"
cp -r "$3" "$tree/tmp/new"

# All files and directories but logs, caches, and dpkg's own records.
files() {
    (cd "$tree" && find . \( -path ./proc -o -path ./dev -o -path ./tmp -o -path ./run \
        -o -path ./var/log -o -path ./var/cache -o -path './var/lib/dpkg' \
        -o -path ./var/lib/apt \) -prune -o -print | LC_ALL=C sort)
}

# Installs packages of the version `old` or `new`, again if they are installed.
install() {
    directory=$1
    shift
    quietly sh -c "apt-get install -y --reinstall $(printf " /tmp/$directory/%s_*.deb" "$@")"
}
