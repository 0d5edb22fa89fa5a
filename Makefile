# Every target sets up what it needs on a fresh machine: a .venv with the project and the versions of constraints.txt in it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test lint format types generate docs bench clean help

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "callsheet needs Python 3.11 or later, this is " + sys.version)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch  # first, and pinned: later packages take the one that is there
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

RESUME ?= auto

demo: $(READY)  ## train a small language model on the standard library's source, about 75 seconds; RESUME=new starts anew
	$(BIN)/callsheet train pretrain --resume $(RESUME)

test: $(READY)  ## all tests
	$(BIN)/python -m pytest

lint: $(READY)  ## format, lint, types, and that what is generated is fresh
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python tools/generate.py --check
	$(BIN)/mypy

format: $(READY)  ## mend format and lint where that can be done by itself
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

generate: $(READY)  ## make anew what is derived from the lifecycle's table
	$(BIN)/python tools/generate.py

docs: generate  ## the documentation as a site in site/
	$(BIN)/mkdocs build --quiet --strict

bench: $(READY)  ## the figures of benchmarks/, ratios to a floor or a peer in the same run
	$(BIN)/python benchmarks/run.py

clean:  ## everything that the other targets made, but not runs/
	rm -rf $(VENV) site dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
