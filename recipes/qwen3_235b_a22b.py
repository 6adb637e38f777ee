"""Recipe Qwen3-235B-A22B, a mixture of experts, 16k responses, on 16 nodes of eight 80 GB GPUs that train.

From the paper (arXiv 2510.18927): GRPO advantages, the BAPO bounds (the preset), learning rate 2e-6 and
temperature 0.6 of its 8k experiments (section 5.1).

From the model's card: 235 B parameters, 22 B of them active per token: 8 of 128 experts in each of 94 layers.
It thinks by default (qwen3_32b.py), a mode for which the card also advises temperature 0.6.

Chosen here, not in the paper: the model, responses of 16k tokens, 64 prompts x 16 responses per step, four
updates of a quarter of the batch each, weight decay, steps, layout. TP 4 is the maximum with 4 KV
heads. 94 layers are 2 x 47, so the four pipeline stages differ in size: the first is the smallest, since it
keeps the activations of four packs. EP 32 spreads a layer's experts over all GPUs of a stage, four on each.
Every token is trained on the experts that sampled it (`rollout.route_replay`, as in qwen3_30b_a3b.py). A
server has a node: `sglang.tensor` 8.

Dynamic sampling drops groups with equal rewards and samples others, at most three times the prompts of a step
in all. A truncated response is scored as it is, wrong without a box, and trained on.

Preset: `paper(32_768)`, because the paper's figures show a search per micro-batch (docs/algorithm.md), and no
study here prefers another. A search sees 32,768 tokens: as many responses as the authors' 16,384 at 8k.

    bapo plan recipes/qwen3_235b_a22b.py
    bapo submit recipes/qwen3_235b_a22b.py --cluster FILE        # rollout_nodes = 16
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
    """16 training nodes: TP 4, CP 2, four stages, four replicas, the experts over a stage's 32 GPUs."""
    return RunConfig(
        name="qwen3_235b_a22b",
        steps=500,
        model=ModelConfig(hf_path=Path("models/Qwen3-235B-A22B")),
        data=DataConfig(path=Path("data/skywork_math/data.jsonl")),
        parallel=ParallelConfig(
            tensor=4,
            pipeline=4,
            pipeline_layers=(22, 24, 24, 24),
            context=2,
            data=4,
            sequence=True,
            expert=32,
        ),
        rollout=RolloutConfig(
            temperature=0.6,
            max_response_tokens=16384,
            engine="sglang",
            segment_tokens=4096,
            route_replay="replay",
            sglang=SglangConfig(tensor=8),
        ),
        algorithm=AlgorithmConfig(bounds=paper(32_768), updates_per_epoch=4),
        batch=BatchConfig(pack_tokens=18432, recompute="selective"),
    )
