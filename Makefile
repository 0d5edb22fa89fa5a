# Each target installs what it needs: the project and the versions in constraints.txt, in .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEMO := $(VENV)/.ready-for-demo
TEST := $(VENV)/.ready-for-tests
WORKERS := $(shell $(PYTHON) -c 'import os; print(min(6, 2 + (os.cpu_count() or 1)))')  # two more than cores, because many tests wait for processes
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
CHECK_PYTHON := $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "callsheet needs Python 3.11 or later, this is " + sys.version)'

# Without bytecode files, each process that the tests start would compile torch again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test test-all slow matrix ranks faults oracle resume restarts versions built-on behavior public-scripts test-gpu lint format generate docs docs-serve bench clean help

help:  ## print this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(READY): pyproject.toml constraints.txt
	$(CHECK_PYTHON)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt torch  # first and pinned, so that the packages below do not install another version
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --no-compile --no-deps instructlab-training==0.16.2 megatron-bridge==0.3.1  # only their callbacks are used
	touch $@

RESUME ?= auto

$(DEMO): pyproject.toml constraints.txt
	$(CHECK_PYTHON)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e '.[hf]'
	touch $@

demo: $(DEMO)  ## train a small language model on the standard library's source, two to three minutes including the installation; RESUME=new starts a new run
	$(BIN)/callsheet train pretrain --resume $(RESUME)

$(TEST): pyproject.toml constraints.txt
	$(CHECK_PYTHON)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e '.[test]'
	touch $@

FRAMEWORKS := tests/bridges tests/compat tests/exec
CORE := $(filter-out $(FRAMEWORKS:%=%/) tests/__pycache__/,$(wildcard tests/test_*.py tests/*/))
ONE_FRAMEWORK := tests/bridges/test_huggingface.py tests/bridges/test_bare.py tests/bridges/test_guest_base.py

setup: $(TEST)  ## create .venv with what make test needs

test: setup  ## the core, the trainer, callbacks, loggers, recipes and one framework: four to seven minutes with a new venv, three to five later
	$(PYTEST) -m "not browser and not slow and not test_all" $(CORE) $(ONE_FRAMEWORK)

test-all: test $(READY)  ## make test, then every framework in its pinned version, many ranks and processes, and the browser; about half an hour on two cores
	$(BIN)/python tools/composer_venv.py
	$(BIN)/python tools/ultralytics_venv.py
	$(PYTEST) -m "test_all and not browser and not slow" $(CORE)
	$(PYTEST) $(FRAMEWORKS) $(ONE_FRAMEWORK:%=--deselect %)
	$(PYTEST) -n 2 -m browser tests/report

slow: $(READY)  ## the tests that start many interpreters, and variants of what make test runs
	$(BIN)/python -m pytest -m slow

matrix: $(READY)  ## test again which callback works in which loop, and write the matrix; about five minutes
	$(BIN)/python tools/composer_venv.py
	$(BIN)/python tools/ultralytics_venv.py
	CALLSHEET_MATRIX=write $(BIN)/python -m pytest tests/bridges -k "matrix or guest or composer or ultralytics or built_on" -m "slow or not slow" -p no:randomly
	$(BIN)/python tools/generate.py

mistakes: $(READY)  ## random mistakes in recipe files, about three minutes; the table goes to benchmarks/results/recipe-mistakes.md
	$(BIN)/python benchmarks/recipe_mistakes.py --mistakes 400 > benchmarks/results/recipe-mistakes.md

ranks: $(READY)  ## 200 random runs on 2 and 4 ranks, about ten minutes; the results go to benchmarks/results/ranks.md
	CALLSHEET_SEEDS=200 CALLSHEET_TABLE=benchmarks/results/ranks.md $(BIN)/python -m pytest tests/many_ranks

FAULTY := CALLSHEET_SEEDS=80 CALLSHEET_FAULTS=benchmarks/results/faults.md
RANDOM_FAULTS := python -m pytest -n $(WORKERS) --dist worksteal -k random_faults

faults: $(READY)  ## frameworks whose events are missing, repeated or reordered, about half an hour; the table goes to benchmarks/results/faults.md
	$(BIN)/python tools/composer_venv.py
	$(BIN)/python tools/ultralytics_venv.py
	$(FAULTY) $(BIN)/$(RANDOM_FAULTS) tests/bridges/test_unforeseen.py
	$(FAULTY) .venv-composer/bin/$(RANDOM_FAULTS) tests/bridges/composer_in_its_own_venv.py
	$(FAULTY) .venv-ultralytics/bin/$(RANDOM_FAULTS) tests/bridges/ultralytics_in_its_own_venv.py

oracle: $(READY)  ## runs that are killed repeatedly, compared with uninterrupted runs; the table goes to benchmarks/results/resume.md
	cd tests && ../$(BIN)/python -m trainer.oracle ../benchmarks/results/resume.md

restarts: $(READY)  ## runs whose ranks die and are restarted by torchrun and launch, about ten minutes; the table goes to benchmarks/results/restarts.md
	cd tests && ../$(BIN)/python -m trainer.restarts ../benchmarks/results/restarts.md

versions: $(READY)  ## test the versions of torch and of each framework that have no result yet; about an hour; the table goes to docs/bridges/versions.md
	$(BIN)/python tools/versions.py

built-on: $(READY)  ## train with axolotl, ms-swift, Unsloth and other programs that have no result yet, each in a venv of its own; about half an hour
	$(BIN)/python tools/built_on.py $(if $(ONLY),--only $(ONLY)) $(if $(AGAIN),--again) $(if $(KEEP),--keep)
	$(BIN)/python tools/generate.py

resume: $(READY)  ## random dataloaders, each stopped and resumed somewhere, in the Trainer and in attach; the tables go to benchmarks/results/resumed-data.md
	cd tests && ../$(BIN)/python -W ignore -m trainer.resumed_data ../benchmarks/results/resumed-data.md --cases 200

behavior: $(READY)  ## compare the behavior that users can observe with that of another checkout: make behavior OLD=DIR; about half an hour; the table goes to benchmarks/results/behavior.md
	$(BIN)/python tools/composer_venv.py
	$(BIN)/python tools/ultralytics_venv.py
	$(BIN)/python tools/behavior.py $(OLD) $(if $(ONLY),--only $(ONLY),--table benchmarks/results/behavior.md)

public-scripts: $(READY)  ## public training scripts, alone and under callsheet exec: make public-scripts PUBLIC=DIR; about half an hour; the table goes to benchmarks/results/public-scripts.md
	$(BIN)/python benchmarks/public_scripts.py $(PUBLIC) $(if $(ONLY),--only '$(ONLY)') $(if $(AGAIN),--again)

test-gpu:  ## the tests that need CUDA devices, with an interpreter of your choice: make test-gpu PYTHON=python3; installs nothing
	PYTHONPATH=src:tests$(if $(PYTHONPATH),:$(PYTHONPATH)) $(PYTHON) -m pytest -c /dev/null --rootdir . --confcutdir tests/gpu -p no:cacheprovider -q -rs tests/gpu || test $$? = 5

lint: $(READY)  ## check format, lint, types and generated files
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python tools/generate.py --check
	$(BIN)/mypy

format: $(READY)  ## format the code and apply automatic lint fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

generate: $(READY)  ## write the generated parts of the source and the docs
	$(BIN)/python tools/generate.py

# Without this variable, each build prints a notice that Material for MkDocs is maintained until May 2027.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs

docs: generate  ## build the documentation in site/; open site/index.html, no server is needed
	$(MKDOCS) build --strict

docs-serve: generate  ## serve the documentation at http://127.0.0.1:8000, and rebuild it when a file changes
	$(MKDOCS) serve --strict

bench: $(READY)  ## run all benchmarks; results go to benchmarks/results/, and `make generate` copies them to the docs
	$(BIN)/python benchmarks/run.py

clean:  ## delete everything that the other targets made, except runs/
	rm -rf $(VENV) .venv-composer .venv-ultralytics .venv-versions .venv-built-on site dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
