"""Recipe of the analysis run with BAPO and PAPO, polarity-aware advantages (arXiv 2605.11775).

It is not in BAPO's paper. PAPO's abstract states no values; strength, band, memory and target are the
defaults in docs/losses.md. All other settings are those of r1_distill_qwen_7b_8k.py.

Preset: `paper()`, as in r1_distill_qwen_7b_8k.py.
"""

from dataclasses import replace
from pathlib import Path

from bapo_megatron.algo.papo_schedule import PapoConfig
from bapo_megatron.config import RunConfig, load_recipe


def recipe() -> RunConfig:
    """BAPO and PAPO together."""
    run = load_recipe(Path(__file__).parents[1] / "r1_distill_qwen_7b_8k.py", RunConfig)
    return replace(
        run, name=Path(__file__).stem, algorithm=replace(run.algorithm, polarity=PapoConfig(enabled=True))
    )
