"""Recipe of a custom method: its advantage, mask, loss and term are defined in own_method/parts.py.

RLOO's advantage (arXiv 2402.14740), a mask of truncated responses with negative advantages, a capped
REINFORCE, and an entropy bonus. All other settings are those of r1_distill_qwen_7b_8k.py. Start it in the
repository's root, from which its parts are imported; docs/extending.md describes other methods.

Preset: none; the loss reads no bounds.
"""

from dataclasses import replace
from pathlib import Path

from bapo_megatron.config import BoundsConfig, PartConfig, RunConfig, load_recipe

PARTS = "recipes.methods_7b_8k.own_method.parts"


def recipe() -> RunConfig:
    """A method in one file."""
    run = load_recipe(Path(__file__).parents[1] / "r1_distill_qwen_7b_8k.py", RunConfig)
    algorithm = replace(
        run.algorithm,
        bounds=BoundsConfig(),
        advantage=f"{PARTS}:rloo",
        masks=(PartConfig(f"{PARTS}:cut"),),
        loss=f"{PARTS}:Capped",
        loss_settings={"cap": 2.0},
        terms=(PartConfig(f"{PARTS}:entropy", {"coefficient": 0.001}),),
    )
    return replace(run, name=Path(__file__).stem, algorithm=algorithm)
