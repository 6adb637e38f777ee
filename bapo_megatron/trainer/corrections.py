"""Off-policy corrections: the trainer's pi_old, truncated importance weights, rejection of responses.

    ratio = pi / pi_old          importance weight = min(pi_old / pi_rollout, cap)

``with_old_log_probs`` returns a step's samples with pi_old and weights; ``corrected`` removes responses and
tokens from an update and returns the remaining samples, with metrics. Both are collective.

- ``old_log_probs=trainer``: one forward pass per step computes the trainer's pi_old. It differs slightly from
  pi_rollout, and strongly at stale tokens; with ``importance_cap`` the weight corrects that, per token or
  response.
- ``old_log_probs=rollout``: pi_old is pi_rollout, the engine's log-probs; there are no weights.
- ``algorithm.masks`` and ``algorithm.corrections`` remove responses and tokens before packing, identically on
  all ranks (``masks.py``, ``algo/corrections.py``); only the metrics ``masks/*`` and
  ``corrections/rejected_*`` count those. ``off_policy_delta`` may cost a forward pass. An update without
  remaining responses takes no optimizer step, with a warning.

Each rank has only its own samples' columns. One replica computes numbers that all ranks need, such as a
response's mean ratio, and ``measured_once`` shares them. Log-probs that are not finite raise
FloatingPointError on every rank.

Shapes: ``_R`` response tokens, ``_N`` trained tokens of one response or response tokens of all samples,
``_T`` positions of a pack.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from bapo_megatron.algo.corrections import (
    is_off_policy,
    truncated_importance,
    truncated_sequence_importance,
)
from bapo_megatron.algo.sequences import sequence_means, sums_by_sequence
from bapo_megatron.config import AlgorithmConfig
from bapo_megatron.data.packing import pack_samples
from bapo_megatron.data.samples import Sample, TrainingSample
from bapo_megatron.interfaces import Policy
from bapo_megatron.runtime.distributed import on_all_ranks
from bapo_megatron.tensor_types import MicroBatch, TokenStats
from bapo_megatron.trainer.masks import Remaining, masks_of, measure, shares
from bapo_megatron.types import Metrics

METRICS = ("corrections/rejected_responses", "corrections/rejected_tokens", "corrections/weight")
"""Metrics of ``corrected``."""


def with_old_log_probs(
    policy: Policy,
    groups: Sequence[Sequence[TrainingSample]],
    pack_tokens: int,
    cap: float | None,
    level: Literal["token", "sequence"] = "token",
) -> list[list[TrainingSample]]:
    """Return the samples with pi_old of the present weights and importance weights up to ``cap`` (None:
    none). ``level``: one weight per token or per response. One forward pass, in which each rank computes its
    own packs. Equal on every rank, because later updates shuffle the groups over the ranks. Collective."""
    samples = [sample for group in groups for sample in group]
    compute = partial(policy.log_probs, trained_only=True)
    old_log_probs = response_log_probs(policy, samples, pack_tokens, compute)
    changes = (partial(_with_old, old_log_probs_R=old_R, cap=cap, level=level) for old_R in old_log_probs)
    return [[sample.changed(next(changes)) for sample in group] for group in groups]


def corrected(
    policy: Policy,
    groups: Sequence[Sequence[TrainingSample]],
    algorithm: AlgorithmConfig,
    pack_tokens: int,
    on_policy: bool,
) -> tuple[list[list[TrainingSample]], Metrics]:
    """Apply masks and rejection: return the update's remaining samples, by group, and metrics.

    - ``corrections/rejected_responses``, ``.../rejected_tokens``: shares of the update's responses and
      trained tokens
    - ``corrections/weight``: mean importance weight of the remaining tokens; None without any
    - ``masks/...``: the share of each mask (``masks.shares``)

    Without corrections there are no metrics. ``on_policy`` as in ``UpdateLoss.loss``. Collective. Raises
    FloatingPointError, on every rank, if log-probs are not finite.
    """
    config, weighs = algorithm.corrections, algorithm.importance_cap is not None
    if not (config.rejects or algorithm.masks or weighs):
        return [list(group) for group in groups], {}
    before = [sample for group in groups for sample in group]
    masks = masks_of(algorithm)
    width = len(Remaining._fields) + 2 * len(masks)
    numbers = measured_once(policy, before, lambda sample: measure(sample, masks, weighs), width)
    results = [Remaining(*row[: len(Remaining._fields)]) for row in numbers]
    samples = [result.of(sample, masks) for result, sample in zip(results, before, strict=True)]
    kept = [
        bool(now.predicted_tokens or not was.predicted_tokens)
        for now, was in zip(samples, before, strict=True)
    ]
    if config.off_policy_delta is not None:
        known, delta = on_policy and algorithm.known_ratio, config.off_policy_delta
        measured = [sample for sample, keep in zip(samples, kept, strict=True) if keep]
        gaps = iter(_finite(_mean_gaps(policy, measured, pack_tokens, known)))
        kept = [
            keep and not is_off_policy(sample.advantage, next(gaps), delta)
            for sample, keep in zip(samples, kept, strict=True)
        ]
    left = iter(zip(samples, kept, strict=True))
    remaining = [[sample for sample, keep in (next(left) for _ in group) if keep] for group in groups]
    tokens = sum(sample.predicted_tokens for sample in before)
    left_tokens = sum(result.predicted for result, keep in zip(results, kept, strict=True) if keep)
    weight = sum(result.weight for result, keep in zip(results, kept, strict=True) if keep)
    values = (
        1 - sum(kept) / len(kept) if kept else None,
        1 - left_tokens / tokens if tokens else None,
        weight / left_tokens if left_tokens else None,
    )
    taken = [row[len(Remaining._fields) :] for row in numbers]
    return remaining, {**dict(zip(METRICS, values, strict=True)), **shares(algorithm, taken, tokens)}


def measured_once(
    policy: Policy,
    samples: Sequence[TrainingSample],
    measure: Callable[[TrainingSample], Sequence[float]],
    width: int,
) -> list[list[float]]:
    """Return, on every rank, the ``width`` numbers of ``measure`` for each sample. Collective. Replicas take
    turns: each sample is measured by one of them. An exception of ``measure`` is raised on all ranks."""
    layout = policy.pack_layout
    values = torch.zeros(len(samples), width, dtype=torch.float64)

    def measure_own() -> None:
        for index in range(layout.data_rank, len(samples), layout.data_size):
            values[index] = torch.tensor(measure(samples[index]), dtype=torch.float64)

    on_all_ranks(measure_own)
    # One replica has a sample's numbers, the others have zeros: the sum is exact.
    numbers: list[list[float]] = policy.sum_over_replicas(values).tolist()
    return numbers


def _mean_gaps(
    policy: Policy, samples: Sequence[TrainingSample], pack_tokens: int, known: bool
) -> list[float]:
    """Return the mean of log(pi_rollout / pi) over each sample's trained tokens, nats; 0 without tokens.
    ``known``: pi is pi_old for all of them, so no forward pass is needed."""
    if not samples:
        return []
    packs = pack_samples(samples, pack_tokens, layout=policy.pack_layout)
    sums = (policy.old_sums if known else policy.token_sums)(packs, _gap_sums)
    return [float(mean) for mean in sequence_means(sums).tolist()]


def _finite(values: Iterable[float], model: str = "the model") -> list[float]:
    """Return the values; raise FloatingPointError, on every rank, if one is infinite or NaN. Otherwise its
    response would be rejected, and broken weights of ``model`` would go unnoticed."""
    numbers = list(values)
    if not all(map(math.isfinite, numbers)):
        raise FloatingPointError(
            f"the log-probs of a response are not finite: the weights of {model} have overflowed"
        )
    return numbers


def _gap_sums(stats: TokenStats, batch: MicroBatch) -> Tensor:
    return sums_by_sequence(batch.rollout_log_prob_T - stats.log_prob_T, batch)


def response_log_probs(
    policy: Policy,
    samples: Sequence[TrainingSample],
    pack_tokens: int,
    compute: Callable[[Sequence[MicroBatch]], list[TokenStats]],
    model: str = "the model",
) -> list[np.ndarray]:
    """Return each response's log-probs by ``compute``, a pass of ``model``: float32 [R], 0 outside the loss
    mask. Each rank computes its own packs; the result is equal on all ranks. Collective. Raises
    FloatingPointError, on every rank, if one is not finite."""
    if not samples:
        return []
    packs = pack_samples(samples, pack_tokens, layout=policy.pack_layout)
    ends = np.cumsum([sample.response_tokens for sample in samples])
    found_N = torch.zeros(int(ends[-1]))
    for pack, stats in zip(packs, compute(packs), strict=True):
        for index, start, positions in pack.rows:
            if positions:  # otherwise no position predicts the response
                tokens, end = samples[index].response_tokens, start + positions
                part = slice(end - tokens, end)
                trained_R = torch.where(pack.mask_T[part] > 0, stats.log_prob_T[part], 0.0)
                found_N[ends[index] - tokens : ends[index]] = trained_R
    # One replica has a sample's log-probs, the others have zeros: the sum is exact.
    columns = np.split(policy.sum_over_replicas(found_N).numpy(), ends[:-1])
    _finite((float(column_R.sum()) for column_R in columns), model)
    return columns


def _with_old(
    sample: Sample, old_log_probs_R: np.ndarray, cap: float | None, level: Literal["token", "sequence"]
) -> Sample:
    importance_R = None
    if cap is not None and level == "token":
        importance_R = truncated_importance(old_log_probs_R, sample.log_probs_R, cap)
    elif cap is not None:
        pair = (old_log_probs_R, sample.log_probs_R)
        importance_R = truncated_sequence_importance(*pair, sample.predicted_R, cap)
    return replace(sample, old_log_probs_R=old_log_probs_R, importance_R=importance_R)
