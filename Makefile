# `make demo`, `make check`, `make test` and `make test-slow` set everything up by themselves.
#
#   make check      lint, types, unit and property tests: the loop of every day
#   make test       all but what is slow
#   make test-slow  what is slow: many kills, frozen disks, every family and temperature, long jobs
#
#   make te-check   Transformer Engine's layers against torch's, on a CPU: all of tests/te
#
#   PYTEST_FLAGS="..."   more flags for pytest, e.g. -x, -k NAME, "-n 4" instead of a worker for each core
#   PYTHON=python3.11     interpreter for the virtual environment (3.11 or newer)
#   TORCH_FLAGS="..."     flags for pip when it installs torch, e.g. an index of CPU builds

PYTHON ?= python3
TORCH_FLAGS ?=
PINS := bapo_megatron/constraints.txt
TORCH := $(shell grep '^torch==' $(PINS))
MEGATRON := $(shell grep '^megatron-core==' $(PINS))
VENV := .venv
BIN := $(VENV)/bin
SGLANG_VENV := .venv-sglang
SGLANG_PINS := bapo_megatron/rollout/engines/sglang_cpu/requirements.txt
DEMO_RUN := runs/demo_cpu

NEMO_RUN_VENV := .venv-nemo-run
NEMO_RUN_PINS := slurm/requirements.txt

# Transformer Engine's Python package without its compiled part, outside of every environment: megatron-core that
# sees one without the other does not import.
TE_SOURCES := $(or $(BAPO_TE_SOURCES),.te)
TE_VERSIONS := $(shell grep '^VERSIONS' bapo_megatron/rehearsal/transformer_engine/sources.py | grep -o '[0-9.]*[0-9]')

.PHONY: setup sglang nemo-run te-sources te-check demo check test test-slow slurm-test lint format gpu-check clean

# Workers are one for each core, and two more for tests that wait (tests/support/scheduling.py).
PYTEST := $(BIN)/python -m pytest --dist loadscope --no-loadscope-reorder

setup: $(VENV)/.done

$(VENV)/.done: setup.py $(PINS) Makefile
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $(TORCH_FLAGS) "$(TORCH)"
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps "$(MEGATRON)"
	$(BIN)/pip install --quiet --disable-pip-version-check -c $(PINS) -e ".[dev]"
	touch $@

# SGLang in an environment of its own: it pins packages that this project's environment must not have.
sglang: $(SGLANG_VENV)/.done

$(SGLANG_VENV)/.done: $(SGLANG_PINS) Makefile
	$(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_VENV)/bin/pip install --quiet --disable-pip-version-check $(TORCH_FLAGS) "$(TORCH)"
	$(SGLANG_VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps -r $(SGLANG_PINS)
	touch $@

# NeMo-Run too: leptonai, which it needs, wants an older anyio than transformers does.
nemo-run: $(NEMO_RUN_VENV)/.done

$(NEMO_RUN_VENV)/.done: $(NEMO_RUN_PINS) Makefile
	$(PYTHON) -m venv $(NEMO_RUN_VENV)
	$(NEMO_RUN_VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps -r $(NEMO_RUN_PINS)
	touch $@

te-sources: $(TE_VERSIONS:%=$(TE_SOURCES)/%/.done)

$(TE_SOURCES)/%/.done: | $(VENV)/.done
	rm -rf $(@D) $(@D).part
	mkdir -p $(@D).part
	@$(BIN)/pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --dest $(@D).part \
		"transformer-engine==$*" || { echo "make: Transformer Engine $* cannot be downloaded (about 1 MB, from the" \
		"package index that pip uses). Without a network, unpack its wheel into FOLDER/$*, touch FOLDER/$*/.done," \
		"and run make with BAPO_TE_SOURCES=FOLDER" >&2; exit 1; }
	$(BIN)/python -m zipfile -e $(@D).part/*.whl $(@D).part
	rm $(@D).part/*.whl
	mv $(@D).part $(@D)
	touch $@

demo: setup
	$(BIN)/bapo train recipes/demo_cpu.py --run-dir $(DEMO_RUN)
	$(BIN)/bapo report $(DEMO_RUN)
	@echo "The plots are in $(DEMO_RUN)/report: open $(DEMO_RUN)/report/index.html"

check: lint
	$(PYTEST) tests/unit tests/property -m "not slow and not integration" -n logical $(PYTEST_FLAGS)

test: setup sglang nemo-run te-sources
	$(PYTEST) -m "not slow" -n auto $(PYTEST_FLAGS)

test-slow: setup sglang nemo-run te-sources
	$(PYTEST) -m slow -n auto $(PYTEST_FLAGS)

# Both tiers of what holds the GPU's layers without a GPU: docs/gpu.md.
te-check: setup te-sources
	$(PYTEST) tests/te tests/unit/rehearsal -n auto $(PYTEST_FLAGS)

# Real jobs on a Slurm of four nodes on this machine. Installs it where it may (root, apt), else skips and says so.
# Part of the two above.
slurm-test: setup nemo-run
	$(PYTEST) tests/slurm -n 3 $(PYTEST_FLAGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Needs a GPU with its own torch: PYTHON=... names the interpreter, nothing is installed.
gpu-check:
	$(PYTHON) -m benchmarks.gpu_check $(GPU_CHECK_FLAGS)

clean:
	rm -rf $(VENV) $(SGLANG_VENV) $(NEMO_RUN_VENV) .te build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
