"""Recipe of the analysis run with clip-higher: bounds 0.8 and 1.28, the second baseline of Fig. 11.

The paper gives 1.28 as DAPO's upper bound (section 4.3, "connection to prior work"). All other settings are
those of r1_distill_qwen_7b_8k.py.

Preset: `clip_higher()`, because it is a baseline of BAPO.
"""

from dataclasses import replace
from pathlib import Path

from bapo_megatron.algo.bapo import clip_higher
from bapo_megatron.config import RunConfig, load_recipe


def recipe() -> RunConfig:
    """Clip-higher on stale data."""
    run = load_recipe(Path(__file__).parents[1] / "r1_distill_qwen_7b_8k.py", RunConfig)
    return replace(run, name=Path(__file__).stem, algorithm=replace(run.algorithm, bounds=clip_higher()))
