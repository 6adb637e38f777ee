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
            f"--expert-routes {file}: it cannot be read: {error}; name a file RUN/journal/step_*.routes.npy"
        ) from None
    known = routes_TLK[(routes_TLK[:, 0] < experts.count).any(-1)] if routes_TLK.ndim == 3 else routes_TLK
    if known.shape[1:] != (shape.layers, experts.per_token) or not len(known) or known.max() >= experts.count:
        raise ConfigError(
            f"--expert-routes {file}: an array {list(routes_TLK.shape)} of routes, but the model has "
            f"{shape.layers} layers and {experts.per_token} of {experts.count} experts of a token; name the "
            "routes of a run of this model"
        )
    each = experts.count // ranks
    layers = (known[:, layer].ravel() // each for layer in range(shape.layers))
    busiest = [np.bincount(rank_of_copy, minlength=ranks).max() for rank_of_copy in layers]
    return float(np.mean(busiest) * ranks / (len(known) * experts.per_token))
