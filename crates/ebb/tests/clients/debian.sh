# A Debian guest without an initial RAM file system: commands, sockets by socat, and a network
# without rights by passt.
set -eu
cd /srv
cp --sparse=always guest.ext4 debian.ext4
options='-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR'
ssh="ssh -i /srv/key $options -o ConnectTimeout=5"
fail() { echo "$*"; tail -n 40 /srv/serial.log /srv/ebb.log; exit 1; }
now() { cut -d' ' -f1 /proc/uptime; }
trap 'kill $machine 2>/dev/null || true' EXIT

start=$(now)
ebb run --kernel /srv/vmlinux --memory 512M --cmdline 'console=ttyS0 root=/dev/vda rw quiet' \
    --disk path=/srv/debian.ext4 --net user,ports=2222:22 --vsock cid=3,path=/srv/vsock \
    --api /srv/api --serial file=/srv/serial.log >/srv/ebb.log 2>&1 &
machine=$!
ebb exec --wait 150 /srv/api -- true || fail 'no answer of the agent'
echo "agent $start $(now)"
kernel=$(ebb exec /srv/api -- sh -c \
    'test ! -e /proc/modules && test -d /run/systemd/system && uname -r')
echo "kernel $kernel"
test "$(ebb exec /srv/api -- python3 -c 'print(6 * 7)')" = 42 || fail 'no python'

# To a server in the guest, by socat on both sides.
ebb exec --detach /srv/api -- socat VSOCK-LISTEN:5000,fork EXEC:cat
for try in 1 2 3 4 5 6 7 8 9 10; do
    answer=$(printf 'CONNECT 5000\nhello' | socat -t 10 - UNIX-CONNECT:/srv/vsock) && break
    sleep 1
done
case "$answer" in 'OK '*hello) ;; *) fail "the guest's socat: $answer";; esac
# To a server on the host: a mebibyte there and its checksum back.
socat -t 20 UNIX-LISTEN:/srv/vsock_6000 SYSTEM:'sha256sum | cut -c 1-64' &
server=$!
while ! test -S /srv/vsock_6000; do sleep 0.1; done
sums=$(ebb exec /srv/api -- sh -c 'head -c 1048576 /dev/urandom >/tmp/data
    sha256sum </tmp/data | cut -c 1-64; socat -t 20 - VSOCK-CONNECT:2:6000 </tmp/data')
wait $server
test "$(echo "$sums" | sort -u | wc -l)" = 1 || fail "checksums differ: $sums"

# ssh through passt, with the address that the guest got by DHCP.
for try in $(seq 30); do
    if $ssh -p 2222 root@127.0.0.1 true; then break; fi
    test "$try" != 30 || fail 'no ssh through passt'
    sleep 1
done
echo "ssh $start $(now)"
$ssh -p 2222 root@127.0.0.1 'ip -4 -o address show dev eth0' | grep -q 10.99.0.2 ||
    fail 'the address is not that of DHCP'
# A mebibyte each way.
head -c 1048576 /dev/urandom >/srv/data
$ssh -p 2222 root@127.0.0.1 'cat >/tmp/there' </srv/data
$ssh -p 2222 root@127.0.0.1 'cat /tmp/there' | cmp - /srv/data || fail 'a file has changed'

ebb ctl /srv/api power-button
code=0
wait $machine || code=$?
test $code = 0 || fail "the monitor ended with $code"
