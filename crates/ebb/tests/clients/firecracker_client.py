"""The documented calls of firecracker-python."""

import os
import subprocess
import sys
import time

sys.path.insert(0, os.path.dirname(__file__))
import services

services.start()
# Snapshots are not beside the API's socket.
os.environ["EBB_ALLOW_DIR"] = "/var/lib/firecracker/snapshots"

from firecracker import MicroVM
from firecracker.exceptions import VMMError

ADDRESS = "172.20.0.2"
DATA = "/var/lib/firecracker"

SSH = ["ssh", "-i", "/srv/key", "-o", "StrictHostKeyChecking=no", "-o", "LogLevel=ERROR",
       "-o", "UserKnownHostsFile=/dev/null", "-o", "ConnectTimeout=5"]


def ssh(address, *command):
    return subprocess.run([*SSH, f"root@{address}", *command], capture_output=True, text=True)


def wait_for_ssh(address):
    for _ in range(100):
        answer = ssh(address, "cat", "/proc/cmdline")
        if answer.returncode == 0:
            return answer.stdout
        time.sleep(1)
    raise TimeoutError(answer.stderr)


vm = MicroVM(name="first", kernel_file="/srv/vmlinux", base_rootfs="/srv/guest.ext4", vcpu=1,
             memory="256M", ip_addr=ADDRESS, labels={"purpose": "test"}, vsock_enabled=True,
             expose_ports=True, host_port=10222, dest_port=22)
identity = vm._microvm_id
print(vm.create())
try:
    listed = MicroVM.list()
    assert [machine["id"] for machine in listed] == [identity], listed
    assert listed[0]["state"] == "Running" and listed[0]["ip_addr"] == ADDRESS, listed
    assert vm.find(state="Running", labels={"purpose": "test"})[0]["id"] == identity
    assert vm.inspect()["Name"] == "first"
    assert vm.status() == f"VMM {identity} is running", vm.status()
    config = vm.config()
    assert config["machine-config"]["mem_size_mib"] == 256, config
    words = wait_for_ssh(ADDRESS)
    assert "root=/dev/vda rw" in words, words
    assert ssh(ADDRESS, "python3 -c 'print(6 * 7)'").stdout == "42\n"
    print(vm.port_forward(host_port=10280, dest_port=80))
    print(vm.port_forward(host_port=10280, dest_port=80, remove=True))
    assert vm._vmm.get_vmm_state(identity) == "Running"
    print(vm.pause())
    assert vm._vmm.get_vmm_state(identity) == "Paused"
    print(vm.resume())
    assert ssh(ADDRESS, "true").returncode == 0
    # The snapshot is of a disk that is not written any more, and the client removes the disk with
    # the machine.
    ssh(ADDRESS, "echo kept >/run/kept; sync; echo u >/proc/sysrq-trigger; sleep 1")
    vm.snapshot(action="create")
    assert ssh(ADDRESS, "cat /run/kept").stdout == "kept\n"
    subprocess.run(["cp", "-a", "--sparse=always", f"{DATA}/{identity}/rootfs", "/srv/rootfs"],
                   check=True)
finally:
    print(vm.delete())
assert MicroVM.list() == []
assert not os.path.exists(f"/sys/class/net/tap_{identity}")
os.makedirs(f"{DATA}/{identity}")
os.rename("/srv/rootfs", f"{DATA}/{identity}/rootfs")

second = MicroVM(name="second", kernel_file="/srv/vmlinux", base_rootfs="/srv/guest.ext4", vcpu=1,
                 memory="256M", ip_addr=ADDRESS)
snapshot = f"{DATA}/snapshots/{identity}"
try:
    second.create(snapshot=True, memory_path=f"{snapshot}/memory",
                  snapshot_path=f"{snapshot}/snapshot")
    raise AssertionError("the second start was accepted")
except VMMError as error:
    # The client starts a machine that already runs.
    assert "not supported after starting the microVM" in str(error), error
assert ssh(ADDRESS, "cat /run/kept").stdout == "kept\n"
second._process.stop(second._microvm_id)
print("firecracker-python: all done")
