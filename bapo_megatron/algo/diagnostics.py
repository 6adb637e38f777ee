"""Diagnostic metrics of an update by kind of token: staleness, Entropy-Clip quadrant, ratio bin, source.

The ``Measurement``s ``DIAGNOSTICS`` and ``by_source(names)`` sum a pack's tokens and turn the
reduced sums into metrics; ``age_metrics`` returns an update's staleness on the host, without tensors.

**Staleness** (off-policy lag) is a token's age in updates, the sum of three parts:

    staleness = v - version = (v - v0) + (v0 - n) + (n - version)
                               reuse      queue      segment

``version`` sampled the token, ``v`` trains on it, ``v0`` is the version at the start of the step, and ``n``
the newest version in the token's group. Reuse: updates that this step has already made on its batch. Queue:
updates while the finished group waited for the step. Segment: updates while the group was unfinished (partial
rollouts: segments of a response come from several versions).

**Quadrants** are those of the Entropy-Clip Rule (Eq. 6, Definition 1 of arXiv 2510.18927): a token has *high*
probability if ``log pi(y) > E[log pi] = -H``, the mean over its own next-token distribution
(``tokens.likely``), and its advantage is positive or negative. A policy-gradient step on the sampled token
``y`` changes the entropy of its distribution, to first order and up to the step's size, by

    effect = -m g A (log pi(y) + H)

with ``m`` the weight in the loss and ``g`` the loss's gradient factor (``LossTerms.gradient_T``; for BAPO the
ratio where the token has a gradient, Eq. 7, otherwise 0). ``X`` is 1 where ``g`` is not 0, otherwise 0. The
mean effect estimates minus the covariance of Eq. 6, whose constant drops out because ``log pi + H`` has mean
zero (docs/off_policy.md). Effects above 0 expand the entropy, effects below 0 contract it.

**Sources** are a run's training files, ``data.sources``. A source's contribution is the share of
positive-advantage tokens in its gradient mass, whatever ``bounds.measure`` and ``bounds.share`` are. A
token's mass is ``m |g| |A|``.

Legend: ``_T`` tokens of a pack, ``_R`` tokens of a response, ``_B`` staleness buckets, ``_C`` token classes,
``_V`` values, ``_S`` sources, with a first row for tokens without one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from bapo_megatron.algo.bins import BUCKETS, RATIO_BINS, RATIO_EDGES
from bapo_megatron.algo.measurements import Measurement, PackView, UpdateSums, share
from bapo_megatron.algo.tokens import constant_on, likely, ratio, unmasked
from bapo_megatron.types import Metrics, VersionSpan

_BUCKET_STARTS = (1, 2, 4, 8, 16)

AGE_METRICS = tuple(
    f"staleness/{name}" for name in ("mean", "max", "reuse_mean", "queue_mean", "segment_mean")
)


def age_metrics(groups: Sequence[Sequence[VersionSpan]], version: int, step_version: int) -> Metrics:
    """Staleness of an update's tokens: mean, maximum, and the means of its three parts, in updates.

    Args:
        groups: for each group and response, the span of versions that sampled its tokens.
        version: version of the policy in training.
        step_version: version of the policy at the start of the step.

    Returns:
        ``AGE_METRICS``, each a mean or maximum over tokens; None without tokens.
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
    """``BUCKETS`` index (int64) of each token, from its staleness in updates; negative counts as 0."""
    return torch.bucketize(
        staleness_T, constant_on(staleness_T.device, _BUCKET_STARTS, torch.int64), right=True
    )


QUADRANTS = ("negative_low", "negative_high", "positive_low", "positive_high")
"""Sign of the advantage, and probability. The middle two expand the entropy."""

EXPANDING = ("negative_high", "positive_low")

_CLASSES = (*QUADRANTS, "no_advantage")
_VALUES = (
    *("tokens", "clipped", "mass", "effect", "log_prob", "advantage", "product"),
    *("ratio_gap", "entropy"),
)
_PROFILE = ("tokens", "probability", "entropy")
_TABLE = (len(BUCKETS), len(_CLASSES), len(_VALUES))
_TABLE_SUMS = math.prod(_TABLE)

DIAGNOSTIC_SUMS = _TABLE_SUMS + len(RATIO_BINS) * len(_PROFILE)
"""Length of the vector of ``diagnostic_sums``."""


@torch.no_grad()
def diagnostic_sums(view: PackView) -> Tensor:
    """Sums for ``diagnostic_metrics``: float64 [DIAGNOSTIC_SUMS], additive over packs and ranks."""
    stats, batch, terms = view.stats, view.batch, view.terms
    fields = (view.log_ratio_T, batch.advantage_T, stats.log_prob_T, stats.entropy_T, batch.weight_T)
    log_ratio_T, advantage_T, log_prob_T, entropy_T, weight_T, gradient_T = unmasked(
        batch.mask_T, *fields, terms.gradient_T
    )
    live_T = view.live_T.double()
    surplus_T = log_prob_T + entropy_T
    alive_T = advantage_T * (gradient_T != 0)
    push_T = weight_T * gradient_T * alive_T
    columns = (
        *(live_T, terms.clipped_T * live_T, push_T.abs(), -push_T * surplus_T),
        *(log_prob_T, alive_T, log_prob_T * alive_T, log_ratio_T.abs(), entropy_T),
    )
    quadrant_T = 2 * (advantage_T > 0) + likely(log_prob_T, entropy_T)
    class_T = torch.where(advantage_T == 0, len(QUADRANTS), quadrant_T)
    row_T = bucket_of(view.version - batch.version_T) * len(_CLASSES) + class_T
    profile = (live_T, log_prob_T.exp() * live_T, entropy_T)
    bin_T = torch.bucketize(log_ratio_T, constant_on(log_ratio_T.device, RATIO_EDGES).log(), right=True)
    return torch.cat(
        [
            _summed(row_T, len(BUCKETS) * len(_CLASSES), columns),
            _summed(bin_T, len(RATIO_BINS), profile),
        ]
    )


def diagnostic_metrics(sums: Tensor) -> Metrics:
    """Diagnostic metrics of an update from the (reduced) ``diagnostic_sums``; None without tokens.

    - ``quadrant/Q/tokens``, ``quadrant/Q/contribution``: the quadrant's share of the tokens, and of the
      gradient mass ``sum m g |A|``; ``quadrant/Q/clipped``: the clipped share of its own tokens
    - ``entropy_rule/covariance``: ``Cov(log pi, A X)`` over tokens, Eq. 6 as a plain covariance
    - ``entropy_rule/effect``: mean first-order effect on the entropy, in nats for a step of size 1
    - ``polarity/...``: token share and contribution of the two quadrants that expand the entropy
      (``EXPANDING``); their effect, and the effect of all other tokens
    - ``staleness/B/tokens``: the staleness bucket's share of the tokens; ``.../clipped``, ``.../ratio_gap``,
      ``.../entropy``: means over its tokens, of |log r| and entropy in nats
    - ``staleness/B/clipped_Q``, ``.../covariance``, ``.../effect``: as above, within the bucket
    - ``ratio/BIN/tokens``: share of the tokens; ``.../probability``, ``.../entropy``: means over the bin
    """
    table_BCV = sums[:_TABLE_SUMS].reshape(_TABLE)
    metrics: Metrics = {**_quadrant_metrics(table_BCV.sum(0)), **_rule(table_BCV.sum((0, 1)), "entropy_rule")}
    all_tokens = float(table_BCV[..., 0].sum())
    for bucket, table_CV in zip(BUCKETS, table_BCV, strict=True):
        metrics |= _bucket_metrics(f"staleness/{bucket}", table_CV.sum(0).tolist(), all_tokens)
        tokens, clipped, *_ = table_CV.T.tolist()
        for number, quadrant in enumerate(QUADRANTS):
            metrics[f"staleness/{bucket}/clipped_{quadrant}"] = share(clipped[number], tokens[number])
        metrics.update(_rule(table_CV.sum(0), f"staleness/{bucket}"))
    return metrics | _profile_metrics(sums[_TABLE_SUMS:].reshape(len(RATIO_BINS), len(_PROFILE)))


def _summed(row_T: Tensor, rows: int, columns: tuple[Tensor, ...]) -> Tensor:
    values_TV = torch.stack(columns, dim=1)
    return values_TV.new_zeros(rows, len(columns)).index_add_(0, row_T, values_TV).flatten()


def _bucket_metrics(prefix: str, sums: list[float], all_tokens: float) -> Metrics:
    tokens, clipped, *_, ratio_gap, entropy = sums
    return {
        f"{prefix}/tokens": tokens / max(all_tokens, 1.0),
        f"{prefix}/clipped": share(clipped, tokens),
        f"{prefix}/ratio_gap": share(ratio_gap, tokens),
        f"{prefix}/entropy": share(entropy, tokens),
    }


def _quadrant_metrics(table_CV: Tensor) -> Metrics:
    rows = dict(zip(_CLASSES, table_CV.tolist(), strict=True))
    tokens, _, mass, *_ = table_CV.sum(0).tolist()
    metrics: Metrics = {}
    for quadrant in QUADRANTS:
        metrics[f"quadrant/{quadrant}/tokens"] = share(rows[quadrant][0], tokens)
        metrics[f"quadrant/{quadrant}/clipped"] = share(rows[quadrant][1], rows[quadrant][0])
        metrics[f"quadrant/{quadrant}/contribution"] = share(rows[quadrant][2], mass)
    expanding = [sum(values) for values in zip(*(rows[name] for name in EXPANDING), strict=True)]
    all_effects = sum(row[3] for row in rows.values())
    return {
        **metrics,
        "polarity/expanding_tokens": share(expanding[0], tokens),
        "polarity/expanding_contribution": share(expanding[2], mass),
        "polarity/expanding_effect": share(expanding[3], tokens),
        "polarity/contracting_effect": share(all_effects - expanding[3], tokens),
    }


def _rule(values: Tensor, prefix: str) -> Metrics:
    """Entropy rule (Eq. 6) of tokens with the sums ``values``: covariance and mean effect."""
    tokens, _, _, effect, log_prob, advantage, product, *_ = values.tolist()
    covariance = None if not tokens else product / tokens - (log_prob / tokens) * (advantage / tokens)
    return {f"{prefix}/covariance": covariance, f"{prefix}/effect": share(effect, tokens)}


def _profile_metrics(profile: Tensor) -> Metrics:
    metrics: Metrics = {}
    tokens = float(profile[:, 0].sum())
    for name, row in zip(RATIO_BINS, profile.tolist(), strict=True):
        metrics[f"ratio/{name}/tokens"] = share(row[0], tokens)
        metrics[f"ratio/{name}/probability"] = share(row[1], row[0])
        metrics[f"ratio/{name}/entropy"] = share(row[2], row[0])
    return metrics


DIAGNOSTICS = Measurement(
    "diagnostics", DIAGNOSTIC_SUMS, diagnostic_sums, lambda sums, _update: diagnostic_metrics(sums)
)
"""The measurement of an update's quadrants, entropy rule and ratios."""

_SOURCE_VALUES = (
    *("tokens", "positive", "clipped_high", "clipped_low", "entropy"),
    *("positive_mass", "mass", "positive_unclipped", "unclipped"),
)


def by_source(names: Sequence[str]) -> Measurement:
    """Measurement ``source/NAME/...`` for each of the sources ``names``, numbered in this order.

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
        table = sums.reshape(rows, len(_SOURCE_VALUES))
        total = dict(zip(_SOURCE_VALUES, table.sum(0).tolist(), strict=True))
        by_name: Metrics = {}
        for name, row in zip(names, table[1:].tolist(), strict=True):
            by_name |= _source_metrics(f"source/{name}", dict(zip(_SOURCE_VALUES, row, strict=True)), total)
        return by_name

    return Measurement("by_source", rows * len(_SOURCE_VALUES), sums, metrics)


@torch.no_grad()
def source_sums(view: PackView, rows: int) -> Tensor:
    """Sums over each source's tokens: float64 [S, values], additive over packs and ranks."""
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


def _source_metrics(prefix: str, own: dict[str, float], total: dict[str, float]) -> Metrics:
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
