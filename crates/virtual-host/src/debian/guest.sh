# Completes the root file system of a guest, whose path is the first argument.
root=$1

# The first interface has an address by DHCP, or by a word of the kernel's command line: the
# kernel's own `ip=`, or microheart's. A file takes one condition on that line (systemd.network(5)):
# the last.
for word in ip microheart.ip; do
    cat >"$root/etc/systemd/network/70-$word.network" <<END
[Match]
Type=ether
KernelCommandLine=$word
[Link]
Unmanaged=yes
END
done
cat >"$root/etc/systemd/network/80-ether.network" <<'END'
[Match]
Type=ether
[Network]
DHCP=ipv4
[DHCPv4]
ClientIdentifier=mac
END
cat >"$root/etc/systemd/system/microheart-network.service" <<'END'
[Unit]
ConditionKernelCommandLine=microheart.ip
DefaultDependencies=no
Before=network.target
[Service]
Type=oneshot
ExecStart=sh -c 'for word in $(cat /proc/cmdline); do case $word in microheart.ip=*) address=$${word#*=};; microheart.gw=*) gateway=$${word#*=};; esac; done; ip link set eth0 up && ip address add $$address dev eth0 && ip route add default via $$gateway'
[Install]
WantedBy=multi-user.target
END
# The name of the kernel, since tests name it.
ln -s /dev/null "$root/etc/systemd/network/99-default.link"

# The agent's program and unit are put into the image when it is used.
wants=$root/etc/systemd/system/multi-user.target.wants
mkdir -p "$wants"
ln -s ../ebb-guest-agent.service "$wants/ebb-guest-agent.service"
systemctl --root="$root" enable systemd-networkd microheart-network
# The kernel has set the address of its `ip=`: the generator would make it a second time.
systemctl --root="$root" mask systemd-network-generator.service
systemctl --root="$root" mask systemd-networkd-wait-online.service apt-daily.timer \
    apt-daily-upgrade.timer dpkg-db-backup.timer e2scrub_all.timer e2scrub_reap.service \
    fstrim.timer systemd-random-seed.service
echo guest >"$root/etc/hostname"
echo '/dev/vda / auto defaults 0 0' >"$root/etc/fstab"
