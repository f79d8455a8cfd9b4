# Completes the root file system of a guest that works, whose path is the first argument.
root=$1

# The source of bzip2, which is built without a configuration: /usr/src/bzip2.
sources=$root/etc/apt/sources.list.d/sources.list
sed -n 's/^deb /deb-src /p' "$root/etc/apt/sources.list" >"$sources"
(
    export APT_CONFIG="$MMDEBSTRAP_APT_CONFIG"
    cd "$root/var/tmp"
    apt-get -q update
    apt-get -q source --download-only bzip2
)
rm "$sources"
mkdir "$root/usr/src/bzip2"
tar -xzf "$root"/var/tmp/bzip2_*.orig.tar.gz -C "$root/usr/src/bzip2" --strip-components=1
rm "$root"/var/tmp/bzip2_*

# Nothing begins by itself while a guest is measured.
systemctl --root="$root" mask apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer \
    e2scrub_all.timer e2scrub_reap.service fstrim.timer systemd-tmpfiles-clean.timer \
    systemd-random-seed.service serial-getty@ttyS0.service getty@tty1.service
echo guest >"$root/etc/hostname"
echo '/dev/vda / auto defaults 0 0' >"$root/etc/fstab"
