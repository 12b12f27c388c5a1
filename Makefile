# Portolan: build, run, test, measure, install. Every target works in a fresh clone.

PREFIX  ?= /usr/local
DESTDIR ?=

SHELL   := /bin/bash
export PATH := $(PATH):$(HOME)/.cargo/bin
export CARGO_TERM_COLOR ?= auto
# The commit that --version shows.
export PORTOLAN_COMMIT := $(shell git describe --always --dirty --abbrev=12 --exclude="*" 2>/dev/null)

RELEASE := target/release
SHARE   := $(DESTDIR)$(PREFIX)/share
# Where the linker and the loader look for libraries: Debian's packages set it.
LIBDIR  ?= $(PREFIX)/lib
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml)
JSON    ?= bench.json

.PHONY: build run check test lint audit fuzz memcheck soak strangers tokio-tests bench doc install uninstall deb image \
  clean build-deps run-deps test-deps

# The programs that `make install` installs.
build: build-deps
	cargo build --release -p portolan-cli -p portolan-server -p portolan-preload -p portolan-bench

run: run-deps build
	$(RELEASE)/portolan demo

# The checks that need neither root nor namespaces: faster than `make test` by minutes.
check: lint
	cargo test --all-targets $(addprefix -p portolan-,types wire timers tcp stack control proto local manual \
	  sim layers requirements)

# Programs and tests in one build: by themselves the programs would be built with fewer features, and then once more.
test: build-deps
	$(MAKE) --jobs=2 test-deps lint
	cargo build --workspace --all-targets
	scripts/ungrouped scripts/run-tests

lint: build-deps
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --features portolan-programs/large -- -D warnings
	scripts/third-party target/third-party

# Licences, sources and known vulnerabilities of the crates: make audit CHECKS="licenses bans sources" needs no network but
# for installing cargo-deny, which takes minutes if it is missing.
audit:
	command -v cargo-deny >/dev/null || cargo install --locked 'cargo-deny@^0.20'
	cargo deny check $(CHECKS)

# Longer than the tests do: make fuzz TIME=10m TARGET=duel. Tries all harnesses by default, and the control protocol of a
# live server (TARGET=control_protocol), which needs root; TARGET=interleavings runs what loom checks with more preemptions,
# and the models of waiting with more threads.
fuzz: test-deps
	scripts/fuzz "$(or $(TARGET),all)" $(TIME)

# Memory that is lent to programs, under valgrind: seconds.
memcheck: test-deps
	scripts/memcheck

# Runs all attackers at once beside another user's redis, nginx and iperf3, and prints a table: make soak TIME=1200. Needs
# root, and an otherwise idle machine.
soak: test-deps
	cargo build --workspace
	scripts/ungrouped env PORTOLAN_TEST_SECONDS=$(or $(TIME),1200) cargo test -q -p portolan-server --test hostile -- \
	  --nocapture --exact soak::attackers_all_at_once_harm_nobody_and_leave_nothing

# Tests demanding servers, including large ones, with several starts for each pairing of stacks: takes minutes.
strangers:
	scripts/install-dependencies large
	cargo build --workspace
	PORTOLAN_TEST_STARTS=$(or $(STARTS),20) cargo test -p portolan-programs --features large --test large --test strangers \
	  -- --nocapture --test-threads 1

# Tokio's own tests of its sockets, on those of portolan::net::tokio: make tokio-tests ARGS=udp. Needs root.
tokio-tests: test-deps
	cargo build --workspace
	scripts/tokio-tests $(ARGS)

# ARGS takes suites and options: make bench ARGS="rtt redis --runs 9"
bench: run-deps build
	$(RELEASE)/portolan bench --json $(JSON) $(ARGS)

# The commands' reference is in git, and a test fails if it is out of date; the table of requirements is not in git.
doc:
	cargo doc --workspace --no-deps
	cargo build -p portolan-cli -p portolan-server
	target/debug/portolan manual --markdown | scripts/reference-page portolan
	target/debug/portoland --markdown | scripts/reference-page portoland
	target/debug/portolan manual --schema >docs/reference/portolan.schema.json
	cargo run -q -p portolan-requirements
	@if command -v mdbook >/dev/null; then mdbook build docs; \
	else echo "mdbook is not installed: the book stays as it is, readable in docs/"; fi

# Needs no compiler if `make build` has been run before, since root may not have one.
install:
	@test -x $(RELEASE)/portolan || { echo "run \`make build\` first" >&2; exit 1; }
	install -D -m 755 $(RELEASE)/portolan $(DESTDIR)$(PREFIX)/bin/portolan
	install -D -m 755 $(RELEASE)/portoland $(DESTDIR)$(PREFIX)/sbin/portoland
	install -D -m 644 $(RELEASE)/libportolan_preload.so $(DESTDIR)$(PREFIX)/lib/portolan/libportolan_preload.so
	install -d $(DESTDIR)$(LIBDIR)/pkgconfig
	ln -sfr $(DESTDIR)$(PREFIX)/lib/portolan/libportolan_preload.so $(DESTDIR)$(LIBDIR)/libportolan.so.0
	ln -sf libportolan.so.0 $(DESTDIR)$(LIBDIR)/libportolan.so
	sed -e 's|@PREFIX@|$(PREFIX)|' -e 's|@LIBDIR@|$(LIBDIR)|' -e 's|@VERSION@|$(VERSION)|' contrib/portolan.pc.in \
	  >$(DESTDIR)$(LIBDIR)/pkgconfig/portolan.pc
	install -D -m 755 $(RELEASE)/portolan-bench $(DESTDIR)$(PREFIX)/lib/portolan/portolan-bench
	install -D -m 755 $(RELEASE)/portolan-traffic $(DESTDIR)$(PREFIX)/lib/portolan/portolan-traffic
	install -D -m 755 $(RELEASE)/portolan-engine $(DESTDIR)$(PREFIX)/lib/portolan/portolan-engine
	install -D -m 755 $(RELEASE)/portolan-micro $(DESTDIR)$(PREFIX)/lib/portolan/portolan-micro
	install -D -m 755 $(RELEASE)/portolan-native $(DESTDIR)$(PREFIX)/lib/portolan/portolan-native
	install -D -m 755 $(RELEASE)/portolan-owner $(DESTDIR)$(PREFIX)/lib/portolan/portolan-owner
	install -D -m 644 -t $(DESTDIR)$(PREFIX)/include/portolan include/portolan/*.h
	install -D -m 644 docs/man/portoland.toml.5 $(SHARE)/man/man5/portoland.toml.5
	$(RELEASE)/portolan manual $(SHARE)/man/man1
	$(RELEASE)/portoland --manual $(SHARE)/man/man8
	install -d $(SHARE)/bash-completion/completions $(SHARE)/zsh/site-functions $(SHARE)/fish/vendor_completions.d
	$(RELEASE)/portolan completions bash >$(SHARE)/bash-completion/completions/portolan
	$(RELEASE)/portolan completions zsh >$(SHARE)/zsh/site-functions/_portolan
	$(RELEASE)/portolan completions fish >$(SHARE)/fish/vendor_completions.d/portolan.fish

uninstall:
	rm -f $(DESTDIR)$(PREFIX)/bin/portolan $(DESTDIR)$(PREFIX)/sbin/portoland
	rm -rf $(DESTDIR)$(PREFIX)/lib/portolan $(DESTDIR)$(PREFIX)/include/portolan
	rm -f $(DESTDIR)$(LIBDIR)/libportolan.so $(DESTDIR)$(LIBDIR)/libportolan.so.0 $(DESTDIR)$(LIBDIR)/pkgconfig/portolan.pc
	rm -f $(SHARE)/man/man1/portolan.1 $(SHARE)/man/man1/portolan-*.1 $(SHARE)/man/man5/portoland.toml.5 \
	  $(SHARE)/man/man8/portoland.8 $(SHARE)/bash-completion/completions/portolan \
	  $(SHARE)/zsh/site-functions/_portolan $(SHARE)/fish/vendor_completions.d/portolan.fish

# The packages for Debian, in target/deb: portolan, libportolan-dev, and separate debug symbols.
deb: build
	scripts/package-deb target/deb $(RELEASE)

# A container image as an OCI layout, without a daemon.
image: build
	rm -rf target/image
	scripts/oci-image target/image

clean:
	cargo clean
	rm -rf docs/book

build-deps run-deps test-deps: %-deps:
	@scripts/install-dependencies $*
