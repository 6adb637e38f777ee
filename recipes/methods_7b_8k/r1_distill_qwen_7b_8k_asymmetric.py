"""Recipe of the analysis run with asymmetric bounds: the validation experiment of Fig. 7 (section 4.1).

The legend of the figure has three pairs of bounds: [0.8, 1.5], which keeps the entropy up and helps and is
this recipe; [0.8, 1.2], r1_distill_qwen_7b_8k_grpo.py; and [0.5, 1.2], with which the entropy collapses:
`--algorithm.bounds.low-start 0.5 --algorithm.bounds.low-end 0.5 --algorithm.bounds.high-start 1.2
--algorithm.bounds.high-end 1.2`. Everything else is that of r1_distill_qwen_7b_8k.py.

Preset: `fixed(0.8, 1.5)`, because the experiment is of fixed bounds: nothing is searched.
"""

from dataclasses import replace
from pathlib import Path

from bapo_megatron.algo.bapo import fixed
from bapo_megatron.config import RunConfig, load_recipe


def recipe() -> RunConfig:
    """A wide upper bound."""
    run = load_recipe(Path(__file__).parents[1] / "r1_distill_qwen_7b_8k.py", RunConfig)
    return replace(run, name=Path(__file__).stem, algorithm=replace(run.algorithm, bounds=fixed(0.8, 1.5)))
