"""Recipe of the analysis run with asymmetric bounds: the validation experiment of Fig. 7 (section 4.1).

The figure's legend has three pairs of bounds: [0.8, 1.5], this recipe, which keeps entropy and helps;
[0.8, 1.2], r1_distill_qwen_7b_8k_grpo.py; and [0.5, 1.2], with which entropy collapses:
`--algorithm.bounds.low-start 0.5 --algorithm.bounds.low-end 0.5 --algorithm.bounds.high-start 1.2
--algorithm.bounds.high-end 1.2`. All other settings are those of r1_distill_qwen_7b_8k.py.

Preset: `fixed(0.8, 1.5)`, because the experiment has fixed bounds, without a search.
"""

from dataclasses import replace
from pathlib import Path

from bapo_megatron.algo.bapo import fixed
from bapo_megatron.config import RunConfig, load_recipe


def recipe() -> RunConfig:
    """A wide upper bound."""
    run = load_recipe(Path(__file__).parents[1] / "r1_distill_qwen_7b_8k.py", RunConfig)
    return replace(run, name=Path(__file__).stem, algorithm=replace(run.algorithm, bounds=fixed(0.8, 1.5)))
