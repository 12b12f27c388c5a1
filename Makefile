# Portolan: build, run, test, measure, install. Every target works in a fresh clone.

PREFIX  ?= /usr/local
DESTDIR ?=

SHELL   := /bin/bash
export PATH := $(PATH):$(HOME)/.cargo/bin
export CARGO_TERM_COLOR ?= auto

RELEASE := target/release
JSON    ?= bench.json

.PHONY: build run test lint fuzz requirements bench doc install uninstall clean deps

build: deps
	cargo build --release --workspace

run: build
	$(RELEASE)/portolan demo

test: lint
	cargo build --workspace
	cargo test --workspace --all-targets

lint: deps
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings

# Longer than the tests do: make fuzz TIME=10m TARGET=duel. Tries all harnesses by default.
fuzz: deps
	scripts/fuzz "$(or $(TARGET),all)" "$(or $(TIME),60s)"

# The table of docs/reference/requirements.md, from what comments cite.
requirements:
	cargo run -q -p portolan-requirements

# Suites and options go into ARGS: make bench ARGS="rtt redis --runs 9"
bench: build
	$(RELEASE)/portolan bench --json $(JSON) $(ARGS)

doc:
	cargo doc --workspace --no-deps
	@if command -v mdbook >/dev/null; then mdbook build docs; \
	else echo "mdbook is not installed: the book stays as it is, readable in docs/"; fi

# Needs no compiler if `make build` has run before, so that root need not have one.
install:
	@test -x $(RELEASE)/portolan || { echo "run \`make build\` first" >&2; exit 1; }
	install -D -m 755 $(RELEASE)/portolan $(DESTDIR)$(PREFIX)/bin/portolan
	install -D -m 755 $(RELEASE)/portoland $(DESTDIR)$(PREFIX)/sbin/portoland
	install -D -m 644 $(RELEASE)/libportolan_preload.so $(DESTDIR)$(PREFIX)/lib/portolan/libportolan_preload.so
	install -D -m 755 $(RELEASE)/portolan-traffic $(DESTDIR)$(PREFIX)/lib/portolan/portolan-traffic
	install -D -m 755 $(RELEASE)/portolan-engine $(DESTDIR)$(PREFIX)/lib/portolan/portolan-engine
	install -D -m 755 $(RELEASE)/portolan-owner $(DESTDIR)$(PREFIX)/lib/portolan/portolan-owner
	install -D -m 644 include/portolan/qos.h $(DESTDIR)$(PREFIX)/include/portolan/qos.h
	install -D -m 644 include/portolan/raw.h $(DESTDIR)$(PREFIX)/include/portolan/raw.h
	install -D -m 644 include/portolan/thread.h $(DESTDIR)$(PREFIX)/include/portolan/thread.h
	install -D -m 644 include/portolan/extension.h $(DESTDIR)$(PREFIX)/include/portolan/extension.h
	install -D -m 644 include/portolan/install.h $(DESTDIR)$(PREFIX)/include/portolan/install.h
	for page in docs/man/*.[1-8]; do \
	  install -D -m 644 $$page $(DESTDIR)$(PREFIX)/share/man/man$${page##*.}/$${page##*/}; done

uninstall:
	rm -f $(DESTDIR)$(PREFIX)/bin/portolan $(DESTDIR)$(PREFIX)/sbin/portoland
	rm -rf $(DESTDIR)$(PREFIX)/lib/portolan $(DESTDIR)$(PREFIX)/include/portolan
	for page in docs/man/*.[1-8]; do \
	  rm -f $(DESTDIR)$(PREFIX)/share/man/man$${page##*.}/$${page##*/}; done

clean:
	cargo clean
	rm -rf docs/book

deps:
	@scripts/install-dependencies
