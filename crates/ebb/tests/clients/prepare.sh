# Prepares the virtual host for the tests, once: a network, the program called `firecracker`, a
# guest's image with ssh's key and the agent.
set -eu

# What looks like the host's way to the world: clients ask for its name.
ip link set lo up
ip link add eth0 type dummy
ip link set eth0 up
ip address add 10.99.0.2/24 dev eth0
ip route add default via 10.99.0.1
# The chains that Docker or a firewall makes: firecracker-python names no priority (`priority` where
# nftables' JSON has `prio`), so that a chain of its own has no hook and takes no rule that needs one.
iptables -t nat -A POSTROUTING -s 10.99.1.0/24 -j MASQUERADE

# A copy and not a link: a client resolves links before it starts the program.
cp /initramfs/bin/ebb /usr/local/bin/ebb
ln /usr/local/bin/ebb /usr/local/bin/firecracker

mkdir -p /root/.smolvm/keys
ssh-keygen -q -t ed25519 -N '' -C test -f /srv/key
dd if=/dev/vdb of=/srv/guest.ext4 bs=1M conv=sparse status=none
cat >/srv/debugfs <<'END'
write /initramfs/srv/ebb-guest-agent /usr/bin/ebb-guest-agent
set_inode_field /usr/bin/ebb-guest-agent mode 0100755
write /initramfs/srv/ebb-guest-agent.service /etc/systemd/system/ebb-guest-agent.service
mkdir /root/.ssh
write /srv/key.pub /root/.ssh/authorized_keys
set_inode_field /root/.ssh/authorized_keys mode 0100600
END
debugfs -w -f /srv/debugfs /srv/guest.ext4 >/srv/debugfs.log 2>&1
cp /initramfs/srv/vmlinux /initramfs/srv/bzImage /srv
