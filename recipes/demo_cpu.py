"""Recipe of the CPU demo: a small policy learns sums, off-policy, with BAPO's preset `paper`, in minutes.

The policy has 0.23 M parameters and a byte vocabulary. A supervised warm start (demo/warm_start.py) taught it
two habits: column addition, which is short and mostly right; and repeated failed attempts, which are long and
always wrong. So wrong responses are the long ones, as on hard problems (Fig. 6 of the paper), positive tokens
have less than BAPO's target of 0.4 of the gradient, and the bounds move until the long habit is unlearnt.
Each batch has eight updates (two passes of four), so tokens are up to seven updates stale.

Preset: `paper()`, the default, which follows the paper's figures (docs/algorithm.md). An update here has
fewer tokens than a search may see, so it makes one search.

The task was built for these properties. It does not show that BAPO beats GRPO: docs/results.md.
"""

from pathlib import Path

from bapo_megatron.algo.bapo import paper
from bapo_megatron.config import (
    AlgorithmConfig,
    BatchConfig,
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    RolloutConfig,
    RunConfig,
)

HERE = Path(__file__).parent / "demo"

NOTE = (
    "A demonstration on a made-up task: the policy was taught a short way that is mostly right and a long "
    "one that is always wrong, so that negative tokens hold most of the gradient, as in the paper's Figs. 4 "
    "and 6. It shows that the program learns, and when bounds move. It does not show that BAPO beats GRPO "
    "or fixed bounds, and nothing of large models or of real problems."
)


def recipe() -> RunConfig:
    """The run behind `make demo`."""
    return RunConfig(
        name="demo_cpu",
        steps=30,
        model=ModelConfig(hf_path=HERE / "policy_rambles", dtype="float32"),
        data=DataConfig(path=HERE / "train.jsonl", max_prompt_tokens=48),
        rollout=RolloutConfig(prompts_per_step=16, group_size=16, temperature=1.0, max_response_tokens=80),
        algorithm=AlgorithmConfig(bounds=paper(), advantage="grpo", reuse_epochs=2, updates_per_epoch=4),
        optimizer=OptimizerConfig(lr=4e-5, warmup_updates=32, weight_decay=0.0, beta2=0.99),
        batch=BatchConfig(pack_tokens=4096),
        evaluation=EvaluationConfig(every=10, suites=(str(HERE / "eval.jsonl"),), samples=1),
        checkpoint=CheckpointConfig(every=10, keep_last=2),
        logging=LoggingConfig(note=NOTE),
    )
