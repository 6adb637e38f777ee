"""Metrics by data source, ``source/NAME/...``: share of tokens and gradient, entropy, contribution, clipping.

A measurement of ``algo/objective.py`` in runs with ``data.sources``. The contribution is the share of tokens
with positive advantage in a source's gradient mass, whatever ``bounds.measure`` and ``bounds.share`` are. A
token's mass is ``m |g| |A|``: its weight in the loss, ``LossTerms.gradient_T``, and its advantage.

Legend: ``_T`` tokens of a pack (a micro-batch), ``_S`` sources, the first row for tokens of none. Used by
``algo/objective.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bapo_megatron.algo.measurements import Measurement, PackView, UpdateSums, share
from bapo_megatron.algo.tokens import constant_on, ratio, unmasked
from bapo_megatron.types import Metrics

_VALUES = (
    *("tokens", "positive", "clipped_high", "clipped_low", "entropy"),
    *("positive_mass", "mass", "positive_unclipped", "unclipped"),
)


def by_source(names: Sequence[str]) -> Measurement:
    """The measurement ``source/NAME/...`` of each of the sources ``names``, numbered in this order.

    - ``policy/tokens``, ``policy/entropy``: number of its tokens, and their mean entropy
    - ``token_share``, ``gradient_share``: its share of the update's tokens, and of the gradient mass
    - ``bapo/contribution``: the positive tokens' share of its mass; ``bapo/contribution_unclipped``: the same
      with ``g = r``, as without bounds
    - ``bapo/clip_fraction_high``, ``bapo/clip_fraction_low``, ``bapo/positive_token_fraction``: of its tokens

    A share is None where its denominator is 0.
    """
    rows = len(names) + 1

    def sums(view: PackView) -> Tensor:
        return source_sums(view, rows).flatten()

    def metrics(sums: Tensor, update: UpdateSums) -> Metrics:
        table = sums.reshape(rows, len(_VALUES))
        total = dict(zip(_VALUES, table.sum(0).tolist(), strict=True))
        found: Metrics = {}
        for name, row in zip(names, table[1:].tolist(), strict=True):
            found |= _metrics(f"source/{name}", dict(zip(_VALUES, row, strict=True)), total)
        return found

    return Measurement("by_source", rows * len(_VALUES), sums, metrics)


@torch.no_grad()
def source_sums(view: PackView, rows: int) -> Tensor:
    """Sums over the tokens of each source: float64 [S, values], additive over packs and ranks."""
    batch, terms = view.batch, view.terms
    fields = (view.log_ratio_T, batch.advantage_T, batch.weight_T, view.stats.entropy_T, terms.gradient_T)
    log_ratio_T, advantage_T, weight_T, entropy_T, gradient_T = unmasked(batch.mask_T, *fields)
    live_T, size_T = view.live_T, weight_T * advantage_T.abs()
    positive_T, negative_T = live_T & (advantage_T > 0), live_T & (advantage_T < 0)
    mass_T, unclipped_T = size_T * gradient_T.abs(), size_T * ratio(log_ratio_T)
    columns = (
        *(live_T, positive_T, positive_T & terms.clipped_T, negative_T & terms.clipped_T, entropy_T),
        *(mass_T * positive_T, mass_T, unclipped_T * positive_T, unclipped_T),
    )
    values_TV = torch.stack([column_T.double() for column_T in columns], dim=1)
    of_sequences = (-1,) * batch.sequences if not batch.sources else batch.sources
    table = constant_on(live_T.device, (0, *(1 + source for source in of_sequences)), torch.int64)
    return values_TV.new_zeros(rows, len(columns)).index_add_(0, table[batch.sequence_T + 1], values_TV)


def _metrics(prefix: str, own: dict[str, float], total: dict[str, float]) -> Metrics:
    return {
        f"{prefix}/policy/tokens": own["tokens"],
        f"{prefix}/policy/entropy": share(own["entropy"], own["tokens"]),
        f"{prefix}/token_share": share(own["tokens"], total["tokens"]),
        f"{prefix}/gradient_share": share(own["mass"], total["mass"]),
        f"{prefix}/bapo/contribution": share(own["positive_mass"], own["mass"]),
        f"{prefix}/bapo/contribution_unclipped": share(own["positive_unclipped"], own["unclipped"]),
        f"{prefix}/bapo/clip_fraction_high": share(own["clipped_high"], own["tokens"]),
        f"{prefix}/bapo/clip_fraction_low": share(own["clipped_low"], own["tokens"]),
        f"{prefix}/bapo/positive_token_fraction": share(own["positive"], own["tokens"]),
    }
