"""The task of `bapo study staleness`: the demo's sums, at a learning rate where stale data can do harm.

The policy, its warm start and its problems are the demo's. What differs: small batches of 8 groups of 8, and
a constant learning rate of 1e-4. At the demo's own 2e-5 every run of 40 steps ends well, so methods would not
differ. At 1e-4, in single runs of 30 steps under GRPO's bounds, the on-policy run rose from a reward of
0.26 to 0.76 (held-out 0.85); with 16 updates on each batch it reached 0.72 within 8 steps, then fell to 0.42
(held-out 0.57). Both entropies fell from 0.15 to 0.04 nats. So the reward can fall, and need not
(docs/study_plan.md).
"""

from dataclasses import replace
from pathlib import Path

from bapo_megatron.config import RunConfig, load_recipe


def recipe() -> RunConfig:
    """The run that every arm of the study varies."""
    run = load_recipe(Path(__file__).with_name("demo_cpu.py"), RunConfig)
    return replace(
        run,
        name="demo_study",
        steps=30,
        rollout=replace(run.rollout, prompts_per_step=8, group_size=8),
        algorithm=replace(run.algorithm, reuse_epochs=1, updates_per_epoch=1),
        optimizer=replace(run.optimizer, lr=1e-4, warmup_updates=8),
        checkpoint=replace(run.checkpoint, keep_last=1),
        logging=replace(run.logging, tensorboard=False),
    )
