"""Measurement of one parallel layout on a batch: per-token log-probs and entropies, totals of one update.

Both functions are collective. The update changes the policy's weights: measure the totals last. ``check.py``
calls them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from bapo_megatron.algo.bounds import Bounds
from bapo_megatron.algo.losses.clip import ClipLoss, SearchResult
from bapo_megatron.algo.objective import Objective
from bapo_megatron.algo.surrogate import contributions
from bapo_megatron.commands.verify.layout_reference import TokenOutputs, Totals
from bapo_megatron.config import RunConfig
from bapo_megatron.data.packing import Sample, pack_samples
from bapo_megatron.interfaces import Policy
from bapo_megatron.runtime.distributed import broadcast_from_main, gather, is_main
from bapo_megatron.tensor_types import MicroBatch

_BySample = dict[int, tuple[np.ndarray, np.ndarray]]


def measure_tokens(policy: Policy, config: RunConfig, samples: Sequence[Sample]) -> TokenOutputs:
    """Log-probs and entropies of ``samples`` at every predicting position, equal on all ranks. Collective."""
    packs = _packs(policy, config, samples)
    mine: _BySample = {}
    for pack, stats in zip(packs, policy.log_probs(packs), strict=True):
        for index, start, length in pack.rows:
            log_prob, entropy = (values[start : start + length].cpu().numpy().copy() for values in stats)
            mine[index] = (log_prob, entropy)
    found: _BySample = {}
    for ranks in gather(mine):  # all ranks of one replica have the same values
        found = {**ranks, **found}
    ordered = broadcast_from_main([found[index] for index in range(len(samples))] if is_main() else None)
    return TokenOutputs([log_prob for log_prob, _ in ordered], [entropy for _, entropy in ordered])


def measure_totals(
    policy: Policy, config: RunConfig, samples: Sequence[Sample], at: Bounds | None = None
) -> Totals:
    """The totals of one update by BAPO's loss on ``samples``. Equal on every rank. Collective.

    The bounds are searched on the whole update, also under ``scope: micro_batch``, where they would depend
    on the packs. Loss and gradient are taken ``at`` the bounds given (the reference's), or else at the
    bounds found, so that each quantity is judged by itself.
    """
    packs = _packs(policy, config, samples)
    bounds = replace(config.algorithm.bounds, bounds_tokens=None)
    loss = ClipLoss(replace(config.algorithm, bounds=bounds))
    sums = policy.token_sums(packs, loss.search.measure)
    chosen = loss.search.find(sums)
    used = chosen if at is None else SearchResult(at, contributions(sums, at, bounds))
    result = policy.update(packs, Objective(loss).token_fn(used, policy.version))
    tokens = sum(sample.trained_tokens for sample in samples)
    return Totals(
        sums.numpy(),
        chosen.bounds.low,
        chosen.bounds.high,
        float(result.sums[0]) / tokens,
        result.grad_norm,
    )


def _packs(policy: Policy, config: RunConfig, samples: Sequence[Sample]) -> list[MicroBatch]:
    return pack_samples(samples, config.batch.pack_tokens, config.algorithm.loss_mean, policy.pack_layout)
