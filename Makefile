# The commands of this project. `make` alone lists them.

SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# pip, with the torch of requirements/torch.txt whatever else is asked for. What is imported is compiled then; compiling all of
# it now would take longer than the rest of the installation.
INSTALL := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint requirements/torch.txt
DEMO := $(filter-out %base.yaml,$(wildcard configs/demo/*.yaml))

# One thread a process: the matrices here are small, and a second thread costs more than it gives.
export OMP_NUM_THREADS := 1

.PHONY: help demo test check format bench lab clean

help:  ## list the commands
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/' | expand -t 16

demo: $(VENV)/.installed-demo  ## train the five demo runs, two at a time, and write one report
	@mkdir -p runs
	printf '%s\n' $(DEMO) | xargs -P 2 -n 1 $(BIN)/firstorder train --progress lines
	@echo "The report, one self-contained page:"
	@$(BIN)/firstorder report --out runs/demo.html runs/demo-*/

test: check  ## everything that must hold: the checks, then the tests
	$(BIN)/python -m pytest -n 2

check: $(VENV)/.installed-dev  ## lint, format, types, direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

format: $(VENV)/.installed-dev  ## put the code into its one format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.installed-demo  ## time our kernels, engine and step beside transformers'
	$(BIN)/firstorder bench

lab: $(VENV)/.installed-dev  ## notebooks
	$(INSTALL) --editable '.[notebooks]'
	$(BIN)/jupyter lab notebooks

clean:  ## remove the environment and everything generated but the runs
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-demo: pyproject.toml requirements/torch.txt | $(VENV)/bin/python
	$(INSTALL) --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml requirements/torch.txt | $(VENV)/bin/python
	$(INSTALL) --editable '.[dev]'
	@touch $@ $(VENV)/.installed-demo
