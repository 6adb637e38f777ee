"""Recipe R1-Distill-Qwen-32B, 32k responses, on four trainer nodes of eight 80 GB GPUs.

From the paper (arXiv 2510.18927): DeepSeek-R1-Distill-Qwen-32B is among its backbones (section 5.1). GRPO
advantages, the BAPO bounds (the preset).

Chosen here, not in the paper: responses of 32k tokens (Fig. 11 has them for the 7B: its base model's bars are
Table 1's 7B row; see r1_distill_qwen_7b_8k.py), learning rate and temperature of the 8k experiments, 64
prompts x 16 responses, four updates of a quarter of the batch each, which is staleness 4 as the paper counts
(passes x batch / mini-batch), weight decay, steps, layout.

Dynamic sampling drops groups with equal rewards and samples others, at most three times the prompts of a step
in all. A truncated response is scored as it is, wrong without a box, and trained on.

Preset: `paper(65_536)`, because the paper's figures show a search per micro-batch (docs/algorithm.md), and no
study here prefers another. A search sees 65,536 tokens: as many responses as the authors' 16,384 at 8k.

    bapo plan recipes/r1_distill_qwen_32b.py
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
    """Four nodes: TP 8 within each, PP 2 and CP 2 across them."""
    return RunConfig(
        name="r1_distill_qwen_32b",
        steps=500,
        model=ModelConfig(hf_path=Path("models/DeepSeek-R1-Distill-Qwen-32B")),
        data=DataConfig(path=Path("data/skywork_math/data.jsonl")),
        parallel=ParallelConfig(tensor=8, pipeline=2, context=2, data=1, sequence=True),
        rollout=RolloutConfig(
            temperature=0.6,
            max_response_tokens=32768,
            engine="sglang",
            segment_tokens=8192,
            sglang=SglangConfig(tensor=4),
        ),
        algorithm=AlgorithmConfig(bounds=paper(65_536), updates_per_epoch=4),
        batch=BatchConfig(pack_tokens=34816),
    )
