"""Staleness (off-policy lag) metrics of an update: the age of its tokens in updates, by its three causes.

    staleness = v - version = (v - v0) + (v0 - n) + (n - version)
                               reuse      queue      segment

``version`` sampled the token, ``v`` trains on it, ``v0`` is the version at the start of the step, and ``n``
the newest version in the token's group.

Reuse: updates that this step has already made on its batch. Queue: updates while the finished group waited
for the step. Segment: updates while the group was unfinished (partial rollouts: a response is sampled in
segments, under several versions).

``train.py`` calls ``age_metrics`` before an update, on the host; ``STALENESS`` measures the same tokens in
its packs, by buckets of age.

Legend: ``_T`` tokens of a pack (a micro-batch), ``_R`` tokens of a response, ``_B`` buckets. Used by
``diagnostics.py``, ``algo/objective.py`` and ``train.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bapo_megatron.algo.bins import BUCKETS
from bapo_megatron.algo.measurements import Measurement, PackView
from bapo_megatron.algo.tokens import constant_on
from bapo_megatron.types import Metrics, VersionSpan

_STARTS = (1, 2, 4, 8, 16)
_VALUES = ("tokens", "clipped", "ratio_gap", "entropy")

BUCKET_SUMS = len(BUCKETS) * len(_VALUES)
"""Length of the vector of ``bucket_sums``."""

AGE_METRICS = tuple(
    f"staleness/{name}" for name in ("mean", "max", "reuse_mean", "queue_mean", "segment_mean")
)
"""Names of the metrics of ``age_metrics``."""


def age_metrics(groups: Sequence[Sequence[VersionSpan]], version: int, step_version: int) -> Metrics:
    """Staleness of an update's tokens: mean, maximum, and the means of its three parts, in updates.

    Args:
        groups: for each group, for each response the span of the versions that sampled its tokens.
        version: version of the policy in training.
        step_version: version of the policy at the beginning of the step.

    Returns:
        ``AGE_METRICS``, in updates, each a mean or maximum over tokens; None where there are no tokens.
    """
    tokens = behind = spread = oldest = 0
    for group in groups:
        spans = [span for span in group if span.tokens]
        if spans:
            newest, count = max(span.newest for span in spans), sum(span.tokens for span in spans)
            tokens += count
            behind += count * (step_version - newest)
            spread += count * newest - sum(span.total for span in spans)
            oldest = max(oldest, version - min(span.oldest for span in spans))
    if not tokens:
        return dict.fromkeys(AGE_METRICS)
    reuse, queue, segment = float(version - step_version), behind / tokens, spread / tokens
    means = (reuse + queue + segment, float(oldest), reuse, queue, segment)
    return dict(zip(AGE_METRICS, means, strict=True))


def bucket_of(staleness_T: Tensor) -> Tensor:
    """Index into ``BUCKETS`` (int64) of each token, from its staleness in updates; below 0 counts as 0."""
    return torch.bucketize(staleness_T, constant_on(staleness_T.device, _STARTS, torch.int64), right=True)


@torch.no_grad()
def bucket_sums(
    staleness_T: Tensor, live_T: Tensor, clipped_T: Tensor, log_ratio_T: Tensor, entropy_T: Tensor
) -> Tensor:
    """Sums over the tokens of each staleness bucket: tokens, clipped tokens, |log ratio|, entropy.

    float64 [B * 4], additive over packs and ranks, from the staleness in updates (below 0, as where rollouts
    of another run are newer, counts as 0), the tokens that are in the loss and clipped, and log-ratios and
    entropies in nats.
    """
    columns = (live_T, clipped_T, log_ratio_T.abs(), entropy_T)
    values_T4 = torch.stack([torch.where(live_T, column_T, 0).double() for column_T in columns], dim=1)
    sums_B4 = values_T4.new_zeros(len(BUCKETS), len(_VALUES))
    return sums_B4.index_add_(0, bucket_of(staleness_T), values_T4).flatten()


def bucket_metrics(sums: Tensor) -> Metrics:
    """Metrics ``staleness/BUCKET/...`` from the (reduced) ``bucket_sums``.

    ``tokens`` is the bucket's share of all tokens (0 where there are none); ``clipped``, ``ratio_gap`` and
    ``entropy`` are means over the bucket's tokens, None where it has none.
    """
    rows = sums.reshape(len(BUCKETS), len(_VALUES)).tolist()
    total = max(sum(row[0] for row in rows), 1.0)
    metrics: Metrics = {}
    for bucket, (tokens, *values) in zip(BUCKETS, rows, strict=True):
        metrics[f"staleness/{bucket}/tokens"] = tokens / total
        for name, value in zip(_VALUES[1:], values, strict=True):
            metrics[f"staleness/{bucket}/{name}"] = value / tokens if tokens else None
    return metrics


def _sums(view: PackView) -> Tensor:
    staleness_T = view.version - view.batch.version_T
    clipped_T, entropy_T = view.terms.clipped_T, view.stats.entropy_T
    return bucket_sums(staleness_T, view.live_T, clipped_T, view.log_ratio_T, entropy_T)


STALENESS = Measurement("staleness", BUCKET_SUMS, _sums, lambda sums, _update: bucket_metrics(sums))
"""The measurement ``staleness/BUCKET/...``: tokens, clipping, ratio gap and entropy by staleness bucket."""
