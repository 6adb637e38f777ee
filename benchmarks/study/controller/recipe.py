"""Base recipe of `bapo study controller`: a task at which positive tokens hold less than BAPO's target.

Problems and reward are those of recipes/demo_study.py. The policy fails at greater length: it slips in a
column, doubts it, begins again, and gives up at the fifth to eighth attempt. So positive tokens hold 0.3 of
the gradient at first, and bounds move. Tokens whose entropy no learning takes away end the columns, as there.
Preset: none; every arm sets its own.

A batch is 8 prompts of 8 responses. Groups of equal rewards are dropped, in every arm. The warm-up is one of
steps: each arm multiplies it by its updates a step.

Task and steps were chosen on GRPO's gates with the seeds 300 to 303, which nothing else uses, the learning
rate on the calibration's seeds. The demo's own task fails at them: its entropy falls to 0.27 of its start by
learning alone, and too few tokens are clipped. docs/results.md has the commands that made the policy.
"""

from dataclasses import replace
from pathlib import Path

from bapo_megatron.algo.bounds import BoundsConfig
from bapo_megatron.config import RunConfig, load_recipe

RECIPES = Path(__file__).parents[3] / "recipes"


def recipe() -> RunConfig:
    """The run that every arm varies."""
    run = load_recipe(RECIPES / "demo_study.py", RunConfig)
    return replace(
        run,
        name="demo_controller",
        steps=20,
        model=replace(run.model, hf_path=RECIPES / "demo/policy_study_long"),
        rollout=replace(run.rollout, prompts_per_step=8, max_response_tokens=128),
        # A study goes on with the settings that it began with, and 0.1 is the default no longer.
        algorithm=replace(run.algorithm, bounds=BoundsConfig(), route_mismatch_limit=0.1),
        optimizer=replace(run.optimizer, lr=1.7e-4, warmup_updates=0),
    )
