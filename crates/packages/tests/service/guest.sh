#!/bin/sh
# Runs in the machine that `service_tree.sh` boots.
set -eu
export DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8
export PATH=/usr/sbin:/usr/bin:/sbin:/bin

log=/tmp/log
check() { echo "packages: in the machine: $*"; }
fail() {
    echo "packages: failed: $*"
    cat "$log" || true
    systemctl status --no-pager ebbd ebb-merge-broker || true
    journalctl --no-pager -n 40 -u ebbd -u ebb-merge-broker || true
    exit 1
}
quietly() { "$@" >"$log" 2>&1 || fail "$*"; }
# Without a limit: the machine itself has one.
eventually() { until "$@" >"$log" 2>&1; do sleep 0.2; done; }
property() { systemctl show -P "$1" ebbd; }
main_process() { property MainPID; }
is_active() { [ "$(systemctl is-active ebbd)" = active ]; }
is_other() {
    now=$(main_process)
    [ "$now" != 0 ] && [ "$now" != "$1" ] && is_active
}
same() { [ "$(main_process)" = "$1" ] && is_active || fail "$2: not the same process"; }

# A process of the service that behaves as its second process does.
second_process() {
    rm -f /tmp/undone /tmp/ready
    sh -c 'trap "" TERM HUP ABRT INT; touch /tmp/ready; until [ -e /tmp/go-on ]; do sleep 0.1; done
        systemctl show -P MainPID ebbd >/tmp/undone' &
    echo $! >/sys/fs/cgroup/system.slice/ebbd.service/cgroup.procs
    # Before that, it does not ignore signals.
    eventually test -e /tmp/ready
}

check install
quietly apt-get install -y /packages/old/ebb_*.deb /packages/old/ebbd_*.deb
is_active || fail 'not started'
eventually ebb host status --json
quietly systemd-analyze verify --man=no /lib/systemd/system/ebbd.service
systemd-analyze security --no-pager ebbd | sed -n 's/.*Overall/packages: in the machine: overall/p'
[ "$(stat -c '%a %U %G' /run/ebb/machines)" = '3770 root ebb' ] || fail 'machines'
[ "$(stat -c '%a %U %G' /run/ebb/ebbd.sock)" = '660 ebbd ebb' ] || fail 'socket'
[ "$(stat -c '%a %U' /var/lib/ebbd)" = '700 ebbd' ] || fail 'state'
case $(property StatusText) in *'machines: 0') ;; *) fail 'status text' ;; esac

check 'a member of the group, and another user'
quietly useradd -G ebb member
quietly useradd other
as_member() { setpriv --reuid member --regid member --init-groups "$@"; }
quietly as_member ebb host status --json
! setpriv --reuid other --regid other --init-groups ebb host status --json >"$log" 2>&1 ||
    fail 'another user may ask'

check 'a machine of another user'
as_member perl /service/monitor.pl /run/ebb/machines/m.sock &
monitor=$!
resident() { ebb host status --json | grep -o '"resident_bytes": *[0-9]*' | tr -dc 0-9; }
is_seen() { [ "$(resident)" -gt $((64 << 20)) ]; }
eventually is_seen
quietly as_member ebb host hold m
eventually sh -c 'ebb host explain m | grep held'
quietly as_member ebb host release m
kill "$monitor"
rm /run/ebb/machines/m.sock

check 'a reload, also of a configuration with a mistake'
process=$(main_process)
sed -i 's/^#interval_ms = .*/interval_ms = 2000/' /etc/ebb/ebbd.toml
quietly systemctl reload ebbd
eventually sh -c 'ebb host settings | grep "interval_ms.*2000"'
echo 'x = 1' >>/etc/ebb/ebbd.toml
! systemctl reload ebbd >"$log" 2>&1 || fail 'a mistake was not noticed'
same "$process" 'after a mistake'
kill -HUP "$process"
eventually sh -c 'journalctl -u ebbd | grep "still in force"'
same "$process" 'after a mistake'
sed -i '/^x = 1/d' /etc/ebb/ebbd.toml

check 'killed'
rm -f /tmp/go-on
second_process
kill -KILL "$process"
is_gone() { [ "$(main_process)" = 0 ]; }
eventually is_gone
# Longer than RestartSec.
sleep 3
[ ! -e /tmp/undone ] && is_gone || fail 'not waited for the second process'
touch /tmp/go-on
eventually is_other "$process"
[ "$(cat /tmp/undone)" = 0 ] || fail 'the second process was killed'

check 'stopped'
rm -f /tmp/go-on
second_process
systemctl stop --no-block ebbd
eventually is_gone
sleep 2
touch /tmp/go-on
eventually sh -c '[ "$(systemctl is-active ebbd)" = inactive ]'
[ "$(cat /tmp/undone)" = 0 ] || fail 'the second process was killed'

check 'hanging'
mkdir -p /run/systemd/system/ebbd.service.d
printf '[Service]\nWatchdogSec=10\nTimeoutAbortSec=2\n' \
    >/run/systemd/system/ebbd.service.d/test.conf
systemctl daemon-reload
quietly systemctl start ebbd
process=$(main_process)
kill -STOP "$process"
eventually is_other "$process"
eventually sh -c 'journalctl -u ebbd | grep -i "watchdog timeout"'
# The loop tells that it runs.
process=$(main_process)
is_later() { [ "$(property WatchdogTimestampMonotonic)" -gt "$1" ]; }
for _ in 1 2 3; do eventually is_later "$(property WatchdogTimestampMonotonic)"; done
same "$process" 'a loop that runs'
rm -r /run/systemd/system/ebbd.service.d
systemctl daemon-reload

check 'the broker of merged pages'
broker_process() { systemctl show -P MainPID ebb-merge-broker; }
[ "$(systemctl is-enabled ebb-merge-broker)" = disabled ] || fail 'the broker is enabled'
[ "$(broker_process)" = 0 ] || fail 'the broker was started'
quietly systemd-analyze verify --man=no /lib/systemd/system/ebb-merge-broker.service
echo "BROKER_OPTIONS='--domain blue=$(id -u member) --total 512M'" >/etc/default/ebb-merge-broker
quietly systemctl start ebb-merge-broker
broker=$(broker_process)
eventually test -e /run/ebb-merge/broker.sock
quietly ebb merge-broker --status /run/ebb-merge/broker.sock --json
[ "$(broker_process)" = "$broker" ] || fail 'the broker has ended'
# Members of the domain may connect, and the state is not theirs.
[ "$(stat -c %a /run/ebb-merge/broker.sock)" = 666 ] || fail "the broker's socket"
! as_member ebb merge-broker --status /run/ebb-merge/broker.sock >"$log" 2>&1 || fail 'status'

check upgrade
quietly apt-get install -y /packages/new/ebb_*.deb /packages/new/ebbd_*.deb
eventually is_other "$process"
eventually sh -c 'ebb host settings | grep "interval_ms.*2000"'
[ ! -e /etc/ebb/ebbd.toml.dpkg-new ] && grep -q '^interval_ms = 2000' /etc/ebb/ebbd.toml ||
    fail 'the configuration is not kept'
# Clients find it where the former one was.
[ "$(broker_process)" != 0 ] && [ "$(broker_process)" != "$broker" ] || fail 'the broker is old'
eventually ebb merge-broker --status /run/ebb-merge/broker.sock --json

check remove
quietly apt-get remove -y ebbd
! is_active || fail 'it still runs'
[ ! -e /run/ebb/ebbd.sock ] && [ -e /etc/ebb/ebbd.toml ] || fail 'remove'
quietly apt-get remove -y ebb
[ "$(broker_process)" = 0 ] && [ ! -e /run/ebb-merge ] || fail 'the broker still runs'

check purge
# A machine that was stopped is more than the daemon's.
mkdir -p /var/lib/ebbd/snapshots
echo memory >/var/lib/ebbd/snapshots/web
quietly apt-get purge -y ebbd
[ "$(find /var/lib/ebbd -type f)" = /var/lib/ebbd/snapshots/web ] || fail 'what is kept'
rm -r /var/lib/ebbd
for path in /etc/ebb /var/lib/ebbd /run/ebb /usr/bin/ebbd /lib/systemd/system/ebbd.service; do
    [ ! -e "$path" ] || fail "$path is left"
done
echo 'packages: all is well'
