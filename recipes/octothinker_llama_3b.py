"""Recipe OctoThinker-Llama3.2-3B-Long-Zero: the paper's Llama run, on one node of eight 80 GB GPUs.

From the paper (arXiv 2510.18927, appendix A, Fig. 13, Table 2): c_low in [0.8, 0.9], c_high in [1.2, 2.0],
target 0.45, on a Llama after mid-training, "since Llama family models behave badly in RL".

Chosen here, not in the paper: the step sizes of the bounds (0.02 and 0.05, as for the other models),
responses of up to 8k tokens, learning rate and temperature of the analysis runs (2e-6, 0.6), 64 prompts x 16
responses, four passes over each batch, weight decay, steps, layout. A plan reads the shape of its base model,
Llama-3.2-3B, from recipes/shapes.

Dynamic sampling drops groups with equal rewards and samples others, at most three times the prompts of a step
in all. A truncated response is scored as it is, wrong without a box, and trained on.

Preset: `paper()` with the ranges above, because the paper's figures show a search in each micro-batch
(docs/algorithm.md), and no study here prefers another.

    bapo plan recipes/octothinker_llama_3b.py
    sbatch --ntasks-per-node=4 slurm/colocated.sbatch recipes/octothinker_llama_3b.py
"""

from dataclasses import replace
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
    """One node: GPUs 0 to 3 train with TP 4; GPUs 4 to 7 have one server each."""
    bounds = replace(paper(), low_start=0.8, low_end=0.9, high_start=1.2, high_end=2.0, target=0.45)
    return RunConfig(
        name="octothinker_llama_3b",
        steps=500,
        model=ModelConfig(hf_path=Path("models/OctoThinker-3B-Long-Zero")),
        data=DataConfig(path=Path("data/skywork_math/data.jsonl")),
        parallel=ParallelConfig(tensor=4, sequence=True),
        rollout=RolloutConfig(
            temperature=0.6,
            max_response_tokens=8192,
            engine="sglang",
            sglang=SglangConfig(servers=4, first_gpu=4),
        ),
        algorithm=AlgorithmConfig(bounds=bounds, reuse_epochs=4),
        batch=BatchConfig(pack_tokens=10240),
    )
