"""Recipe Qwen3.5-4B, a hybrid, 8k responses, on one node of eight 80 GB GPUs with colocated servers.

From the paper (arXiv 2510.18927): GRPO advantages, the BAPO bounds (the preset), responses of up to 8k
tokens, their data, learning rate 2e-6 and temperature 0.6 of its 8k experiments (section 5.1).

From the model's config.json: 32 layers, every fourth with full attention, the others with Gated DeltaNet, a
linear attention; an embedding that is tied to the output layer. The hub's folder also has a vision tower,
which is neither trained nor served. The chat template decides whether the model thinks (docs/customize.md).

Chosen here, not in the paper: the model, 64 prompts x 16 responses per step, four updates of a quarter of the
batch each, which is staleness 4 as the paper counts (passes x batch / mini-batch), weight decay, steps,
layout. All GPUs train and sample in turns: while servers sample, the policy is in host memory. By the plan at
least 10 % of GPU memory stays free in both turns. A server keeps 640 sequence states (51.5 MB each): 5 for
each of 128 requests, its share of a step's responses. No GPU has run a hybrid yet.

Dynamic sampling drops groups with equal rewards and samples others, at most three times the prompts of a step
in all. A truncated response is scored as it is, wrong without a box, and trained on.

Preset: `paper()`, because the paper's figures show a search per micro-batch (docs/algorithm.md), and no
study here prefers another.

    bapo plan recipes/qwen3_5_4b_8k.py
    sbatch slurm/colocated.sbatch recipes/qwen3_5_4b_8k.py
"""

from pathlib import Path

from bapo_megatron.algo.bapo import paper
from bapo_megatron.config import (
    AlgorithmConfig,
    BatchConfig,
    DataConfig,
    ModelConfig,
    ParallelConfig,
    RolloutConfig,
    RunConfig,
    SglangConfig,
)


def recipe() -> RunConfig:
    """One node: TP 2, DP 4, and a server on each GPU."""
    return RunConfig(
        name="qwen3_5_4b_8k",
        steps=500,
        model=ModelConfig(hf_path=Path("models/Qwen3.5-4B")),
        data=DataConfig(path=Path("data/skywork_math/data.jsonl")),
        parallel=ParallelConfig(tensor=2, data=4, sequence=True, offload=True),
        rollout=RolloutConfig(
            temperature=0.6,
            max_response_tokens=8192,
            engine="sglang",
            sglang=SglangConfig(
                servers=8,
                colocated=True,
                sync="ipc",
                memory_fraction=0.75,
                max_in_flight=128,
                flags=("--max-mamba-cache-size=640",),
            ),
        ),
        algorithm=AlgorithmConfig(bounds=paper(), updates_per_epoch=4),
        batch=BatchConfig(pack_tokens=10240),  # longest prompt + longest response
    )
