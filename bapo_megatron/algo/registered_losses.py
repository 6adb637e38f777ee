"""Table of the registered losses, LOSSES, and checks of a loss choice that need no torch.

``loss_path`` maps ``algorithm.loss`` to a class path, which ``losses.build_loss`` imports. The other
functions take a run's ``AlgorithmConfig``: they return whether its loss searches a whole update, or raise
ConfigError if it would ignore the given ``algorithm.bounds``.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from bapo_megatron.algo.bounds import PAPER_TOKENS, BoundsConfig, fixed, paper
from bapo_megatron.algo.parts import part_path
from bapo_megatron.errors import ConfigError

BoundsUse = Literal["searched", "fixed", "unused"]
"""A loss's use of ``algorithm.bounds``: see ``losses.Loss.bounds``."""


_FOLDER = "bapo_megatron.algo.losses"
LOSSES = {
    "clip": f"{_FOLDER}.clip:ClipLoss",
    "cispo": f"{_FOLDER}.token_losses:Cispo",
    "sapo": f"{_FOLDER}.token_losses:Sapo",
    "dppo_tv": f"{_FOLDER}.token_losses:DppoTv",
    "dppo_kl": f"{_FOLDER}.token_losses:DppoKl",
    "ce_gppo": f"{_FOLDER}.token_losses:CeGppo",
    "aspo": f"{_FOLDER}.token_losses:Aspo",
    "maspo": f"{_FOLDER}.token_losses:Maspo",
    "gspo": f"{_FOLDER}.update_losses:Gspo",
    "m2po": f"{_FOLDER}.update_losses:M2po",
    "p3o": f"{_FOLDER}.update_losses:P3o",
    "vespo": f"{_FOLDER}.update_losses:Vespo",
}
"""Dotted paths of the registered losses' classes. ``clip`` alone reads ``algorithm.bounds``."""

RATIO_LOSSES = ("gspo", "m2po", "p3o", "vespo")
"""Registered losses that search a whole update for their ratio or mask (``losses.Search.is_ratio``)."""


def loss_path(name: str) -> str:
    """Dotted path of a loss, from its registered name or as given. Raises ConfigError for any other name."""
    return part_path("algorithm.loss", name, LOSSES, "class")


def check_bounds(algorithm: Any, use: BoundsUse) -> None:
    """Raise ConfigError, with the fields, if ``algorithm.bounds`` sets what the loss does not read."""
    bounds, loss = algorithm.bounds, algorithm.loss
    if use == "fixed" and (bounds.low_start, bounds.high_start) != (bounds.low_end, bounds.high_end):
        raise ConfigError(
            f"algorithm.loss={loss} reads fixed bounds and searches none, but algorithm.bounds range from "
            f"{bounds.low_start} to {bounds.low_end} and from {bounds.high_start} to {bounds.high_end}: set "
            "algorithm.bounds=fixed(low, high)"
        )
    read = fixed(bounds.low_start, bounds.high_start) if use == "fixed" else BoundsConfig()
    usual = paper(bounds.bounds_tokens or PAPER_TOKENS)  # the default, which other losses may leave unchanged
    ignored = [
        f"algorithm.bounds.{item.name}={getattr(bounds, item.name)}"
        for item in dataclasses.fields(bounds)
        if getattr(bounds, item.name) not in (getattr(read, item.name), getattr(usual, item.name))
    ]
    if use != "searched" and ignored:
        unset = "fixed(low, high)" if use == "fixed" else "BoundsConfig()"
        raise ConfigError(
            f"{', '.join(ignored)}: algorithm.loss={loss} does not read that; leave it out, in the recipe "
            f"too: algorithm.bounds={unset}"
        )


def searches_update(algorithm: Any) -> bool:
    """Whether the loss searches a whole update before its backward passes. True, the costlier case, for a
    dotted path, which may exist only on the run's machines."""
    if algorithm.loss == "clip":
        return bool(algorithm.bounds.searches_update)
    return measures_ratio(algorithm)


def measures_ratio(algorithm: Any) -> bool:
    """Whether the loss searches by the ratios themselves: with the engine's pi_old these are then measured in
    every update, even on-policy (``Search.is_ratio``). True, the costlier case, for a dotted path."""
    return ":" in algorithm.loss or algorithm.loss in RATIO_LOSSES
