# Every target sets up its own environment: `make test` needs only Python 3.11 and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help setup test lint unit sanitize format demo docs bench cross-compile mutants golden test-ecosystem package clean

help:
	@echo "make test    check lint, format and types, and run all tests"
	@echo "make demo    check every variant against its formula and train three small models"
	@echo "make docs    build the documentation site into build/site"
	@echo "make bench   measure what mixture attention gains on this machine"
	@echo "make sanitize  test the native CPU kernels with sanitizers"
	@echo "make cross-compile  compile the kernels for all GPUs, which need not be there"
	@echo "make golden  train five tiny models and compare their losses with the recorded ones"
	@echo "make mutants break the code in one place at a time and see a test fail (ten minutes)"
	@echo "make package build the wheel and the source distribution, and try them in a clean environment"
	@echo "make test-ecosystem  test with TRL, PEFT, torchao and so on, and run Transformers' own tests"
	@echo "make format  let ruff rewrite what it can"
	@echo "make clean   remove the environment and the caches"

setup: $(STAMP)

# The stamp lets a second run start at once. The environment is installed again when one of these files changes.
# Compiling all modules would take a minute; Python compiles those that are imported.
$(STAMP): pyproject.toml constraints.txt hatch_build.py $(wildcard src/mgk/ops/native/*.cpp src/mgk/ops/native/*.h src/mgk/ops/native/build.py)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e '.[dev]'
	touch $@

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# Types are checked in parallel with the tests: mypy uses one core for a minute.
test: $(STAMP)
	$(MAKE) --jobs 2 lint unit

# Two workers share two cores: one thread each.
unit: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2

# The native kernels with AddressSanitizer and UndefinedBehaviorSanitizer. Python itself keeps memory at its exit.
SANITIZED := build/native_sanitized.so
sanitize: $(STAMP)
	mkdir -p build
	$(BIN)/python src/mgk/ops/native/build.py $(SANITIZED) -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all
	LD_PRELOAD="$$($${CXX:-g++} -print-file-name=libasan.so) $$($${CXX:-g++} -print-file-name=libubsan.so)" \
		ASAN_OPTIONS=detect_leaks=0 MGK_NATIVE_LIBRARY=$(SANITIZED) OMP_NUM_THREADS=2 \
		$(BIN)/pytest tests/ops -k native --deselect tests/ops/test_native.py::test_ten_thousand_calls_keep_no_memory

format: $(STAMP)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

demo: $(STAMP)
	$(BIN)/mgk demo

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build
	@echo "build/site/index.html is ready. To search in it: $(BIN)/python -m http.server --directory build/site"

bench: $(STAMP)
	$(BIN)/mgk bench

cross-compile: $(STAMP)
	$(BIN)/python -m benchmarks.cross_compile

golden: $(STAMP)
	$(BIN)/python -m benchmarks.golden

# Libraries around Transformers, in an environment of their own, and Transformers' own tests of models. pip compiles the
# modules here: torchao warns when it is compiled, and warnings are errors in tests.
ECOSYSTEM := .venv-ecosystem
test-ecosystem:
	test -x $(ECOSYSTEM)/bin/python || $(PYTHON) -m venv $(ECOSYSTEM)
	$(ECOSYSTEM)/bin/python -m pip install --quiet -c constraints.txt -e '.[dev,ecosystem]'
	OMP_NUM_THREADS=1 $(ECOSYSTEM)/bin/pytest tests/hf/ecosystem
	OMP_NUM_THREADS=1 $(ECOSYSTEM)/bin/python -m tests.hf.transformers_tests

mutants: $(STAMP)
	$(BIN)/python -m tests.mutants

# The wheel is built from the source distribution, and installed with its dependencies where nothing else is.
package: $(STAMP)
	rm -rf dist build/clean
	$(BIN)/python -m build
	$(PYTHON) -m venv build/clean
	build/clean/bin/python -m pip install --quiet -c constraints.txt "$$(ls dist/*.whl)[train]"
	cd build && clean/bin/python ../.ci/smoke.py commands

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
