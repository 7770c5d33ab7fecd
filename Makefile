# Everything starts from Python 3.11+ and a clone: each target makes the virtual environment first when it is missing,
# and again when pyproject.toml or constraints.txt changed.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VENV ?= .venv
PORT ?= 3000
# Where Dagster keeps runs and events. Not taken from the environment: `make demo` and `make ui` must meet on one instance.
DAGSTER_HOME := $(CURDIR)/.dagster
export DAGSTER_HOME

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
BENCH_STAMP := $(VENV)/.bench-installed
EXTRAS ?= cpu,demo
# What linters, tests and benchmarks need beside them; where EXTRAS has it, venv has installed it.
TEST_EXTRAS := $(EXTRAS),dev
BENCH_EXTRAS := $(TEST_EXTRAS),bench
TEST_STAMP := $(VENV)/.tests-installed
COMMA := ,
ifneq ($(filter dev,$(subst $(COMMA), ,$(EXTRAS))),)
  TEST_STAMP := $(STAMP)
endif
SOURCES := surge_dagster assets resources tests benchmarks

# torch's build: PyPI has the CUDA one, PyTorch's own index also the much smaller one for the CPU.
TORCH ?=
ifeq ($(TORCH),cpu)
  TORCH_INDEX := --extra-index-url https://download.pytorch.org/whl/cpu
else ifneq ($(filter-out cuda,$(TORCH)),)
  $(error TORCH is "$(TORCH)"; it can be cpu or cuda)
endif

# Of what pip says: the files that it downloads, when it installs them, and errors.
install = $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off $(TORCH_INDEX) -c constraints.txt -e ".[$(1)]" \
  2> >(sed '/^WARNING: /d' >&2) | sed -un -e '/\.metadata /d' -e 's,^Installing collected.*,  … downloaded; installing,p' \
    -e 's,^ *\(Downloading\|Using cached\|Processing\) \([^ ]*/\)\?\([^ ]*\(whl\|gz\)\)\( ([0-9.]* [kMG]*B)\)\?.*,  \3\5,p'

.PHONY: help venv demo ui test test-processes soak lint eval eval-full bench bench-main-road bench-chunks bench-cluster bench-dagster bench-derive bench-lock bench-output bench-resume bench-sources bench-nightly bench-serve bench-http gpu gpu-carry clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s%s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "  PYTHON=python3.12  interpreter for the environment    VENV=.venv      where the environment is"
	@echo "  TORCH=cpu|cuda     torch's build, when it is made     PORT=3000       of make ui"
	@echo "  EXTRAS=$(EXTRAS)    extras of pyproject.toml; the tests get dev, too, and integrations,postgres,ray,slack run all"
	@echo "  DEMO_LIMIT=6000    texts of make demo                 ARGS='-k name'  handed to demo, test, bench"

venv: $(STAMP) ## make the virtual environment and install into it

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || { \
	  for candidate in $(or $(PYTHON),python3 python3.14 python3.13 python3.12 python3.11); do \
	    if "$$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))' 2>/dev/null; then found=$$candidate; break; fi; \
	  done; \
	  test -n "$${found:-}" || { echo "make: Python 3.11 to 3.14 is needed; name it: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }; \
	  echo "Making $(VENV) with $$("$$found" --version)"; "$$found" -m venv $(VENV); }
	@echo "Installing into $(VENV); the first time takes minutes, most of them for torch"
	@$(call install,$(EXTRAS))
	@touch $@

ifneq ($(TEST_STAMP),$(STAMP))
$(TEST_STAMP): $(STAMP)
	@echo "Installing into $(VENV) what linters and tests need"
	@$(call install,$(TEST_EXTRAS))
	@touch $@
endif

demo: $(STAMP) ## embed this machine's Python docstrings through Dagster, verify the result and search it
	@$(BIN)/surge-dagster demo $(if $(DEMO_LIMIT),--limit $(DEMO_LIMIT)) $(ARGS)

# A script's `make ui &` begins with SIGINT ignored; `dagster dev` would keep that, and ignore SIGTERM with it.
INTERRUPTIBLE := import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])

ui: $(STAMP) ## open Dagster's UI on the instance that make demo filled
	@$(BIN)/python -c 'import socket, sys; s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1); s.bind(("127.0.0.1", int(sys.argv[1])))' $(PORT) 2>/dev/null \
	  || { echo "make ui: port $(PORT) is busy or not allowed; choose another one: make ui PORT=3001" >&2; exit 1; }
	@$(BIN)/python -c '$(INTERRUPTIBLE)' -W 'ignore:Function `dev_command` is superseded' -m dagster dev --workspace workspace.yaml --port $(PORT)

# pyproject.toml has the tests' options, tests/conftest.py their environment: `pytest` alone runs the same as `make test`.
test: $(TEST_STAMP) ## run the tests, in less than five minutes on two cores
	@$(BIN)/python -m pytest $(ARGS)

test-processes: $(TEST_STAMP) ## run those that start and kill whole processes, or measure them
	@$(BIN)/python -m pytest -m "processes and not soak" $(ARGS)

soak: $(TEST_STAMP) ## run the tests that take minutes: many kills, large catalogs
	@$(BIN)/python -m pytest -m soak -n 0 -v $(ARGS)

lint: $(TEST_STAMP) ## ruff and pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

eval: $(TEST_STAMP) ## every table of the paper at the scale of this machine, in 15 minutes: writes docs/evaluation.md
	@$(BIN)/python -m benchmarks.evaluation $(ARGS)

eval-full: $(TEST_STAMP) ## the same with 2, 10 and 50 million texts, in hours
	@$(BIN)/python -m benchmarks.evaluation --scale full $(ARGS)

bench: $(BENCH_STAMP) ## this engine beside sentence-transformers and whatever other peers install
	@$(BIN)/python -m benchmarks.encode $(ARGS)

gpu: $(TEST_STAMP) ## what a GPU makes of this engine, in ten minutes
	@$(BIN)/python -m benchmarks.gpu $(ARGS)

gpu-carry: $(TEST_STAMP) ## a folder of 50 MB that does the same on a machine with torch and little else: gpu-carry/
	@$(BIN)/python -m benchmarks.gpu_models gpu-carry $(ARGS)

bench-main-road: $(TEST_STAMP) ## ten runs as a new user starts them, and runs that a signal stops
	@$(BIN)/python -m benchmarks.main_road $(ARGS)

bench-resume: $(TEST_STAMP) ## how long a run takes to find 40,000 outputs up to date
	@$(BIN)/python -m benchmarks.resume $(ARGS)

bench-output: $(TEST_STAMP) ## serialization, tiny partitions and the bound on memory
	@$(BIN)/python -m benchmarks.output $(ARGS)

bench-sources: $(TEST_STAMP) ## grouping a table in no order, and feeding runs from a sorted one, a disk and a bucket
	@$(BIN)/python -m benchmarks.sources $(ARGS)

bench-lock: $(TEST_STAMP) ## how long hashing, ids and reading hold the interpreter lock; texts/s into a null encoder
	@$(BIN)/python -m benchmarks.lock $(ARGS)

bench-derive: $(TEST_STAMP) ## rows per second of derived spaces, from memory and from files
	@$(BIN)/python -m benchmarks.derive $(ARGS)

bench-chunks: $(TEST_STAMP) ## documents in chunks beside the same chunks as short texts
	@$(BIN)/python -m benchmarks.chunks $(ARGS)

bench-nightly: $(TEST_STAMP) ## what a night costs that changes little
	@$(BIN)/python -m benchmarks.nightly $(ARGS)

bench-serve: $(TEST_STAMP) ## queries beside bulk work: latency over load, promises kept, what each leaves to the other
	@$(BIN)/python -m benchmarks.serve $(ARGS)

bench-http: $(TEST_STAMP) ## runs with an encoder behind HTTP, next to 64 concurrent calls of the openai client
	@$(BIN)/python -m benchmarks.http_encoder $(ARGS)

bench-cluster: $(TEST_STAMP) ## a run over a Ray cluster of hosts that are namespaces, beside the sum of their speeds; needs root
	@$(BIN)/python -m benchmarks.cluster $(ARGS)

bench-dagster: $(TEST_STAMP) ## what Dagster costs: the record of each partition, a tick of the sensor, a refresh, the UI
	@$(BIN)/python -m benchmarks.dagster $(ARGS)

# The peers are not needed: one that is missing is a line in the table that says so.
$(BENCH_STAMP): $(TEST_STAMP)
	@echo "Installing the benchmark's peers into $(VENV)"
	@$(call install,$(BENCH_EXTRAS)) && touch $@ \
	  || echo "make bench: the other peers did not install; going on without them" >&2

clean: ## remove the environment, caches and builds; data/ and .dagster/ stay
	@test ! -e $(STAMP) || rm -rf $(VENV)
	@rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	@find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
