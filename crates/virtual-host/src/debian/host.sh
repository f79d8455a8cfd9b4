# Completes the root file system of a virtual host, whose path is the first argument.
root=$1

# Directories of firecracker-python, and where the initial RAM file system stays visible.
mkdir -p "$root/var/lib/firecracker/snapshots" "$root/initramfs" "$root/srv"
echo ebb-virtual-host >"$root/etc/hostname"
echo '127.0.0.1 localhost' >"$root/etc/hosts"
