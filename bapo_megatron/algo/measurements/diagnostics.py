"""Entropy diagnostics: the Entropy-Clip Rule (Eq. 6), quadrants of advantage and probability, ratio bins.

``DIAGNOSTICS`` measures them in every update, without a pass of its own. Equations of arXiv 2510.18927.

The quadrants are those of the Entropy-Clip Rule (Eq. 6, Definition 1): a token has *high* probability if
``log pi(y) > E[log pi] = -H``, the mean over its own next-token distribution (``tokens.likely``), and its
advantage is positive or negative. A policy-gradient step on the sampled token ``y`` changes the entropy of
its distribution, to first order and up to the step's size, by

    effect = -m g A (log pi(y) + H)

with ``m`` the weight in the loss and ``g`` the loss's own factor of the gradient (``LossTerms.gradient_T``;
BAPO's is the ratio where the token has a gradient, Eq. 7, else 0). ``X`` is 1 where ``g`` is not 0, else 0.
The mean effect estimates minus the covariance of Eq. 6, whose constant drops out because ``log pi + H`` has
mean zero. Derivation: docs/off_policy.md. Effects above 0 expand the entropy, those below contract it.

Legend: ``_T`` tokens of a pack, ``_B`` buckets of staleness, ``_C`` classes of tokens, ``_V`` values.

Used by ``algo/objective.py`` and ``benchmarks/diagnostics.py``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bapo_megatron.algo.bins import BUCKETS, RATIO_BINS, RATIO_EDGES
from bapo_megatron.algo.measurements import Measurement, PackView, share
from bapo_megatron.algo.measurements.staleness import bucket_of
from bapo_megatron.algo.tokens import constant_on, likely, unmasked
from bapo_megatron.types import Metrics

QUADRANTS = ("negative_low", "negative_high", "positive_low", "positive_high")
"""Sign of the advantage, and probability. The second and the third expand the entropy."""

EXPANDING = ("negative_high", "positive_low")

_CLASSES = (*QUADRANTS, "no_advantage")
_VALUES = ("tokens", "clipped", "mass", "effect", "log_prob", "advantage", "product")
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
        *(log_prob_T, alive_T, log_prob_T * alive_T),
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
      gradient mass ``sum m g |A|``; ``quadrant/Q/clipped``: the share of its own tokens that is clipped
    - ``entropy_rule/covariance``: ``Cov(log pi, A X)`` over tokens, Eq. 6 as a plain covariance
    - ``entropy_rule/effect``: mean first-order effect on the entropy, in nats for a step of size 1
    - ``polarity/...``: the share of tokens and contribution of the two quadrants that expand the entropy
      (``EXPANDING``); the effects of these, and of all other tokens
    - ``staleness/B/clipped_Q``, ``.../covariance``, ``.../effect``: the same within a bucket of staleness
    - ``ratio/BIN/tokens``: share of the tokens; ``.../probability``, ``.../entropy``: means over the bin
    """
    table_BCV = sums[:_TABLE_SUMS].reshape(_TABLE)
    metrics: Metrics = {**_quadrant_metrics(table_BCV.sum(0)), **_rule(table_BCV.sum((0, 1)), "entropy_rule")}
    for bucket, table_CV in zip(BUCKETS, table_BCV, strict=True):
        tokens, clipped, *_ = table_CV.T.tolist()
        for number, quadrant in enumerate(QUADRANTS):
            metrics[f"staleness/{bucket}/clipped_{quadrant}"] = share(clipped[number], tokens[number])
        metrics.update(_rule(table_CV.sum(0), f"staleness/{bucket}"))
    return metrics | _profile_metrics(sums[_TABLE_SUMS:].reshape(len(RATIO_BINS), len(_PROFILE)))


def _summed(row_T: Tensor, rows: int, columns: tuple[Tensor, ...]) -> Tensor:
    """Sums of the columns over the tokens of each row: [rows columns]."""
    values_TV = torch.stack(columns, dim=1)
    return values_TV.new_zeros(rows, len(columns)).index_add_(0, row_T, values_TV).flatten()


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
    """The entropy rule (Eq. 6) of tokens with the sums ``values``: covariance and mean effect."""
    tokens, _, _, effect, log_prob, advantage, product = values.tolist()
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
"""Quadrants, entropy rule and ratios of the tokens of an update."""
