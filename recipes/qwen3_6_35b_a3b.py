"""Recipe Qwen3.6-35B-A3B, a hybrid with experts, 16k responses, on four nodes of eight 80 GB GPUs: two train.

From the paper (arXiv 2510.18927): GRPO advantages, the BAPO bounds (the preset), learning rate 2e-6 and
temperature 0.6 of its 8k experiments (section 5.1).

From the model's config.json: 34.7 B parameters of the text model, of which a token passes 3.5 B: in each of
40 layers 8 of 256 experts, and a shared one. Every fourth layer has attention, the others Gated DeltaNet,
whose state of a sequence has the same size at any length. Vision and multi-token prediction are not trained;
exports have them as they were.

Chosen here, not in the paper: the model, responses of 16k tokens, 64 prompts x 16 responses a step, four
updates of a quarter of the batch each, weight decay, steps, layout. TP 2 is the most, for there are 2 KV
heads; EP 8 keeps the messages of experts on a node's NVLink. All is recomputed: "selective" recomputes
experts alone, and keeps what Gated DeltaNet saves, by the plan 33 GB of a GPU. Every token is trained on the
experts that sampled it (`rollout.route_replay`): a batch is used after the weights have changed, and without
routes engine and trainer would choose differently (docs/parallelism.md#routes). Servers of your own need
`--enable-return-routed-experts --moe-runner-backend triton`.

Groups of equal rewards are dropped and others sampled (dynamic sampling), at most three times the prompts of
a step in all. A response cut at its limit is scored as it stands, wrong without a box, and trained on.

Preset: `paper(32_768)`, because the paper's figures show a search in each micro-batch (docs/algorithm.md),
and no study here prefers another. A search sees 32,768 tokens, as many responses as the 16,384 of the
authors' script with 8k.

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
    """Two nodes that train: TP 2, eight replicas, the experts over the eight GPUs of each node."""
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
