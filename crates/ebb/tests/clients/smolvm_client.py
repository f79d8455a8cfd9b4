"""The documented calls of smolvm with its Firecracker back end."""

import os
import time
from pathlib import Path

# Snapshots and disks are below the directory of smolvm's state.
os.environ["EBB_ALLOW_DIR"] = "/srv/smolvm"

from smolvm import SmolVM, VMConfig, VMState
from smolvm.storage import MemoryStateManager

directories = {"data_dir": Path("/srv/smolvm"), "socket_dir": Path("/srv/smolvm/sockets")}
os.makedirs(directories["socket_dir"])
options = {"backend": "firecracker", "ssh_key_path": "/srv/key", "comm_channel": "ssh",
           "state_manager": MemoryStateManager(Path("/srv/smolvm")), **directories}
config = VMConfig(vm_id="small", vcpu_count=1, memory=256, kernel_path="/srv/vmlinux",
                  rootfs_path="/srv/guest.ext4", rootfs_format="raw-ext4", ssh_capable=True,
                  backend="firecracker", network_rate_limit_mbps=100,
                  boot_args="console=ttyS0 reboot=k panic=1 pci=off root=/dev/vda rw quiet")


def output(machine, command):
    result = machine.run(command, timeout=30)
    assert result.exit_code == 0, result
    return result.stdout.strip()


def stop(machine):
    """Stops a machine. The client kills a paused one and does not wait for its end, after which
    the tap is free."""
    began = time.monotonic()
    machine.stop(timeout=30)
    asked = time.monotonic()
    while any(state != "Z" for state in states("firecracker")):
        assert time.monotonic() < asked + 10, list(states("firecracker"))
        time.sleep(0.01)
    print("stopped after", round(asked - began, 1), "s, ended", round(time.monotonic() - asked, 2),
          "s later")


def states(program):
    """The states of all processes of a program: Z for one that has ended."""
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":\t", 1) for line in status.read_text().splitlines())
        except FileNotFoundError:
            continue
        if fields["Name"] == program:
            yield fields["State"][0]


vm = SmolVM(config, **options)
try:
    vm.start(boot_timeout=60)
    vm.wait_for_ssh(timeout=150)
    assert vm.status == VMState.RUNNING, vm.status
    assert output(vm, "echo $((6 * 7)); uname -s").split() == ["42", "Linux"]
    assert output(vm, "hostname -I").split()[0] == vm.get_ip()
    assert vm.run("exit 3").exit_code == 3
    Path("/srv/upload").write_text("a file\n")
    vm.upload_file("/srv/upload", "/root/upload")
    vm.download_file("/root/upload", "/srv/download")
    assert Path("/srv/download").read_text() == "a file\n"
    vm.pause()
    assert vm.status == VMState.PAUSED, vm.status
    vm.resume()
    output(vm, "echo kept >/run/kept")
    began = time.monotonic()
    snapshot = vm.snapshot("saved")
    print("snapshot after", round(time.monotonic() - began, 1), "s")
    stop(vm)
    vm.close()

    vm = SmolVM.from_snapshot(snapshot.snapshot_id, resume_vm=True, **options)
    assert vm.status == VMState.RUNNING, vm.status
    assert output(vm, "cat /run/kept") == "kept"
    stop(vm)
finally:
    log = Path("/srv/smolvm/small.log")
    if vm.status != VMState.STOPPED and log.exists():
        print(log.read_text(errors="replace")[-3000:])
    vm.delete()
print("smolvm: all done")
