# Every target sets up its own environment: on a machine with Python 3.11 and make, `make test` is all there is to do.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help setup test lint unit format demo bench clean

help:
	@echo "make test    lint, format check, type check and all tests"
	@echo "make demo    every variant against its formula, and two small models trained side by side"
	@echo "make bench   the full CPU benchmark, written to results/"
	@echo "make format  let ruff rewrite what it can"
	@echo "make clean   remove the environment and the caches"

setup: $(STAMP)

# The stamp makes a second run start at once; it is renewed when what must be installed has changed.
# Compiled is what is imported, when it is: all of it would take a minute.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e '.[dev]'
	touch $@

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# Types are checked beside the tests: mypy alone leaves a core idle for a minute.
test: $(STAMP)
	$(MAKE) --jobs 2 lint unit

# Two workers share two cores: one thread each.
unit: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2

format: $(STAMP)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

demo: $(STAMP)
	$(BIN)/mgk demo

bench: $(STAMP)
	$(BIN)/mgk bench --device cpu

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
