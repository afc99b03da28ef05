# Phasor's commands. `make` alone explains them. Needs Python 3.11 or newer, git and make; nothing else.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# The interpreter that .venv is made with: the first of these that exists, or say PYTHON=/path/to/python.
PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3,$(shell command -v $(name) 2>/dev/null)))
VENV ?= .venv
BIN := $(VENV)/bin
# More arguments for every `pip install`, e.g. PIP_ARGS="--extra-index-url <PyTorch's index of CPU builds>".
PIP_ARGS ?=
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq $(PIP_ARGS)
# Arguments for `make serve`, `make test`, `make test-fast` and `make bench`.
ARGS ?=

ROOTS := core proto kernels engine cache_store prefill_worker decode_worker router deploy
# mypy wants folders that hold modules; a portion may still be empty.
MYPY_PATHS := $(foreach root,$(ROOTS),$(if $(shell find $(root)/phasor -name '*.py' -print -quit),$(root)/phasor))
# Fast suites first, so that a plain mistake shows in seconds; a folder not named here runs last.
SUITES := packaging unit kernels contract integration e2e
TEST_PATHS := $(wildcard $(addprefix tests/,$(SUITES))) \
	$(filter-out $(addprefix tests/,$(SUITES) data helpers __pycache__),$(patsubst %/,%,$(wildcard tests/*/)))
DEPS := $(VENV)/.deps-stamp
READY := $(VENV)/.ready-stamp
MODEL ?= smollm2

.PHONY: help venv model demo serve test test-fast lint format proto bench performance lock clean

help:
	@echo 'Phasor: serve one language model with prompt readers and reply writers on different machines.'
	@echo
	@echo 'Start here (each sets up all it needs on the first run, and reuses it on the next):'
	@echo '  make demo         start everything here, ask two questions, show what moved where, stop'
	@echo '  make serve        serve until Ctrl-C, on 127.0.0.1:50051; more flags: make serve ARGS="--help"'
	@echo '  make test         every test that needs no GPU, the real model included (15 to 20 minutes)'
	@echo
	@echo 'While you work:'
	@echo '  make test-fast    the tests without real model, Ray or GPU (under a minute); ARGS="-k name -x"'
	@echo '  make lint         ruff, mypy --strict, import contracts, generated code up to date'
	@echo '  make format       let ruff rewrite the code'
	@echo '  make proto        generate the Python code of proto/phasor/v1/*.proto again'
	@echo '  make bench        run the benchmarks in bench/ (about 10 minutes) and keep what they measured'
	@echo '  make performance  render docs/performance.md from what was kept'
	@echo
	@echo 'Set-up and upkeep:'
	@echo '  make venv         .venv with the locked dependencies and Phasor itself, editable'
	@echo '  make model        fetch and convert the demo model (MODEL=$(MODEL)) into the user cache'
	@echo '  make lock         resolve pyproject.toml afresh into requirements/lock.txt'
	@echo '  make clean        remove caches and build output; CLEAN=all removes .venv too'
	@echo
	@echo 'Variables: PYTHON=$(PYTHON) VENV=$(VENV) PIP_ARGS=$(PIP_ARGS)'

# ---- set-up -------------------------------------------------------------------------------------

venv: $(READY)
	@:

$(VENV)/pyvenv.cfg:
	@test -n "$(PYTHON)" || { echo 'No Python found. Install Python 3.11, or say make PYTHON=/path/to/python.' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo '$(PYTHON) is older than Python 3.11. Say make PYTHON=/path/to/python3.11.' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
		|| { echo '$(PYTHON) lacks venv or ensurepip (Debian: apt-get install python3-venv), or say make PYTHON=...' >&2; exit 1; }
	@echo 'Making $(VENV) with $(PYTHON)'
	@$(PYTHON) -m venv $(VENV)

# torch comes first and by itself: a build for this machine (CPU wheel on disk, CUDA build) must win over
# what an index offers. A CUDA build brings its own triton; beside a CPU build the kernels' interpreter needs ours.
$(DEPS): requirements/lock.txt requirements/triton.txt | $(VENV)/pyvenv.cfg
	@echo 'Installing the locked dependencies into $(VENV) (the first time takes minutes)'
	@$(PIP) -c requirements/lock.txt "$$(grep '^torch==' requirements/lock.txt)"
	@$(BIN)/python -c 'import importlib.util as u; raise SystemExit(u.find_spec("triton") is None)' \
		|| $(PIP) --no-deps -r requirements/triton.txt
	@$(PIP) --no-deps -r requirements/lock.txt
	@touch $@

# --no-build-isolation: hatchling is in the lock file, so that building asks no index. The install compiles
# kernels/csrc if there is a C++ compiler; the script then says what is there, because pip does not.
KERNELS := hatch_build.py scripts/build_kernels.py $(wildcard kernels/csrc/*)
$(READY): $(DEPS) pyproject.toml $(KERNELS)
	@$(PIP) --no-deps --no-build-isolation --editable .
	@$(BIN)/python scripts/build_kernels.py || true
	@$(BIN)/python -m pip --disable-pip-version-check check
	@touch $@

model: venv
	@$(BIN)/phasor model fetch $(MODEL)

# ---- run ----------------------------------------------------------------------------------------

demo: model
	@$(BIN)/phasor demo $(ARGS)

serve: model
	@$(BIN)/phasor serve $(ARGS)

# ---- check --------------------------------------------------------------------------------------

test: model
	@$(BIN)/python -m pytest -m 'not gpu' $(ARGS) $(TEST_PATHS)

test-fast: venv
	@$(BIN)/python -m pytest -m 'not gpu and not slow and not ray' $(ARGS) $(TEST_PATHS)

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict $(MYPY_PATHS) $(wildcard tests/helpers scripts)
	$(BIN)/lint-imports --no-logo
	$(BIN)/python scripts/generate_proto.py --check

format: venv
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

proto: venv
	$(BIN)/python scripts/generate_proto.py

# Every bench/bench_*.py is a program that prints JSON lines; run_all.py keeps them in bench/results/.
bench: model
	@$(BIN)/python bench/run_all.py $(ARGS)

performance: venv
	@$(BIN)/python scripts/render_performance.py

# ---- upkeep -------------------------------------------------------------------------------------

lock:
	$(PYTHON) scripts/lock.py

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
	@if [[ '$(CLEAN)' == all ]]; then rm -rf $(VENV); fi
