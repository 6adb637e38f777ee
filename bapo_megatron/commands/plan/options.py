"""The flags of ``bapo plan`` beside the recipe's. Assumptions are flags, so that they can be doubted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro

from bapo_megatron.config import RunConfig
from bapo_megatron.errors import ConfigError


@dataclass(frozen=True)
class PlanOptions:
    """What the recipe does not say: the machines, and what is assumed of the run."""

    gpu: Literal["a100-80gb", "h100-80gb", "h200-141gb", "b200-180gb"] = "h100-80gb"
    """GPU type of the trainer and of the engines; eight make a node."""
    mfu: float = 0.4
    """Share of the GPU's bf16 peak that it reaches while it computes. Recomputation and the pipeline's
    idle time come on top."""
    memory_fraction: float = 0.9
    """Share of a GPU's and of a node's memory that a plan may use."""
    mean_response_tokens: int | None = None
    """Mean length of a response. None: a quarter of the longest."""
    engine_gpus: int | None = None
    """GPUs that sample. None: as many as train."""
    engine_memory_fraction: float = 0.85
    """Share of a GPU's memory for an engine's weights and KV cache."""
    engine_bandwidth: float = 0.6
    """Share of the memory bandwidth that decoding reaches."""
    compare: int = 0
    """List this many of the fastest layouts that fit on as many GPUs."""
    as_json: Annotated[bool, tyro.conf.arg(name="json"), tyro.conf.FlagCreatePairsOff] = False
    """Print everything as one JSON object."""

    def check(self) -> None:
        """Raise ConfigError for a value out of its range."""
        for name in ("mfu", "memory_fraction", "engine_memory_fraction", "engine_bandwidth"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"--{name.replace('_', '-')} {getattr(self, name)} must be in (0, 1]")
        for name in ("mean_response_tokens", "engine_gpus"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} {value} must be at least 1")


@dataclass(frozen=True)
class PlanCommand:
    """The recipe's flags and the plan's, under one roof and without a prefix."""

    run: Annotated[RunConfig, tyro.conf.arg(name="")]
    options: Annotated[PlanOptions, tyro.conf.arg(name="")] = field(default_factory=PlanOptions)
