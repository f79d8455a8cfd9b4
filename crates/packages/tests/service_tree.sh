#!/bin/sh
# Boots a clean Debian tree with systemd in an emulator, and installs, uses, upgrades and removes
# the daemon's package there (`service/guest.sh`). Ends with an error at the first check that fails.
#
#   service_tree.sh TREE OLD NEW
#
# TREE is an archive of a Debian tree with systemd-sysv, OLD and NEW are directories with two
# versions of the packages. The kernel is EBB_KERNEL, or the newest cloud kernel in /boot.
set -eu
. "$(dirname "$0")/tree.sh"

kernel=${EBB_KERNEL:-$(ls /boot/vmlinuz-*-cloud-amd64 | sort -V | tail -n 1)}
mkdir "$tree/packages" "$tree/service"
for version in old new; do
    mkdir "$tree/packages/$version"
    cp "$tree/tmp/$version"/ebb_*.deb "$tree/tmp/$version"/ebbd_*.deb "$tree/packages/$version"
done
cp "$(dirname "$0")"/service/* "$tree/service"
ln -s /service/ebb-test.service "$tree/etc/systemd/system/ebb-test.service"
echo host >"$tree/etc/hostname"

archive=$(mktemp -d)
mount -t tmpfs archive "$archive"
for mount in "$tree"/dev/*; do umount "$mount" 2>/dev/null || true; done
umount "$tree/proc"
(cd "$tree" && find . -path ./tmp/\* -prune -o -print | cpio --quiet -o -H newc) \
    >"$archive/initrd"

check 'a machine with systemd'
serial=$archive/serial
timeout 600 qemu-system-x86_64 -M q35 -accel tcg -cpu max -m 2048 -nodefaults -no-user-config \
    -display none -serial stdio -no-reboot -kernel "$kernel" -initrd "$archive/initrd" \
    -append "console=ttyS0 quiet panic=-1 rdinit=/service/init systemd.unit=ebb-test.service \
        systemd.show_status=0" \
    </dev/null >"$serial" 2>&1 || fail "the machine: $(tail -n 50 "$serial")"
tr -d '\r' <"$serial" | grep '^packages: ' || true
tr -d '\r' <"$serial" | grep -q '^packages: all is well' || fail "$(tail -n 80 "$serial")"
