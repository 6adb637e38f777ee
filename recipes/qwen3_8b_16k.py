"""Recipe Qwen3-8B, 16k responses, on one node of eight 80 GB GPUs with colocated servers.

From the paper (arXiv 2510.18927): GRPO advantages, the BAPO bounds (the preset), learning rate 2e-6 and
temperature 0.6 of its 8k experiments (section 5.1).

From the model's card: it thinks by default (`enable_thinking` of its chat template), between `<think>` and
`</think>`, which the response opens itself; the card also advises temperature 0.6 for this mode. A box counts
only after `</think>` (docs/rewards.md). docs/customize.md shows how to train it without thinking.

Chosen here, not in the paper: the model, responses of 16k tokens (the context is 40,960), 64 prompts x 16
responses per step, four updates of a quarter of the batch each, which is staleness 4 as the paper counts
(passes x batch / mini-batch), weight decay, steps, layout. All GPUs train and sample in turns: while servers
sample, the policy is in host memory. By the plan at least 10 % of GPU memory stays free in both turns.

Dynamic sampling drops groups with equal rewards and samples others, at most three times the prompts of a step
in all. A truncated response is scored as it is, wrong without a box, and trained on.

Preset: `paper(32_768)`, because the paper's figures show a search per micro-batch (docs/algorithm.md), and no
study here prefers another. A search sees 32,768 tokens: as many responses as the authors' 16,384 at 8k.

    bapo plan recipes/qwen3_8b_16k.py
    sbatch slurm/colocated.sbatch recipes/qwen3_8b_16k.py
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
    """One node: TP 4, DP 2, and a server on each GPU."""
    return RunConfig(
        name="qwen3_8b_16k",
        steps=500,
        model=ModelConfig(hf_path=Path("models/Qwen3-8B")),
        data=DataConfig(path=Path("data/skywork_math/data.jsonl")),
        parallel=ParallelConfig(tensor=4, data=2, sequence=True, offload=True),
        rollout=RolloutConfig(
            temperature=0.6,
            max_response_tokens=16384,
            engine="sglang",
            segment_tokens=8192,
            sglang=SglangConfig(servers=8, colocated=True, sync="ipc", memory_fraction=0.75),
        ),
        algorithm=AlgorithmConfig(bounds=paper(32_768), updates_per_epoch=4),
        batch=BatchConfig(pack_tokens=18432),  # longest prompt + longest response
    )
