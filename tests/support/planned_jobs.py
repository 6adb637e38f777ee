"""Jobs of `bapo plan`: a model of four small layers, the recipe of 32B, and other recipes with changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from bapo_megatron.config import (
    BatchConfig,
    DataConfig,
    ModelConfig,
    ParallelConfig,
    RolloutConfig,
    RunConfig,
    SglangConfig,
)
from bapo_megatron.config.recipe import load_recipe
from bapo_megatron.hf.config import ModelShape, read_model_shape
from bapo_megatron.planning.job import Job, PlanOptions, find_shape
from tests.support.altered import altered
from tests.support.shapes import uniform

RECIPES = Path(__file__).parents[2] / "recipes"
RECIPE = RECIPES / "bp_math_32b_64k.py"
SHAPES = RECIPES / "shapes"
ON_HOST = {"run.optimizer.device": "cpu"}


# One layer: 8 x (8 + 4 + 4) qkv + 16 bias + 8 x 8 projection + 3 x 8 x 16 MLP + 2 x 8 norms = 608.
SMALL = uniform(
    family="qwen2",
    layers=4,
    hidden=8,
    heads=4,
    kv_heads=2,
    head_dim=2,
    ffn=16,
    vocab=32,
    max_positions=64,
    norm_eps=1e-6,
    rope_theta=1e4,
    rope_scaling=None,
    tied=False,
    qkv_bias=True,
    qk_norm=False,
)
ONE = ParallelConfig()
BIG = read_model_shape(SHAPES / "DeepSeek-R1-Distill-Qwen-32B")


def job(parallel: ParallelConfig = ONE, shape: ModelShape = SMALL, **batch: object) -> Job:
    """Eight responses of 14 tokens, each with a prompt of 2: 128 tokens, 8 packs of 16."""
    run = RunConfig(
        "small",
        ModelConfig(Path("model")),
        DataConfig(Path("data"), max_prompt_tokens=16),
        parallel=parallel,
        rollout=RolloutConfig(
            prompts_per_step=2, group_size=4, max_response_tokens=14, sglang=SglangConfig(tensor=4)
        ),
        batch=BatchConfig(**{"pack_tokens": 16, **batch}),
    )
    return Job(run, shape, PlanOptions(mean_response_tokens=14))


def planned(*flags: str, **options: object) -> Job:
    """The 32B recipe with changes to its layout, ``name=value``, and to the options."""
    run = load_recipe(RECIPE, RunConfig)
    changes = {name: int(value) for name, value in (flag.split("=") for flag in flags)}
    run = replace(run, parallel=replace(run.parallel, **changes))
    return Job(run, BIG, PlanOptions(**options))


def of_recipe(name: str, changes: Mapping[str, object] = MappingProxyType({})) -> Job:
    """A recipe with changes to its fields."""
    path = RECIPES / f"{name}.py"
    run = altered(load_recipe(path, RunConfig), changes)
    return Job(run, find_shape(path, run.model.hf_path), PlanOptions())


def colocated(offload: bool = True, **changes: object) -> Job:
    """Eight responses on two pipeline stages of one rank; the first has a server, which keeps 1 GB."""
    one = job(ParallelConfig(pipeline=2, offload=offload))
    sglang = SglangConfig(**{"colocated": True, "memory_fraction": 0.5, "kept_gb": 1.0, **changes})  # type: ignore[arg-type]
    return altered(one, {"run.rollout.engine": "sglang", "run.rollout.sglang": sglang})
