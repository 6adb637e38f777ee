"""Recipe Qwen3-30B-A3B, a mixture of experts, 16k responses, on four nodes of eight 80 GB GPUs: two train.

From the paper (arXiv 2510.18927): GRPO advantages, the BAPO bounds (the preset), learning rate 2e-6 and
temperature 0.6 of its 8k experiments (section 5.1).

From the model's card: 30.5 B parameters, 3.3 B of them active per token: 8 of 128 experts in each of 48
layers. It thinks by default (qwen3_32b.py), a mode for which the card also advises temperature 0.6.

Chosen here, not in the paper: the model, responses of 16k tokens, 64 prompts x 16 responses per step, four
updates of a quarter of the batch each, weight decay, steps, layout. TP 4 is the maximum with 4 KV
heads. EP 8 keeps expert traffic on a node's NVLink; by the plan EP 16 takes 11 GB less GPU memory, but 11 s
of communication per update in place of 3 s. Every token is trained on the experts that sampled it
(`rollout.route_replay`): a batch trains after the weights have changed, and without replay engine and
trainer would route differently (docs/parallelism.md#routes). External servers need
`--enable-return-routed-experts --moe-runner-backend triton`.

Dynamic sampling drops groups with equal rewards and samples others, at most three times the prompts of a step
in all. A truncated response is scored as it is, wrong without a box, and trained on.

Preset: `paper(32_768)`, because the paper's figures show a search per micro-batch (docs/algorithm.md), and no
study here prefers another. A search sees 32,768 tokens: as many responses as the authors' 16,384 at 8k.

    bapo plan recipes/qwen3_30b_a3b.py
    bapo submit recipes/qwen3_30b_a3b.py --cluster FILE        # rollout_nodes = 2
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
    """Two training nodes: TP 4, four replicas, the experts over the eight GPUs of each node."""
    return RunConfig(
        name="qwen3_30b_a3b",
        steps=500,
        model=ModelConfig(hf_path=Path("models/Qwen3-30B-A3B")),
        data=DataConfig(path=Path("data/skywork_math/data.jsonl")),
        parallel=ParallelConfig(tensor=4, data=4, sequence=True, expert=8),
        rollout=RolloutConfig(
            temperature=0.6,
            max_response_tokens=16384,
            engine="sglang",
            segment_tokens=4096,
            route_replay="replay",
            sglang=SglangConfig(tensor=2),
        ),
        algorithm=AlgorithmConfig(bounds=paper(32_768), updates_per_epoch=4),
        batch=BatchConfig(pack_tokens=18432, recompute="selective"),
    )
