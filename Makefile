# `make demo` and `make test` are all a new user needs; both make .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# One more than there are cores, because some items wait for processes of theirs.
WORKERS := $(shell expr $$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN) + 1)
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(PYTEST_OPTIONS)
PYTEST_OPTIONS ?=
AS_ON_NPUS := --sim-backend hccl --sim-device npu # also the tests for NPUs: on late devices, with what hccl reduces

# Some images switch byte code off: then every process of every test compiles all sources and rewrites all tests anew.
unexport PYTHONDONTWRITEBYTECODE

CLIENTS := out/clients-venv

FOLDER ?=

.PHONY: help venv demo check test full deep mutants clients lint types docs bench gpu npu compat clean

help: ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-8s %s\n", $$1, $$2}'

venv: $(STAMP) ## the environment that every other target uses

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: venv ## train a small Llama on 8 simulated ranks, compare with one device
	$(BIN)/hyper-parallel demo

check: venv lint ## while editing, a minute or two: ruff and every test of less than 0.1 CPU seconds
	$(PYTEST) --tier check

test: venv lint ## minutes: also the simulated ranks, processes, and drawn inputs with few examples
	$(PYTEST) --tier test

full: venv lint ## everything that needs no accelerator, with all examples: what CI runs
	$(MAKE) --no-print-directory --jobs 2 types docs
	$(PYTEST) --tier full $(AS_ON_NPUS)

deep: venv lint types ## nightly: thousands of drawn inputs for each property, what takes minutes, all on late devices
	$(PYTEST) --tier deep -o faulthandler_timeout=0 $(AS_ON_NPUS)
	$(MAKE) --no-print-directory mutants
	$(MAKE) --no-print-directory clients

mutants: venv ## hours, or one FOLDER=sim/comm: put known bugs in, one at a time; the share that the suite finds
	$(BIN)/python tests/mutants/run.py --folder "$(FOLDER)"

clients: venv $(CLIENTS)/.installed ## other projects' programs on simulated ranks, against torchrun; writes docs/clients.md
	$(BIN)/python -m pytest -o faulthandler_timeout=0 tests/clients $(PYTEST_OPTIONS)
	$(BIN)/python tests/clients/results.py

$(CLIENTS)/.installed: tests/clients/requirements.txt constraints.txt
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -r tests/clients/requirements.txt
	@touch $@

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: venv
	$(BIN)/mypy

docs: venv ## the site of docs/ in out/site, its reference pages made from docstrings
	$(BIN)/mkdocs build --strict --quiet

bench: venv ## side by side with torch: engine, redistribution, simulator; the tables for docs/benchmarks.md
	$(BIN)/python -m benchmarks

gpu: ## on a machine with a GPU, with its own python3 (PYTHON=...): measure all that only a device tells, in 8 minutes
	$(PYTHON) -m benchmarks.device --device cuda --out out/gpu

npu: ## the same on an Ascend device
	$(PYTHON) -m benchmarks.device --device npu --out out/npu

compat: ## the sim suite on the oldest and the newest torch that pyproject allows
	bash benchmarks/compat.sh

clean: ## remove what the targets made
	rm -rf $(VENV) out .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
