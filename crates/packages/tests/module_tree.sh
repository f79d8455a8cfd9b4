#!/bin/sh
# Installs, upgrades and removes the package of the guest's balloon driver in a clean Debian tree:
# DKMS builds the module for the tree's kernel, and guests with that kernel boot in an emulator to
# show which driver their balloon gets. Ends with an error at the first check that fails.
#
#   module_tree.sh TREE OLD NEW
#
# TREE is an archive of a Debian tree with dkms, openssl, a kernel and its headers, OLD and NEW are
# directories with two versions of the package.
set -eu
. "$(dirname "$0")/tree.sh"

kernel=$(ls "$tree/lib/modules")
alias=virtio:d00000005v00001AF4
standard=kernel/drivers/virtio/virtio_balloon.ko
ours=updates/dkms/ebb_balloon.ko
version() { basename "$tree/tmp/$1"/ebb-balloon-dkms_*.deb | sed 's/.*_\(.*\)-1_.*/\1/'; }

# Checks which driver, and which file, the alias of a balloon stands for.
alias_means() {
    equal 'driver of the alias' "$(inside modprobe -S "$kernel" --resolve-alias "$alias")" \
        "$(basename "$1" .ko)"
    equal 'file of the alias' \
        "$(inside modprobe -S "$kernel" -i -n -v "$alias" | sed -n '$s/^insmod \([^ ]*\).*/\1/p')" \
        "/lib/modules/$kernel/$1"
}

# Checks that exactly this version is built and installed.
built() {
    equal 'status of dkms' "$(inside dkms status)" \
        "ebb-balloon/$1, $kernel, x86_64: installed"
    equal 'version of the module' "$(inside modinfo -k "$kernel" -F version ebb_balloon)" "$1"
    equal 'signer' "$(inside modinfo -k "$kernel" -F signer ebb_balloon)" 'DKMS module signing key'
    equal 'sources' "$(ls "$tree/usr/src" | grep ebb)" "ebb-balloon-$1"
}

# Makes an initramfs with the tree's drivers and configuration.
make_initramfs() { quietly mkinitramfs -d /tmp/initramfs -o /tmp/initrd "$kernel"; }

# Boots a guest, and checks that this driver and not the other one is loaded and has the balloon.
# Further arguments are for its kernel.
guest_loads() {
    driver=$1
    shift
    timeout 120 qemu-system-x86_64 -M q35 -accel tcg -m 512 -nodefaults -no-user-config \
        -display none -serial stdio -no-reboot -device virtio-balloon-pci \
        -kernel "$tree/boot/vmlinuz-$kernel" -initrd "$tree/tmp/initrd" \
        -append "console=ttyS0 quiet panic=-1 $*" </dev/null >"$log" 2>&1 || fail 'guest'
    equal 'guest' "$(tr -d '\r' <"$log" | sed -n 's/^balloon: //p')" \
        "driver $driver, loaded $driver"
}

cp -r "$(dirname "$0")/initramfs" "$tree/tmp/initramfs"
alias_means "$standard"
files >"$tree/tmp/before"

check 'install'
install old ebb-balloon-dkms
built "$(version old)"
alias_means "$ours"

check 'a guest with the module'
make_initramfs
guest_loads ebb_balloon

check 'a guest that refuses the module, as with Secure Boot'
guest_loads virtio_balloon module.sig_enforce=1

check 'install again'
install old ebb-balloon-dkms
built "$(version old)"

check 'upgrade'
install new ebb-balloon-dkms
built "$(version new)"
alias_means "$ours"

check 'a new kernel'
quietly dkms uninstall "ebb-balloon/$(version new)" -k "$kernel"
[ ! -e "$tree/lib/modules/$kernel/$ours" ] || fail 'uninstall'
quietly /etc/kernel/postinst.d/dkms "$kernel"
built "$(version new)"
alias_means "$ours"

check 'kernels that it is built for'
built_for() {
    # shellcheck disable=SC2016 # for bash
    inside bash -c '. "$1" && [[ $2 =~ $BUILD_EXCLUSIVE_KERNEL ]]' bash \
        "/usr/src/ebb-balloon-$(version new)/dkms.conf" "$1"
}
for release in 6.0.0-1-amd64 6.12.95+deb12-cloud-amd64 7.3 7.3.1; do
    built_for "$release" || fail "not built for $release"
done
for release in 5.19.0-2-amd64 7.4.0 7.30.0 8.0; do
    ! built_for "$release" || fail "built for $release"
done

check 'remove'
quietly apt-get remove -y ebb-balloon-dkms
equal 'left for a purge' "$(inside dpkg-query -W ebb-balloon-dkms 2>/dev/null || true)" ''
# The key for signing is that of dkms.
files | grep -v '^./var/lib/dkms/mok\.' >"$tree/tmp/after"
diff "$tree/tmp/before" "$tree/tmp/after" >"$log" || fail 'files are left'
alias_means "$standard"
make_initramfs
guest_loads virtio_balloon
check 'nothing is left'
