# One page: every command a person or CI needs. `make help` lists them.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
WORKERS ?= 3
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) --dist worksteal

# Ranks are started by the dozen, and without bytecode each compiles what it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help venv fetch demo test check check-full coverage lint types imports spelling bench clean

help: ## List the targets.
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 14

venv: $(STAMP) ## Make .venv and install herder with its development tools.

# torch comes first and alone, so that a changed requirement never downloads it twice. Bytecode is left to
# the first import: compiling all of it takes longer than everything else here.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
	touch $@

fetch: $(STAMP) ## Bring the small model and the corpus into the cache.
	$(BIN)/herder data fetch smollm2-135m-instruct wikipedia-leads

demo: $(STAMP) ## Plan, train, evaluate and serve a real small model; under ten minutes on two cores.
	$(BIN)/python scripts/demo.py

test: $(STAMP) fetch ## Run all the tests that this machine can run.
	$(PYTEST) -m 'not full'

check: lint types imports spelling test ## Everything that CI runs, the tests included.

check-full: check ## The exhaustive matrices too, before an issue is called done.
	$(PYTEST) -m full

coverage: $(STAMP) fetch ## The tests again, half as long once more, with the lines that none of them reaches.
	$(PYTEST) -m 'not full' --cov --cov-report=term-missing:skip-covered

lint: $(STAMP) ## Format and lint.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(STAMP) ## Check types.
	$(BIN)/pyrefly check

imports: $(STAMP) ## Check that imports go downward only.
	$(BIN)/lint-imports

spelling: $(STAMP) ## Check spelling.
	$(BIN)/codespell

bench: $(STAMP) fetch ## Measure training and decoding beside transformers, two ranks beside one process.
	$(BIN)/python bench/run.py

clean: ## Remove what the tools wrote; keep .venv and runs.
	rm -rf .pytest_cache .ruff_cache .import_linter_cache .coverage* htmlcov build dist
	find src tests -name __pycache__ -prune -exec rm -rf {} +
