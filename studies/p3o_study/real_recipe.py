"""Base recipe of the study of P3O on a real model: that of the study of stale data on SmolLM2-135M-Instruct.

One-digit problems of reasoning-gym behind a prompt that asks for reasoning; `python -m studies.p3o_study`
prepares them.
"""

from dataclasses import replace
from pathlib import Path

from bapo_megatron.algo.bounds import BoundsConfig
from bapo_megatron.config import LoggingConfig, RunConfig, load_recipe

RECIPES = Path(__file__).parents[2] / "recipes"
DATA = Path("data/one_digit_reasoned")


def recipe() -> RunConfig:
    """The run that every arm varies; the seed's defaults are those of the study's runs."""
    run = load_recipe(RECIPES / "demo_real.py", RunConfig)
    return replace(
        run,
        name="p3o_study_real",
        steps=10,
        data=replace(run.data, path=DATA / "train/data.jsonl", max_prompt_tokens=64),
        rollout=replace(run.rollout, max_response_tokens=96),
        algorithm=replace(run.algorithm, bounds=BoundsConfig()),
        optimizer=replace(run.optimizer, lr=1.5e-5, warmup_updates=0, decay="constant"),
        evaluation=replace(run.evaluation, suites=(str(DATA / "held_out/data.jsonl"),), last=False),
        reward=replace(run.reward, on_failure="value"),
        batch=replace(run.batch, hold_forwards=False),
        checkpoint=replace(run.checkpoint, keep_last=1),
        logging=LoggingConfig(tensorboard=False),
    )
