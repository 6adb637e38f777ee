"""Recipe R1-Distill-Qwen-7B, 8k responses, BAPO: the paper's analysis runs, on one node of eight 80 GB GPUs.

From the paper (arXiv 2510.18927, section 5.1, implementation details): DeepSeek-R1-Distill-Qwen-7B,
Skywork-OR1-RL-Data, responses of up to 8k tokens, learning rate 2e-6, temperature 0.6, GRPO advantages,
staleness by sample reuse (ppo_epoch), target 0.4, c_low in [0.6, 0.9] by 0.02, c_high in [1.2, 3.0] by
0.05 (the preset). Its preliminary and validation experiments (Figs. 2 and 4 to 7) are such runs.

Staleness is passes x batch / mini-batch, the updates per batch. Fig. 2's legend has 0, 2x, 4x and 8x, Fig. 11
has 2 and 4: `--algorithm.reuse-epochs` with 1 (on-policy), 2, 4 or 8; each update takes the whole batch.
Fig. 11 has 32k tokens:
`--rollout.max-response-tokens 32768 --batch.pack-tokens 34816 --batch.recompute selective`, and
`--algorithm.bounds.bounds-tokens 65536`, so that a search sees equally many responses.

Chosen here, not in the paper: 64 prompts x 16 responses per step, staleness 4 by four passes over each batch
(E = 3 in Algorithm 1) rather than by mini-batches, prompts of up to 2k tokens, weight decay, steps, layout.
All GPUs train and sample in turns: while servers sample, the policy is in host memory. By the plan at least
10 % of GPU memory stays free in both turns.

Dynamic sampling drops groups with equal rewards and samples others, at most three times the prompts of a step
in all. A truncated response is scored as it is, wrong without a box, and trained on.

Preset: `paper()`, because the paper's figures show a search per micro-batch (docs/algorithm.md), and no
study here prefers another.

Variants: suffixes `_grpo`, `_clip_higher`, `_asymmetric`, `_on_policy` and `_papo` in methods_7b_8k; on four
GPUs `_four_gpus`.

    bapo plan recipes/r1_distill_qwen_7b_8k.py
    sbatch slurm/colocated.sbatch recipes/r1_distill_qwen_7b_8k.py
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
        name="r1_distill_qwen_7b_8k",
        steps=500,
        model=ModelConfig(hf_path=Path("models/DeepSeek-R1-Distill-Qwen-7B")),
        data=DataConfig(path=Path("data/skywork_math/data.jsonl")),
        parallel=ParallelConfig(tensor=4, data=2, sequence=True, offload=True),
        rollout=RolloutConfig(
            temperature=0.6,
            max_response_tokens=8192,
            engine="sglang",
            sglang=SglangConfig(servers=8, colocated=True, sync="ipc", memory_fraction=0.75),
        ),
        algorithm=AlgorithmConfig(bounds=paper(), reuse_epochs=4),
        batch=BatchConfig(pack_tokens=10240),  # longest prompt + longest response
    )
