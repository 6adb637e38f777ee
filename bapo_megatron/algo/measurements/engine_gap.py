"""Train-inference mismatch (engine gap): ``|log pi_trainer - log pi_engine|`` of on-policy tokens, in nats.

Engine and trainer compute one function with different kernels, in different orders, perhaps at different
precisions. The difference makes on-policy data slightly off-policy. A large or growing gap may show an error:
weights that did not arrive, another temperature, a broken kernel. ``ENGINE_GAP`` measures it in every update;
the limits are checked by ``check_engine_gap`` in trainer/checks.py.

Legend: ``_T`` tokens of a pack (a micro-batch of packed sequences).

Used by ``algo/objective.py``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bapo_megatron.algo.measurements import Measurement, PackView
from bapo_megatron.algo.tokens import constant_on, live_sum
from bapo_megatron.types import Metrics

_PER_OCTAVE = 4
_EDGES = tuple(2.0 ** (number / _PER_OCTAVE) for number in range(-20 * _PER_OCTAVE, 5 * _PER_OCTAVE + 1))
"""Histogram edges in nats, from 2^-20 (about 1e-6, the rounding of float32) to 32."""

GAP_SUMS = 2 + len(_EDGES) + 1
"""Length of the vector of ``gap_sums``."""


@torch.no_grad()
def gap_sums(log_prob_T: Tensor, rollout_log_prob_T: Tensor, same_weights_T: Tensor) -> Tensor:
    """Count, sum and histogram of ``|log pi_trainer - log pi_rollout|``: float64 [GAP_SUMS].

    A maximum is not additive over packs and ranks, a histogram is: its last bin with tokens gives the maximum
    to the width of a bin. Log-probs by trainer and engine in nats; ``same_weights_T``: bool, the tokens in
    the loss that the present weights sampled.
    """
    gap_T = (log_prob_T.double() - rollout_log_prob_T.double()).abs()
    bin_T = torch.bucketize(gap_T, constant_on(gap_T.device, _EDGES))
    count_T = same_weights_T.double()
    histogram = gap_T.new_zeros(len(_EDGES) + 1).scatter_add_(0, bin_T, count_T)
    return torch.cat([count_T.sum()[None], live_sum(gap_T, same_weights_T)[None], histogram])


def gap_metrics(sums: Tensor) -> Metrics:
    """Mean and maximum engine gap in nats, from (reduced) ``gap_sums``; None without tokens.

    The maximum is the upper edge of its bin, so it is never below the true one and at most 19 % above
    (2^(1/4)). Gaps up to 2^-20 are reported as 2^-20, gaps above 32 as inf.
    """
    count, total, *histogram = sums.tolist()
    if not count:
        return {"rollout/engine_gap_mean": None, "rollout/engine_gap_max": None}
    last = max(number for number, tokens in enumerate(histogram) if tokens)
    return {"rollout/engine_gap_mean": total / count, "rollout/engine_gap_max": (*_EDGES, math.inf)[last]}


def _sums(view: PackView) -> Tensor:
    same_weights_T = view.live_T & (view.batch.version_T == view.version)
    return gap_sums(view.stats.log_prob_T, view.batch.rollout_log_prob_T, same_weights_T)


ENGINE_GAP = Measurement("engine_gap", GAP_SUMS, _sums, lambda sums, _update: gap_metrics(sums))
"""The engine gap over the tokens that the present weights sampled."""
