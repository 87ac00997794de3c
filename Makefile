# `make demo` and `make test` are all a new user needs; both make .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help venv demo test lint bench compat clean

help: ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-8s %s\n", $$1, $$2}'

venv: $(STAMP) ## the environment that every other target uses

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: venv ## train a small Llama on 8 simulated ranks, compare with one device
	$(BIN)/hyper-parallel demo

test: venv lint ## everything that needs no accelerator
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not slow"

lint: venv ## ruff and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: venv ## side by side with torch: engine, redistribution, simulator; the tables for docs/benchmarks.md
	$(BIN)/python -m benchmarks

compat: ## the sim suite on the oldest and the newest torch that pyproject allows
	bash benchmarks/compat.sh

clean: ## remove what the targets made
	rm -rf $(VENV) out .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
