"""Recipe Qwen3-32B, 32k responses, on eight nodes of eight 80 GB GPUs: four train, four sample.

From the paper (arXiv 2510.18927): GRPO advantages, the BAPO bounds (the preset), learning rate 2e-6 and
temperature 0.6 of its 8k experiments (section 5.1).

From the model's card: it thinks by default (`enable_thinking` of its chat template), between `<think>` and
`</think>`, which the response opens itself; the card also advises temperature 0.6 for this mode. A box counts
only after `</think>` (docs/rewards.md). docs/customize.md shows how to train it without thinking.

Chosen here, not in the paper: the model, responses of 32k tokens (with a prompt of 2k within the context of
40,960), 64 prompts x 16 responses per step, four updates of a quarter of the batch each, which is
staleness 4 as the paper counts (passes x batch / mini-batch), weight decay, steps, layout.

Dynamic sampling drops groups with equal rewards and samples others, at most three times the prompts of a step
in all. A truncated response is scored as it is, wrong without a box, and trained on.

Preset: `paper(65_536)`, because the paper's figures show a search per micro-batch (docs/algorithm.md), and no
study here prefers another. A search sees 65,536 tokens: as many responses as the authors' 16,384 at 8k.

    bapo plan recipes/qwen3_32b.py
    bapo submit recipes/qwen3_32b.py --cluster FILE        # rollout_nodes = 4
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
        name="qwen3_32b",
        steps=500,
        model=ModelConfig(hf_path=Path("models/Qwen3-32B")),
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
