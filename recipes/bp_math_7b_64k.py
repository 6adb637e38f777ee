"""Recipe BP-Math-7B, 64k responses: the paper's 7B main run, on two trainer nodes of eight 80 GB GPUs.

From the paper (arXiv 2510.18927, section 5.1): responses of up to 64k tokens "to align with the SFT
setting", GRPO advantages, the BAPO bounds (the preset), staleness by sample reuse; Table 1 has its results.
Learning rate 2e-6 and temperature 0.6 are those of its 8k experiments.

Chosen here, not in the paper: 64 prompts x 16 responses per step, four updates of a quarter batch each,
weight decay, steps, segments of 8,192 tokens, layout. The paper starts from its own SFT of Qwen2.5-Math-7B;
this recipe uses DeepSeek-R1-Distill-Qwen-7B, which has the same shape and is public. Engines run on nodes of
their own, whose number is in the cluster file (docs/slurm.md).

Dynamic sampling drops groups with equal rewards and samples others, at most three times the prompts of a step
in all. A truncated response is scored as it is, wrong without a box, and trained on.

Preset: `paper(131_072)`, because the paper's figures show a search per micro-batch (docs/algorithm.md), and
no study here prefers another. A search sees 131,072 tokens: as many responses as the authors' 16,384 at 8k.

    bapo plan recipes/bp_math_7b_64k.py
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
    """Two nodes: TP 4, CP 4."""
    return RunConfig(
        name="bp_math_7b_64k",
        steps=500,
        model=ModelConfig(hf_path=Path("models/DeepSeek-R1-Distill-Qwen-7B")),
        data=DataConfig(path=Path("data/skywork_math/data.jsonl")),
        parallel=ParallelConfig(tensor=4, context=4, data=1, sequence=True),
        rollout=RolloutConfig(
            temperature=0.6,
            max_response_tokens=65536,
            engine="sglang",
            segment_tokens=8192,
            sglang=SglangConfig(tensor=2),
        ),
        algorithm=AlgorithmConfig(bounds=paper(131_072), updates_per_epoch=4),
        batch=BatchConfig(pack_tokens=67584),
    )
