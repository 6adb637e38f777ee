"""The analysis run with asymmetric bounds: the validation experiment of section 4.1, Fig. 7 of the paper.

The paper reports the result (a larger c_high keeps the entropy up and helps; with a smaller c_low it
collapses), but not the values. Chosen here: c_high 2.0 with GRPO's c_low. The opposite case is
`--algorithm.bounds.low-start 0.4 --algorithm.bounds.low-end 0.4 --algorithm.bounds.high-start 1.2
--algorithm.bounds.high-end 1.2`. Everything else is that of r1_distill_qwen_7b_8k.py.
"""

from dataclasses import replace
from pathlib import Path

from bapo_megatron.algo.bapo import fixed
from bapo_megatron.config import RunConfig, load_recipe


def recipe() -> RunConfig:
    """A wide upper bound."""
    run = load_recipe(Path(__file__).with_name("r1_distill_qwen_7b_8k.py"), RunConfig)
    return replace(run, name=Path(__file__).stem, algorithm=replace(run.algorithm, bounds=fixed(0.8, 2.0)))
