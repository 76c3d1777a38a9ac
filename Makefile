PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
CODE   := diptych services tests protos bench
SUITES := tests/unit tests/properties tests/scenarios tests/contract tests/architecture

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint proto up peers bench chaos clean

help:  ## what can be made
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-8s %s\n", $$1, $$2}'

setup: $(STAMP)  ## .venv with everything that the demo, the tests and the benchmarks need

# pip's own variables and configuration (index, find-links, proxy, cache) are honoured: nothing here overrides them.
$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { \
	  echo "make setup needs Python's venv module (Debian: apt-get install python3-venv)" >&2; rm -rf $(VENV); exit 1; }
	$(BIN)/python -m pip install --disable-pip-version-check -e '.[dev]' -c constraints.txt
	@touch $@

demo: setup  ## one long prompt, prefilled on one worker and decoded on another, and where its time went
	$(BIN)/diptych demo

up: setup  ## the whole system on this machine
	$(BIN)/diptych up

test: setup lint  ## lint, then every test that needs neither containers nor a GPU nor a running system
	$(BIN)/pytest -m "not compose and not gpu" $(SUITES)

lint: setup  ## ruff and mypy; import rules and sizes are tests (tests/architecture)
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy

proto: setup  ## stubs of protos/ into diptych/v1
	$(BIN)/python protos/generate.py

peers: setup  ## builds what the benchmarks compare us with, in the user's cache
	$(BIN)/python -m bench.peers

bench: setup  ## the benchmarks, quick form
	$(BIN)/python -m bench --quick

chaos: setup  ## every failure at every point, then 200 random ones on the real model; DIPTYCH_CHAOS=N, DIPTYCH_CHAOS_SEED=N
	DIPTYCH_MATRIX=all $(BIN)/pytest tests/integration/test_failure_matrix.py -q
	DIPTYCH_CHAOS=$${DIPTYCH_CHAOS:-200} $(BIN)/pytest tests/integration/test_chaos.py -k real_model -s -q

clean:  ## away with the venv and every cache
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
