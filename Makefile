# Every target does its own set-up in .venv: python3 and make are all that a fresh machine needs.
# PYTHON=python3.12 chooses another interpreter; TESTS=tests/test_x.py or PYTEST_ARGS="-k name" narrow the tests.

PYTHON ?= python3
TESTS ?=
PYTEST_ARGS ?=
SCENARIO ?= throughput
# Debian's place for PostgreSQL 15, the oldest that we support.
PG15_BIN ?= /usr/lib/postgresql/15/bin

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Most tests wait for something: four at once, by file, keep two cores busy.
PYTEST = $(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(PYTEST_ARGS)
JOBS ?= 4
# What the modes run on: the suite has run on the embedded PostgreSQL 18 before.
ifneq ($(wildcard $(PG15_BIN)/initdb),)
OTHER := PostgreSQL 15
ON_OTHER := RUNLANE_TEST_DSN= RUNLANE_TEST_PG_BIN=$(PG15_BIN)
else
OTHER := the embedded PostgreSQL 18; PostgreSQL 15 is not installed, so not tested
endif
SOURCES := sql actors runtime bench tests examples

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv demo test lint types imports unit suite modes soak bench clean

help:  ## list the targets
	@sed -n 's/^\([a-z0-9]*\):.*## \(.*\)/  make \1|\2/p' $(firstword $(MAKEFILE_LIST)) | column -t -s '|' 2>/dev/null \
	  || sed -n 's/^\([a-z0-9]*\):.*## \(.*\)/  make \1  \2/p' $(firstword $(MAKEFILE_LIST))

venv: $(STAMP)  ## make .venv with runlane (editable), the embedded Postgres and the test tools

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || \
	  { echo "runlane needs Python 3.11, 3.12 or 3.13: make PYTHON=python3.12 ..." >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "python3 -m venv failed (on Debian: apt-get install python3-venv)" >&2; exit 1; }
	@echo "installing into $(VENV), about a minute"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[embedded,test]'
	@touch $@

demo: $(STAMP)  ## audit every installed distribution with two hosts, one of them killed on the way
	$(BIN)/python -m runtime demo

test: lint types imports suite modes  ## everything that must hold before a change goes in; what CI runs

lint: $(STAMP)  ## ruff
	$(BIN)/ruff check $(SOURCES)

types: $(STAMP)  ## mypy, strict
	$(BIN)/mypy

imports: $(STAMP)  ## import-linter: sql <- actors <- runtime
	$(BIN)/lint-imports

unit: $(STAMP)  ## only the tests that need no server
	$(PYTEST) -m "not db and not soak" $(TESTS)

suite: $(STAMP)  ## every test but the soak, on the embedded PostgreSQL 18 (or RUNLANE_TEST_DSN)
	$(PYTEST) $(TESTS)

modes: $(STAMP)  ## kernel and end-to-end tests in every mode at once, on PostgreSQL 15 where it is installed
	@echo "== notifications off, repeatable read as the default isolation, a held snapshot: on $(OTHER)"
	RUNLANE_TEST_NOTIFY=0 RUNLANE_TEST_ISOLATION="repeatable read" RUNLANE_TEST_HOLD_SNAPSHOT=1 $(ON_OTHER) \
	  $(PYTEST) -m "modes and not soak" $(TESTS)

soak: $(STAMP)  ## the long load and fault tests, each mode by itself, and PostgreSQL 15 without modes
	RUNLANE_TEST_NOTIFY=0 $(PYTEST) -m "modes and not soak" $(TESTS)
	RUNLANE_TEST_ISOLATION="repeatable read" $(PYTEST) -m "modes and not soak" $(TESTS)
	RUNLANE_TEST_HOLD_SNAPSHOT=1 $(PYTEST) -m "modes and not soak" $(TESTS)
	@echo "== on $(OTHER)"
	$(ON_OTHER) $(PYTEST) -m "modes and not soak" $(TESTS)
	$(PYTEST) -m soak $(TESTS)

bench: $(STAMP)  ## the whole lifecycle beside the bare kernel; SCENARIO="drain --json" measures something else
	$(BIN)/python -m bench $(SCENARIO)

clean:  ## remove .venv and every cache; the demo's data in .runlane stays
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
