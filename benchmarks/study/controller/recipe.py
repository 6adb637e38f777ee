"""Base recipe of `bapo study controller`: a task at which positive tokens hold less than BAPO's target.

The policy and the problems are those of recipes/demo_cpu.py: it works a sum out, which is short and mostly
right, or slips, doubts and rambles, which is long and always wrong. So wrong responses are the long ones, and
bounds move until the long habit is unlearnt. Preset: none; every arm sets its own.

A batch is 8 prompts of 8 responses. Groups of equal rewards are dropped, in every arm. The warm-up is one of
steps: each arm multiplies it by its updates a step.
"""

from dataclasses import replace
from pathlib import Path

from bapo_megatron.algo.bounds import BoundsConfig
from bapo_megatron.config import LoggingConfig, RunConfig, load_recipe

RECIPES = Path(__file__).parents[3] / "recipes"


def recipe() -> RunConfig:
    """The run that every arm varies."""
    run = load_recipe(RECIPES / "demo_cpu.py", RunConfig)
    return replace(
        run,
        name="demo_controller",
        steps=24,
        rollout=replace(run.rollout, prompts_per_step=8, group_size=8),
        algorithm=replace(run.algorithm, bounds=BoundsConfig(), reuse_epochs=1, updates_per_epoch=1),
        optimizer=replace(run.optimizer, lr=1.3e-4, warmup_updates=0),
        checkpoint=replace(run.checkpoint, keep_last=1),
        logging=LoggingConfig(tensorboard=False),
    )
