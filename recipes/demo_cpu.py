"""The demo: a small policy learns sums on a CPU, off-policy, under BAPO, in a few minutes.

The policy has 0.23 M parameters and reads bytes. A supervised warm start (demo/warm_start.py) taught it two
habits: to guess a sum, which is seldom right, and to work it out digit by digit, which is mostly right. Each
batch of rollouts is used for eight updates (two passes of four), so tokens are up to seven updates stale.
"""

from dataclasses import replace
from pathlib import Path

from bapo_megatron.algo.bapo import balanced
from bapo_megatron.config import (
    AlgorithmConfig,
    BatchConfig,
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
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
        # Half of the gradient from positive tokens: here the paper's 0.4 is met without moving a bound.
        algorithm=AlgorithmConfig(
            bounds=replace(balanced(), target=0.5), advantage="grpo", reuse_epochs=2, updates_per_epoch=4
        ),
        optimizer=OptimizerConfig(lr=2e-5, warmup_updates=32, weight_decay=0.0, beta2=0.99),
        batch=BatchConfig(pack_tokens=4096),
        evaluation=EvaluationConfig(every=10, suites=(str(HERE / "eval.jsonl"),), samples=1),
        checkpoint=CheckpointConfig(every=10, keep_last=2),
    )
