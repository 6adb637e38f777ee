#!/usr/bin/env bash
# Check of a cluster's installation without a GPU: `make cluster-check [CLUSTER_CHECK=FOLDER]`. Installs both
# environments into a folder of its own by cluster/install.sh, compiles one file of each extension as an installation
# does (cluster/check_compiler.sh), and tests there what a CPU can. Takes 20 GB of disk. CXX names another compiler.
set -euo pipefail
folder=$(realpath -m "$1")
cd "$(dirname "$0")/.."
trainer=$folder/trainer sglang=$folder/sglang
export CLUSTER_WHEELS=$folder/wheels CLUSTER_ARCH= BAPO_SGLANG_PYTHON=$sglang/bin/python

mkdir -p "$folder/compilers"
for name in c++ nvcc; do ln -sf "$PWD/cluster/check_compiler.sh" "$folder/compilers/$name"; done
export CXX=${CXX:-$folder/compilers/c++} PYTORCH_NVCC=$folder/compilers/nvcc

bash cluster/install.sh trainer "$trainer"
bash cluster/install.sh flash_attn_wheel "$trainer"
bash cluster/install.sh sglang "$sglang"
unset CXX PYTORCH_NVCC

python=$trainer/bin/python recipe=recipes/r1_distill_qwen_7b_8k.py
"$python" -m pip install --disable-pip-version-check -c bapo_megatron/constraints.txt pytest pytest-xdist hypothesis
echo "the trainer's packages, where three or four lines are expected (docs/slurm.md):"
"$python" -m pip check || true
echo "the servers' packages:"
"$sglang/bin/python" -m pip check
# torch first: it loads NCCL, which the library of Transformer Engine 2.20 needs.
"$python" -c "
import torch
import transformer_engine.pytorch, transformer_engine_torch
from megatron.core.extensions.transformer_engine import HAVE_TE
assert HAVE_TE
print('Transformer Engine is imported, and megatron-core sees it:', transformer_engine_torch.__file__)"
"$python" -m bapo_megatron.cli doctor
"$python" -m bapo_megatron.cli plan $recipe
"$python" -m bapo_megatron.cli rehearse $recipe
"$python" -m pytest tests/te tests/contract/test_server_args.py -m "not slow" -n "$(nproc)" --dist loadscope
echo "make cluster-check: all passed; $(du -sh "$folder" | cut -f1) in $folder, which may go"
