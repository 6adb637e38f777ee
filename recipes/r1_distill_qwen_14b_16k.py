"""Recipe R1-Distill-Qwen-14B, 16k responses, on one node of eight 80 GB GPUs with colocated servers.

From the paper (arXiv 2510.18927): GRPO advantages, the BAPO bounds (the preset), learning rate 2e-6 and
temperature 0.6 of its 8k experiments (section 5.1).

Chosen here, not in the paper: the model, DeepSeek-R1-Distill-Qwen-14B (the paper has the 7B and the 32B of
this family), responses of 16k tokens, 64 prompts x 16 responses per step, four updates of a quarter of the
batch each, which is staleness 4 as the paper counts (passes x batch / mini-batch), weight decay, steps,
layout. All GPUs train and sample in turns: while servers sample, the policy is in host memory. By the plan at
least 10 % of GPU memory stays free in both turns.

Dynamic sampling drops groups with equal rewards and samples others, at most three times the prompts of a step
in all. A truncated response is scored as it is, wrong without a box, and trained on.

Preset: `paper(32_768)`, because the paper's figures show a search per micro-batch (docs/algorithm.md), and no
study here prefers another. A search sees 32,768 tokens: as many responses as the authors' 16,384 at 8k.

    bapo plan recipes/r1_distill_qwen_14b_16k.py
    sbatch slurm/colocated.sbatch recipes/r1_distill_qwen_14b_16k.py
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
    """One node: TP 8, and four servers of two GPUs, which leave more room for sequences than eight of one."""
    return RunConfig(
        name="r1_distill_qwen_14b_16k",
        steps=500,
        model=ModelConfig(hf_path=Path("models/DeepSeek-R1-Distill-Qwen-14B")),
        data=DataConfig(path=Path("data/skywork_math/data.jsonl")),
        parallel=ParallelConfig(tensor=8, data=1, sequence=True, offload=True),
        rollout=RolloutConfig(
            temperature=0.6,
            max_response_tokens=16384,
            engine="sglang",
            segment_tokens=8192,
            sglang=SglangConfig(servers=4, tensor=2, colocated=True, sync="ipc", memory_fraction=0.75),
        ),
        algorithm=AlgorithmConfig(bounds=paper(32_768), updates_per_epoch=4),
        batch=BatchConfig(pack_tokens=18432),  # longest prompt + longest response
    )
