#!/bin/sh
# Runs the tests of the guests' modules (names that begin with `module`) on guests whose kernel
# checks memory, locks and RCU: KASAN, lockdep, DEBUG_VM and others. A report in a guest's log fails
# its test. The first run compiles that kernel (scripts/guest-kernel.sh).
#
#   scripts/module-debug.sh [NAME]     only tests whose names contain NAME
set -eu

cd "$(dirname "$0")/.."
tree=$(scripts/guest-kernel.sh debug)
release=$(ls "$tree/lib/modules")
# Guests are tested, and not the host under them: that has the machine's own cloud kernel.
host_kernel=$(find /boot -name 'vmlinuz-*-cloud-amd64' | sort -V | tail -n 1)
printf 'module-debug: testing: guests with %s\n' "$release"
EBB_TESTS=debug EBB_GUEST_TESTS_HOST_KERNEL=$host_kernel EBB_KERNEL=$tree/boot/vmlinuz-$release \
    EBB_MODULES=$tree/lib/modules/$release \
    cargo test --locked -p ebb --test guests -- "${1:-module}"
