"""Base recipe of the P3O study: the second study's, with its task from the commit that ran it.

`python -m studies.p3o_study` extracts the task (policy, problems) into the folder STUDY_TASK.
"""

import os
from dataclasses import replace
from pathlib import Path

from bapo_megatron.algo.bounds import BoundsConfig
from bapo_megatron.config import LoggingConfig, RunConfig, load_recipe

RECIPES = Path(__file__).parents[2] / "recipes"


def recipe() -> RunConfig:
    """The run that every arm varies, with the second study's settings."""
    task = Path(os.environ["STUDY_TASK"])
    run = load_recipe(RECIPES / "demo_cpu.py", RunConfig)
    return replace(
        run,
        name="p3o_study",
        steps=20,
        model=replace(run.model, hf_path=task / "policy_study_long"),
        data=replace(run.data, path=task / "train_study.jsonl"),
        rollout=replace(run.rollout, prompts_per_step=8, group_size=8, max_response_tokens=128),
        algorithm=replace(run.algorithm, bounds=BoundsConfig(), route_mismatch_limit=0.1),
        optimizer=replace(run.optimizer, lr=1.7e-4),
        evaluation=replace(run.evaluation, suites=(str(task / "eval_study.jsonl"),), last=False),
        reward=replace(run.reward, on_failure="value"),
        checkpoint=replace(run.checkpoint, keep_last=1),
        logging=LoggingConfig(tensorboard=False),
    )
