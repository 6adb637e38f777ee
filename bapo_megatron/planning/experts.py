"""Expert load of ``bapo plan``: copies of tokens that a rank's experts process, and the busiest rank's share.

A token's router makes K copies of it, one for each of its experts, which EP sends to the experts' ranks. How
many copies a rank gets depends on the routers. The flag ``--expert-imbalance`` says how many the busiest rank
gets, as a multiple of the mean, or ``--expert-routes`` measures it; all estimates and rehearsals are of that
rank. Everything that depends on it (activations, messages, time) takes its numbers from here. Used in this
folder.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from bapo_megatron.config import ParallelConfig
from bapo_megatron.errors import ConfigError
from bapo_megatron.hf.config import ModelShape

_BAND = 1 << 16
"""Tokens of a file of routes that are in memory at a time."""


@dataclass(frozen=True)
class ExpertLoad:
    """Load of one layer's experts, for each token of a pack on a CP rank. Made by ``expert_load``."""

    routed: float
    """Tokens that a rank routes: 1 / TP, since sequence parallelism splits them."""
    copies: float
    """Copies of those: experts of a token x ``routed``."""
    rows: float
    """Copies that the busiest rank's experts process: x ETP, whose ranks have parts of the same experts, and
    x the imbalance."""
    local: int
    """Experts of a layer on one rank."""


def expert_load(shape: ModelShape, parallel: ParallelConfig, imbalance: float) -> ExpertLoad | None:
    """The load of a layer's experts; None for a model without experts."""
    if shape.experts is None:
        return None
    routed = 1 / (parallel.tensor if parallel.sequence else 1)
    copies = shape.experts.per_token * routed
    rows = copies * parallel.expert_tensor * rank_imbalance(parallel, imbalance)
    return ExpertLoad(routed, copies, rows, shape.experts.count // parallel.expert)


def rank_imbalance(parallel: ParallelConfig, imbalance: float) -> float:
    """Copies of the busiest rank of EP over the mean: 1 for EP 1, at most EP, which is all of them."""
    return min(imbalance, parallel.expert)


@lru_cache(maxsize=64)
def measured_imbalance(file: Path, shape: ModelShape, ranks: int) -> float:
    """Copies of the busiest of ``ranks`` ranks of EP over the mean, in the mean over the layers.

    ``file``: the routes of a step, [tokens, layers, experts of a token] (``data/routes.py``). ConfigError if
    it cannot be read, or is of another model.
    """
    assert shape.experts is not None
    experts = shape.experts
    try:
        routes_TLK = np.load(file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--expert-routes {file}: it cannot be read: {error}; name the .routes.npy of a step, which lies "
            "in a run's folder of the journal"
        ) from None
    copies_LE = _copies_by_expert(routes_TLK, experts.count)
    if routes_TLK.shape[1:] != (shape.layers, experts.per_token) or copies_LE is None:
        raise ConfigError(
            f"--expert-routes {file}: an array {list(routes_TLK.shape)} of routes, but the model has "
            f"{shape.layers} layers and {experts.per_token} of {experts.count} experts of a token; name the "
            "routes of a run of this model"
        )
    by_rank = copies_LE.reshape(shape.layers, ranks, -1).sum(-1)
    return float(np.mean(by_rank.max(1) / by_rank.mean(1)))


def _copies_by_expert(routes_TLK: np.ndarray, experts: int) -> np.ndarray | None:
    """Copies of tokens of each layer's experts [layers, experts], read in bands; None if there are none, or
    some name an expert that does not exist. Tokens without a route do not count."""
    if routes_TLK.ndim != 3:
        return None
    counts = np.zeros((routes_TLK.shape[1], experts), np.int64)
    for begin in range(0, len(routes_TLK), _BAND):
        part = np.asarray(routes_TLK[begin : begin + _BAND])
        known = part[(part[:, 0] < experts).any(-1)]
        if known.size and known.max() >= experts:
            return None
        for layer in range(len(counts)):
            counts[layer] += np.bincount(known[:, layer].ravel(), minlength=experts)
    return counts if counts.any() else None
