"""The demo: a small policy on a CPU learns to add, off-policy, under BAPO. A few minutes on two cores.

The policy has a few hundred thousand parameters and reads bytes. It was taught the form of a solution
(digit by digit with carries, the sum in a box) by a short supervised warm start and gets about a third of the
sums right. Each batch of rollouts is used for eight updates (two passes of four), so tokens are up to seven
updates stale.
"""

from pathlib import Path

from bapo_megatron.algo.bapo import balanced
from bapo_megatron.config import (
    AlgorithmConfig,
    BatchConfig,
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    RolloutConfig,
    RunConfig,
)

HERE = Path(__file__).parent / "demo"


def recipe() -> RunConfig:
    """The run behind `make demo`."""
    return RunConfig(
        name="demo_cpu",
        steps=40,
        model=ModelConfig(hf_path=HERE / "policy", dtype="float32"),
        data=DataConfig(path=HERE / "train.jsonl", max_prompt_tokens=48),
        rollout=RolloutConfig(prompts_per_step=16, group_size=16, temperature=1.0, max_response_tokens=64),
        algorithm=AlgorithmConfig(bounds=balanced(), advantage="grpo", reuse_epochs=2, updates_per_epoch=4),
        optimizer=OptimizerConfig(lr=3e-4, warmup_updates=8, weight_decay=0.01),
        batch=BatchConfig(pack_tokens=4096),
        checkpoint=CheckpointConfig(every=10, keep_last=2),
    )
