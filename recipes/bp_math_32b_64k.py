"""Recipe BP-Math-32B, 64k responses: the paper's main run, on eight trainer nodes of eight 80 GB GPUs.

From the paper (arXiv 2510.18927, section 5.1): responses of up to 64k tokens, GRPO advantages, the BAPO
bounds (target 0.4, c_low in [0.6, 0.9] by 0.02, c_high in [1.2, 3.0] by 0.05: the preset), staleness by
sample reuse. Learning rate 2e-6 and temperature 0.6 are those of its 8k experiments.

Chosen here, not in the paper: prompts, group size and updates per step, weight decay, and the layout, which
docs/planning.md explains. The paper starts from its own SFT model, BP-Math-32B; this recipe uses
DeepSeek-R1-Distill-Qwen-32B, another of its backbones, which has the same shape and is public.

Dynamic sampling drops groups with equal rewards and samples others, at most three times the prompts of a step
in all. A truncated response is scored as it is, wrong without a box, and trained on.

Preset: `paper(131_072)`, because the paper's figures show a search per micro-batch (docs/algorithm.md), and
no study here prefers another. A search sees 131,072 tokens: as many responses as the authors' 16,384 at 8k.

    bapo plan recipes/bp_math_32b_64k.py
"""

from pathlib import Path

from bapo_megatron.algo.bapo import paper
from bapo_megatron.config import (
    AlgorithmConfig,
    BatchConfig,
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RolloutConfig,
    RunConfig,
    SglangConfig,
)


def recipe() -> RunConfig:
    """Eight nodes: TP 8 within each, CP 8 across them."""
    return RunConfig(
        name="bp_math_32b_64k",
        steps=500,
        model=ModelConfig(hf_path=Path("models/DeepSeek-R1-Distill-Qwen-32B")),
        data=DataConfig(path=Path("data/skywork_math/data.jsonl"), max_prompt_tokens=2048),
        parallel=ParallelConfig(tensor=8, pipeline=1, context=8, data=1, sequence=True),
        rollout=RolloutConfig(
            prompts_per_step=64,
            group_size=8,
            temperature=0.6,
            max_response_tokens=65536,
            engine="sglang",
            segment_tokens=8192,
            sglang=SglangConfig(tensor=4),  # one GPU has too little memory besides the weights
        ),
        algorithm=AlgorithmConfig(bounds=paper(131_072), advantage="grpo", updates_per_epoch=4),
        optimizer=OptimizerConfig(lr=2e-6, weight_decay=0.01),
        # 65536 + 2048, a multiple of 2 x CP x TP: a pack takes at least one sequence of full length.
        batch=BatchConfig(pack_tokens=67584, recompute="none"),
        checkpoint=CheckpointConfig(every=10, keep_last=2),
    )
