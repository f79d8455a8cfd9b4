# `make help` lists the targets. All of them may be run repeatedly.

CARGO ?= cargo
PROGRAMS = target/x86_64-unknown-linux-gnu/release
FUZZ_SECONDS ?= 60
LONG_RESULTS = docs/results/tests/long.json
SCALE ?= demo

# The guest's driver and its trackers as modules, for the kernel of the virtual host and its guests:
# EBB_KERNEL or the newest cloud kernel in /boot. The sources are linked into the build directory,
# because Kbuild writes its output next to them.
CLOUD_KERNEL = $(lastword $(shell ls /boot/vmlinuz-*-cloud-amd64 | sort -V))
MODULE_KERNEL ?= $(patsubst vmlinuz-%,%,$(notdir $(or $(EBB_KERNEL),$(CLOUD_KERNEL))))
MODULE_HEADERS = /lib/modules/$(MODULE_KERNEL)/build
MODULES = ebb_balloon ebb_trackers
MODULE_FOLDERS = . $(MODULES)
MODULE_SOURCES = $(wildcard $(foreach folder,$(MODULE_FOLDERS),\
	$(addprefix guest/linux/$(folder)/,*.c *.h Kbuild)))
MODULE_DIRECTORY = target/ebb_balloon/$(MODULE_KERNEL)
MODULE = $(MODULE_DIRECTORY)/ebb_balloon.ko

.PHONY: help deps build deb module module-of-kernel planted-bug demo test test-long test-clients
.PHONY: test-kernels module-debug zone-lock bench lint style fmt doc fuzz clean

help:
	@echo 'make demo    install the dependencies, build, and run the main experiment on real Linux'
	@echo '             guests (minutes)'
	@echo 'make test    install the dependencies and run all tests, including those on real guests'
	@echo 'make test-long  the tests on real guests with full counts (hours); writes $(LONG_RESULTS)'
	@echo 'make test-clients  a Debian guest, passt, and clients of the API of Firecracker, unmodified; as'
	@echo '             root; the first run compiles a kernel (minutes)'
	@echo 'make test-kernels  the tests of the modules on newer kernels, from backports; as root'
	@echo '             (HOST=trixie: all tests, on a virtual host with the kernel of its backports)'
	@echo 'make module-debug  the tests of the modules on a kernel with KASAN, lockdep and other'
	@echo '             checks; the first run compiles it (half an hour)'
	@echo 'make zone-lock  how often and how long a zone is locked under the trackers of free pages, with'
	@echo '             up to 16 vCPUs; the first run compiles a kernel (ten minutes)'
	@echo 'make build   the release programs in $(PROGRAMS):'
	@echo '             ebb, ebbd, ebb-lab, ebb-agent, ebb-guest-agent; and the module'
	@echo 'make deb     the Debian packages ebb, ebbd, ebb-guest-agent and ebb-balloon-dkms, in'
	@echo '             target/deb'
	@echo 'make module  the balloon driver for guests and its trackers:'
	@echo '             target/ebb_balloon/RELEASE/ebb_balloon.ko and ebb_trackers.ko'
	@echo '             (MODULE_KERNEL=RELEASE)'
	@echo 'make planted-bug  the monitor with a bug for the tests that exploit it'
	@echo 'make bench   benchmarks of the balloon device, guest memory, migration and merging'
	@echo 'make lint    formatting, clippy with warnings as errors, licences'
	@echo 'make style   the same without the licences, which the tests also check'
	@echo 'make doc     the documentation of all crates, with warnings as errors'
	@echo 'make fuzz    each fuzz target for FUZZ_SECONDS=$(FUZZ_SECONDS) (needs a nightly compiler'
	@echo '             and cargo-fuzz)'
	@echo 'make deps    only install the dependencies, from Debian packages (as root)'

deps:
	scripts/install-deps.sh

build: module
	$(CARGO) build --release --locked -p ebb -p ebbd -p ebb-lab -p ebb-agent -p ebb-guest-agent

# Only on Debian. The version is that of Cargo.toml.
deb:
	$(CARGO) build --release --locked -p ebb -p ebbd -p ebb-guest-agent -p ebb-packages
	scripts/build-deb.sh $(PROGRAMS) target/deb

# Runs a separate make, because `deps` may have installed the kernel after this file was read. The
# lock serializes builds, because Kbuild has none.
module:
	@mkdir -p target/ebb_balloon
	@flock target/ebb_balloon $(MAKE) --no-print-directory module-of-kernel

module-of-kernel: $(MODULE)

$(MODULE_HEADERS)/Module.symvers:
	@echo 'module: no headers of kernel $(MODULE_KERNEL): run make deps, or' \
		'apt-get install linux-headers-$(MODULE_KERNEL)' >&2
	@exit 1

# The links are recreated, so that deleted sources are not built. Object files are kept, and Kbuild
# rebuilds only what has changed.
$(MODULE): $(MODULE_SOURCES) $(MODULE_HEADERS)/Module.symvers
	@mkdir -p $(addprefix $(MODULE_DIRECTORY)/build/,$(MODULES))
	@find $(MODULE_DIRECTORY)/build -type l -delete
	@for source in $(MODULE_SOURCES:guest/linux/%=%); do \
		ln -s $(abspath guest/linux)/$$source $(MODULE_DIRECTORY)/build/$$source; done
	$(MAKE) -C $(MODULE_HEADERS) M=$(abspath $(MODULE_DIRECTORY)/build) modules
	@for module in $(MODULES); do strip --strip-debug -o $(MODULE_DIRECTORY)/$$module.ko \
		$(MODULE_DIRECTORY)/build/$$module/$$module.ko || exit; done

demo: deps build
	@echo 'demo: capabilities of this machine'
	$(PROGRAMS)/ebb-lab doctor
	@echo 'demo: guests on a host without swap, with and without free page reporting (a few minutes)'
	$(PROGRAMS)/ebb-lab run density --scale $(SCALE)

# The monitor with a bug for a test on real guests, a program of its own: features are unified, so
# that one build cannot have it and the ordinary monitor. With a test that is built anyway, the
# libraries have the features that all tests need, and only the monitor is compiled twice.
planted-bug:
	@echo 'planted-bug: the monitor with a bug that its test exploits'
	$(CARGO) build --locked --workspace --features ebb/planted-bug --bin ebb-planted-bug \
		--test store_order

# The tests of all packages build their programs, including the guest agent. A separate build of the
# agent would compile it twice, because the tests need other features of the same dependencies.
test: deps module planted-bug
	@echo 'test: all crates, including tests on real guests'
	$(CARGO) test --locked --workspace

# The tests on real guests with full counts, sizes and times. The results are committed; `.ci/run`
# reports when they are older than a mechanism.
test-long: deps module planted-bug
	@mkdir -p $(dir $(LONG_RESULTS))
	$(CARGO) build --locked -p ebb -p ebb-agent -p ebb-guest-agent
	EBB_TESTS=long EBB_TEST_RESULTS=$(abspath $(LONG_RESULTS)) \
		$(CARGO) test --locked -p ebb --test guests -- $(LONG_TESTS)

test-clients:
	scripts/install-deps.sh --debian
	$(CARGO) build --locked -p ebb -p ebb-guest-agent
	$(CARGO) test --locked -p ebb --test clients -- --ignored $(CLIENTS)

# KERNELS=trixie for one of them, TESTS=NAME for tests with this name. HOST=trixie for virtual hosts
# instead of guests with its kernel; then TESTS may be several names, and without it all tests run.
test-kernels:
	$(CARGO) build --locked -p ebb -p ebb-agent -p ebb-guest-agent
	scripts/test-kernels.sh $(if $(HOST),--host $(HOST),$(or $(KERNELS),'')) $(TESTS)

# TESTS=NAME for tests with this name.
module-debug:
	$(CARGO) build --locked -p ebb -p ebb-agent -p ebb-guest-agent
	scripts/module-debug.sh $(TESTS)

zone-lock:
	$(CARGO) build --locked --release -p ebb-lab -p ebb-agent
	tree=$$(scripts/guest-kernel.sh locks) && release=$$(ls "$$tree/lib/modules") && \
	    EBB_KERNEL=$$tree/boot/vmlinuz-$$release EBB_MODULES=$$tree/lib/modules/$$release \
	    $(PROGRAMS)/ebb-lab run faults \
	    --series locks-none,locks-percpu,locks-bitmap,locks-reporting

bench:
	$(CARGO) bench --locked -p ebb-balloon -p ebb-guest-ram -p ebb-migration -p ebb-page-merge

lint: style
	$(CARGO) test --locked -p ebb --test licences

style:
	$(CARGO) fmt --all --check
	$(CARGO) clippy --locked --workspace --all-targets -- -D warnings
	@echo 'style: what embeds only parts, and the program without the features of tests'
	$(CARGO) clippy --locked -p ebb-guest-ram -- -D warnings
	$(CARGO) clippy --locked -p ebb-balloon -- -D warnings
	$(CARGO) clippy --locked -p ebb -- -D warnings
	$(CARGO) clippy --locked -p ebb --features planted-bug --bin ebb-planted-bug -- -D warnings

fmt:
	$(CARGO) fmt --all

doc:
	RUSTDOCFLAGS='-D warnings' $(CARGO) doc --locked --workspace --no-deps

fuzz:
	@cd fuzz && for target in fuzz_targets/*.rs; do \
		name=$$(basename $$target .rs); echo "fuzz: $$name for $(FUZZ_SECONDS) s"; \
		$(CARGO) +nightly fuzz run $$name -- -max_total_time=$(FUZZ_SECONDS) || exit 1; \
	done

clean:
	$(CARGO) clean
