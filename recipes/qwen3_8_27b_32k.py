"""Recipe Qwen3.8-27B, a hybrid, 32k responses, on eight nodes of eight 80 GB GPUs: four train, four sample.

From the paper (arXiv 2510.18927): GRPO advantages, the BAPO bounds (the preset), learning rate 2e-6 and
temperature 0.6 of its 8k experiments (section 5.1).

From the model's config.json: 64 layers, every fourth with full attention, the others with Gated DeltaNet, a
linear attention. The hub's folder also has a vision tower, which is neither trained nor served. The chat
template decides whether the model thinks (docs/customize.md).

Chosen here, not in the paper: the model, responses of 32k tokens, 64 prompts x 16 responses per step, four
updates of a quarter of the batch each, which is staleness 4 as the paper counts (passes x batch /
mini-batch), weight decay, steps, layout. TP 4, PP 2 and CP 4 on four nodes is slime's layout for this size
and these lengths. TP 4 is the maximum with 4 KV heads; TP x CP divides the 16 key heads of Gated
DeltaNet. Each stage has 32 layers, 8 of them with full attention. A server keeps 640 sequence states
(154 MB each): 5 for each of 128 requests. No GPU has run a hybrid yet.

Dynamic sampling drops groups with equal rewards and samples others, at most three times the prompts of a step
in all. A truncated response is scored as it is, wrong without a box, and trained on.

Preset: `paper(65_536)`, because the paper's figures show a search per micro-batch (docs/algorithm.md), and no
study here prefers another. A search sees 65,536 tokens: as many responses as the authors' 16,384 at 8k.

    bapo plan recipes/qwen3_8_27b_32k.py
    bapo submit recipes/qwen3_8_27b_32k.py --cluster FILE        # rollout_nodes = 4
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
    """Four training nodes: TP 4 and two of the four CP ranks in each, two stages of two nodes."""
    return RunConfig(
        name="qwen3_8_27b_32k",
        steps=500,
        model=ModelConfig(hf_path=Path("models/Qwen3.8-27B")),
        data=DataConfig(path=Path("data/skywork_math/data.jsonl")),
        parallel=ParallelConfig(tensor=4, pipeline=2, context=4, data=1, sequence=True),
        rollout=RolloutConfig(
            temperature=0.6,
            max_response_tokens=32768,
            engine="sglang",
            segment_tokens=8192,
            sglang=SglangConfig(tensor=4, max_in_flight=128, flags=("--max-mamba-cache-size=640",)),
        ),
        algorithm=AlgorithmConfig(bounds=paper(65_536), updates_per_epoch=4),
        batch=BatchConfig(pack_tokens=34816, recompute="selective"),
    )
