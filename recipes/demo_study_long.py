"""The second task of `bapo study staleness`: wrong responses are long, so most tokens are negative.

`demo_study` with another warm start, `demo/policy_long` (docs/study_plan.md has the commands that made it).
Its policy works a sum out as the demo's does, but mostly slips, doubts, begins again, and fails at length: a
wrong response has 85 tokens, a right one 37, and four in ten of the wrong ones are cut at 96. Normalised
advantages weigh both sides of a group alike, response by response; so by tokens the positive side holds 0.3
of the gradient on-policy, as in Figures 4 and 6 of the paper, below the target of 0.4.
"""

from dataclasses import replace
from pathlib import Path

from bapo_megatron.config import RunConfig, load_recipe

HERE = Path(__file__).parent


def recipe() -> RunConfig:
    """The run that every arm of the study varies."""
    run = load_recipe(HERE / "demo_study.py", RunConfig)
    return replace(
        run,
        name="demo_study_long",
        model=replace(run.model, hf_path=HERE / "demo/policy_long"),
        rollout=replace(run.rollout, max_response_tokens=96),
    )
