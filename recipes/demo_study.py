"""Base recipe of `bapo study staleness`: a task on which stale data harms and on-policy entropy stays.

Sums of two-digit numbers. The policy (0.13 M parameters, two layers) mostly slips in a column, doubts it,
begins again, and fails after two to four attempts: a wrong response has 46 tokens, a right one 30, so the
positive side holds 0.42 of the gradient on-policy. One of four neutral characters, each as good, ends a
column: these tokens keep their entropy whatever is learnt. A prompt is the sum alone, which makes updates
cheap. Preset: none; every arm sets its own. docs/results.md has the commands that made policy and problems.

GRPO's runs with the seeds 100 to 103, means (`bapo study staleness --calibrate`); the learning rate was
chosen with two of these seeds, to meet the gates:

| passes | mean reward | best | end | held-out | entropy kept | clipped | ratio > 1.2 |
|---|---|---|---|---|---|---|---|
| 1x | 0.263 | 0.387 | 0.371 | 0.336 (0.164 before) | 0.83 | 0 | 0 |
| 2x | 0.303 | 0.469 | 0.412 | 0.391 | 0.73 | 0.006 | 0.003 |
| 4x | 0.303 | 0.458 | 0.403 | 0.368 | 0.69 | 0.020 | 0.009 |
| 8x | 0.176 | 0.302 | 0.145 | 0.147 | 0.89 | 0.052 | 0.016 |

At 8x two of four runs collapse, and their entropy rises again: negative tokens take the skill apart. At a
learning rate of 1.2e-4 none of two did; at 1.6e-4 both, but entropy at 4x was 0.78 of its start (in one run).
"""

from dataclasses import replace
from pathlib import Path

from bapo_megatron.algo.bounds import BoundsConfig
from bapo_megatron.config import LoggingConfig, RunConfig, load_recipe

HERE = Path(__file__).parent


def recipe() -> RunConfig:
    """The run that every arm of the study varies."""
    run = load_recipe(HERE / "demo_cpu.py", RunConfig)
    demo = HERE / "demo"
    return replace(
        run,
        name="demo_study",
        steps=32,
        model=replace(run.model, hf_path=demo / "policy_study"),
        data=replace(run.data, path=demo / "train_study.jsonl"),
        rollout=replace(run.rollout, prompts_per_step=6, group_size=8, max_response_tokens=64),
        # Every arm sets its bounds; the target of the base is that of the runs in docs/study.jsonl.
        algorithm=replace(
            run.algorithm,
            bounds=BoundsConfig(target=0.5),
            reuse_epochs=1,
            updates_per_epoch=1,
        ),
        optimizer=replace(run.optimizer, lr=1.4e-4),
        # As the arms in docs/study.jsonl were run.
        evaluation=replace(run.evaluation, suites=(str(demo / "eval_study.jsonl"),), last=False),
        reward=replace(run.reward, on_failure="value"),
        checkpoint=replace(run.checkpoint, keep_last=1),
        logging=LoggingConfig(tensorboard=False),
    )
