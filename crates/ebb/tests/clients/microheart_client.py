"""The documented calls of microheart: its Python class, and its commands."""

import os
import shutil
import subprocess
import time

os.environ["MICROHEART_HOME"] = "/srv/microheart"
os.makedirs("/srv/microheart")
# What `microheart fetch` would fetch.
shutil.copy2("/usr/local/bin/firecracker", "/srv/microheart/firecracker")
os.symlink("/srv/vmlinux", "/srv/microheart/vmlinux-6.1.0")

from microheart import MicroVM


def microheart(*arguments):
    """The output of a command."""
    command = ["/opt/python/bin/microheart", "--key", "/srv/key", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


vm = MicroVM("job1", "/srv/guest.ext4", "/srv/key", vcpu=1, mem_mib=256)
vm.start(wait=150)
try:
    result = vm.run(["uname", "-a"], timeout=30)
    assert result.returncode == 0 and result.stdout.startswith("Linux "), result
    assert vm.run(["sh", "-c", "exit 7"], timeout=30).returncode == 7
    assert vm.ssh("hostname -I").stdout.split()[0] == vm.guest_ip
    assert vm.running() and vm.pid()
    config = vm.machine_config()
    assert (config["vcpu_count"], config["mem_size_mib"]) == (1, 256), config
    assert "Linux" in vm.tail(200) or "login" in vm.tail(200), vm.tail(200)
    # The commands, with a machine that already runs: their own wait for ssh ends after 60 s.
    assert "job1" in microheart("list") and str(vm.pid()) in microheart("status", "--name", "job1")
    assert microheart("ssh", "--name", "job1", "uname") == "Linux\n"
    assert microheart("console", "--name", "job1", "-n", "5")
    began = time.monotonic()
    vm.stop()
    print("stopped after", round(time.monotonic() - began, 1), "s")
    assert not vm.running()
finally:
    vm.clean()
taps = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True).stdout
assert "mh0" not in taps, taps
print("microheart: all done")
