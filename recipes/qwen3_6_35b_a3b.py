"""Recipe Qwen3.6-35B-A3B, a hybrid with experts, 16k responses, on four nodes of eight 80 GB GPUs: two train.

From the paper (arXiv 2510.18927): GRPO advantages, the BAPO bounds (the preset), learning rate 2e-6 and
temperature 0.6 of its 8k experiments (section 5.1).

From the model's config.json: 34.7 B parameters of the text model, 3.5 B of them active per token: 8 of 256
experts and a shared one in each of 40 layers. Every fourth layer has attention, the others Gated DeltaNet,
whose sequence state has a constant size. Vision and multi-token prediction are not trained; exports have
their original weights.

Chosen here, not in the paper: the model, responses of 16k tokens, 64 prompts x 16 responses per step, four
updates of a quarter of the batch each, weight decay, steps, layout. TP 2 is the maximum with 2 KV heads; EP 8
keeps expert traffic on a node's NVLink. Recomputation is full: "selective" recomputes only experts and keeps
what Gated DeltaNet saves, by the plan 33 GB per GPU. Every token is trained on the experts that sampled it
(`rollout.route_replay`): a batch trains after the weights have changed, and without replay engine and trainer
would route differently (docs/parallelism.md#routes). External servers need
`--enable-return-routed-experts --moe-runner-backend triton`.

Dynamic sampling drops groups with equal rewards and samples others, at most three times the prompts of a step
in all. A truncated response is scored as it is, wrong without a box, and trained on.

Preset: `paper(32_768)`, because the paper's figures show a search per micro-batch (docs/algorithm.md), and no
study here prefers another. A search sees 32,768 tokens: as many responses as the authors' 16,384 at 8k.

    bapo plan recipes/qwen3_6_35b_a3b.py
    bapo submit recipes/qwen3_6_35b_a3b.py --cluster FILE        # rollout_nodes = 2
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
    """Two training nodes: TP 2, eight replicas, the experts over the eight GPUs of each node."""
    return RunConfig(
        name="qwen3_6_35b_a3b",
        steps=500,
        model=ModelConfig(hf_path=Path("models/Qwen3.6-35B-A3B")),
        data=DataConfig(path=Path("data/skywork_math/data.jsonl")),
        parallel=ParallelConfig(tensor=2, data=8, sequence=True, expert=8),
        rollout=RolloutConfig(
            temperature=0.6,
            max_response_tokens=16384,
            engine="sglang",
            segment_tokens=4096,
            route_replay="replay",
            sglang=SglangConfig(tensor=2, max_in_flight=128, flags=("--max-mamba-cache-size=640",)),
        ),
        algorithm=AlgorithmConfig(bounds=paper(32_768), updates_per_epoch=4),
        batch=BatchConfig(pack_tokens=18432, recompute="full"),
    )
