"""Recipe Qwen3-4B-Instruct-2507, 8k responses, on one node of eight 80 GB GPUs with colocated servers.

From the paper (arXiv 2510.18927): GRPO advantages, the BAPO bounds (the preset), responses of up to 8k
tokens, their data, learning rate 2e-6 and temperature 0.6 of its 8k experiments (section 5.1).

From the model's card: it does not think, and its chat template has no switch for it, so a box counts
anywhere. The card advises temperature 0.7, top-p 0.8 and top-k 20 for inference; training samples from the
whole distribution, as its log-probs must equal the trainer's. The embedding is tied to the output layer.

Chosen here, not in the paper: the model, 64 prompts x 16 responses per step, four updates of a quarter of the
batch each, which is staleness 4 as the paper counts (passes x batch / mini-batch), weight decay, steps,
layout. All GPUs train and sample in turns: while servers sample, the policy is in host memory. By the plan at
least 10 % of GPU memory stays free in both turns.

Dynamic sampling drops groups with equal rewards and samples others, at most three times the prompts of a step
in all. A truncated response is scored as it is, wrong without a box, and trained on.

Preset: `paper()`, because the paper's figures show a search per micro-batch (docs/algorithm.md), and no
study here prefers another.

    bapo plan recipes/qwen3_4b_8k.py
    sbatch slurm/colocated.sbatch recipes/qwen3_4b_8k.py
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
        name="qwen3_4b_8k",
        steps=500,
        model=ModelConfig(hf_path=Path("models/Qwen3-4B-Instruct-2507")),
        data=DataConfig(path=Path("data/skywork_math/data.jsonl")),
        parallel=ParallelConfig(tensor=2, data=4, sequence=True, offload=True),
        rollout=RolloutConfig(
            temperature=0.6,
            max_response_tokens=8192,
            engine="sglang",
            sglang=SglangConfig(servers=8, colocated=True, sync="ipc", memory_fraction=0.75),
        ),
        algorithm=AlgorithmConfig(bounds=paper(), updates_per_epoch=4),
        batch=BatchConfig(pack_tokens=10240),  # longest prompt + longest response
    )
