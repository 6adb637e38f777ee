"""Recipe of the analysis run with GRPO: bounds 0.8 and 1.2, the baseline of Figs. 2, 4, 5, 9 and 11.

The paper calls its bounds "symmetric fixed, e.g. [0.8, 1.2]" (section 3). All other settings,
including the staleness levels, are those of r1_distill_qwen_7b_8k.py.

Preset: `grpo()`, because it is a baseline of BAPO.
"""

from dataclasses import replace
from pathlib import Path

from bapo_megatron.algo.bapo import grpo
from bapo_megatron.config import RunConfig, load_recipe


def recipe() -> RunConfig:
    """GRPO on stale data."""
    run = load_recipe(Path(__file__).parents[1] / "r1_distill_qwen_7b_8k.py", RunConfig)
    return replace(run, name=Path(__file__).stem, algorithm=replace(run.algorithm, bounds=grpo()))
