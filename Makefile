# What there is to do here; `make help` lists it. Everything works a second time.

CARGO ?= cargo
EBB = target/x86_64-unknown-linux-gnu/release/ebb
FUZZ_SECONDS ?= 60
SCALE ?= demo

.PHONY: help deps build demo test bench lint fmt doc fuzz clean

help:
	@echo 'make demo    install what is needed, build, and run the main experiment on real Linux guests (minutes)'
	@echo 'make test    install what is needed and run all tests, those on real guests included'
	@echo 'make build   the release programs: $(EBB) and ebb-agent beside it'
	@echo 'make bench   benchmarks of the balloon device and of discarding'
	@echo 'make lint    formatting, clippy with warnings as errors, licences'
	@echo 'make doc     the documentation of all crates, with warnings as errors'
	@echo 'make fuzz    each fuzz target for FUZZ_SECONDS=$(FUZZ_SECONDS) (needs a nightly compiler and cargo-fuzz)'
	@echo 'make deps    only install what is needed, from Debian packages (as root)'

deps:
	scripts/install-deps.sh

build:
	$(CARGO) build --release --locked -p ebb -p ebb-agent

demo: deps build
	@echo 'demo: what this machine can do'
	$(EBB) doctor
	@echo 'demo: guests on a host without swap, with and without free page reporting (a few minutes)'
	$(EBB) lab run density --scale $(SCALE)

test: deps
	@echo 'test: all crates, then real guests'
	$(CARGO) build --locked -p ebb -p ebb-agent
	$(CARGO) test --locked --workspace

bench:
	$(CARGO) bench --locked -p ebb-balloon -p ebb-guest-ram

lint:
	$(CARGO) fmt --all --check
	$(CARGO) clippy --locked --workspace --all-targets -- -D warnings
	$(CARGO) test --locked -p ebb --test licences

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
