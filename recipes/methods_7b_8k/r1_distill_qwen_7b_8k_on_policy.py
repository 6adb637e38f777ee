"""Recipe of the analysis run on-policy, one update for each batch: the stable reference of Fig. 2.

It has GRPO's bounds. With one update at the weights that sampled, every ratio is 1 up to the mismatch of
engine and trainer, and no bound clips. All other settings are those of r1_distill_qwen_7b_8k.py.

Preset: `grpo()`, because no bound acts on-policy: a search would change nothing.
"""

from dataclasses import replace
from pathlib import Path

from bapo_megatron.algo.bapo import grpo
from bapo_megatron.config import RunConfig, load_recipe


def recipe() -> RunConfig:
    """No staleness."""
    run = load_recipe(Path(__file__).parents[1] / "r1_distill_qwen_7b_8k.py", RunConfig)
    return replace(
        run, name=Path(__file__).stem, algorithm=replace(run.algorithm, bounds=grpo(), reuse_epochs=1)
    )
