"""Masks of an update (``algorithm.masks``, ``algorithm.corrections``): which trained tokens remain.

``masks_of`` returns a run's masks; ``measure`` applies them to a sample and returns the numbers that all
ranks need: remaining tokens and the versions that sampled them (``Remaining``). Each rank has only its own
samples' columns, so one replica measures a sample and shares the numbers (``measured_once``); the rank that
packs a sample applies the masks again (``Remaining.of``). Shapes: ``_R`` response, ``_N`` trained tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

import numpy as np

from bapo_megatron.algo.corrections import is_outside
from bapo_megatron.algo.masks import CheckedMask, Response, build_masks, taken_out
from bapo_megatron.algo.measurements import share
from bapo_megatron.config import AlgorithmConfig
from bapo_megatron.data.samples import Sample, TrainingSample
from bapo_megatron.types import Metrics, VersionSpan

Masks = Sequence[CheckedMask]


def masks_of(algorithm: AlgorithmConfig) -> Masks:
    """Return a run's masks: the ratio limits of ``algorithm.corrections``, then ``algorithm.masks``."""
    config = algorithm.corrections
    rule = partial(taken_out, "algorithm.corrections", lambda one: is_outside(one.log_ratio_N, config))
    return [*([rule] if config.compares_old else []), *build_masks(algorithm)]


class Remaining(NamedTuple):
    """Numbers of a sample after the masks, for all ranks: token counts, versions, sum of weights."""

    trained: float
    predicted: float
    tokens: float
    """As in ``VersionSpan``, like the next three."""
    oldest: float
    newest: float
    total: float
    weight: float
    """Sum of the importance weights."""

    def of(self, sample: TrainingSample, masks: Masks) -> TrainingSample:
        """Return the sample without the tokens that ``masks`` remove."""
        if int(self.predicted) == sample.predicted_tokens:
            return sample
        return sample.changed(
            partial(_masked, masks=masks),
            trained_tokens=int(self.trained),
            predicted_tokens=int(self.predicted),
            versions=VersionSpan(int(self.tokens), int(self.oldest), int(self.newest), int(self.total)),
        )


def measure(sample: TrainingSample, masks: Masks, weighs: bool) -> list[float]:
    """Return a sample's ``Remaining`` numbers, then for each mask whether it empties the sample, and how many
    tokens it removes. ``weighs``: whether the sample has importance weights."""
    load = cache(sample.loaded)  # a read from disk
    keep_N, taken = _kept(sample, masks, load)
    predicted = sample.predicted_tokens
    if keep_N.all():
        span = sample.versions
        weight = _weight(load()) if weighs else float(predicted)
        left = Remaining(sample.trained_tokens, predicted, *span, weight)
    elif keep_N.any():
        rest = _with_mask(load(), keep_N)
        left = Remaining(rest.trained_tokens, rest.predicted_tokens, *rest.versions, _weight(rest))
    else:
        left = Remaining(0, 0, *VersionSpan(0, 0, 0, 0), 0.0)
    return [*left, *taken]


def shares(algorithm: AlgorithmConfig, taken: Sequence[Sequence[float]], tokens: int) -> Metrics:
    """Return ``masks/NAME_responses`` and ``masks/NAME_tokens``, the shares that ``algorithm.masks`` remove
    in an update of ``tokens``, from each mask's removals per sample."""
    names = [f"masks/{part.label}_{kind}" for part in algorithm.masks for kind in ("responses", "tokens")]
    sums = np.array(taken, np.float64).sum(0)[-len(names) :] if taken else np.zeros(len(names))
    wholes = (len(taken), tokens) * len(algorithm.masks)
    return {name: share(float(part), whole) for name, part, whole in zip(names, sums, wholes, strict=False)}


def _response(sample: TrainingSample, keep_N: np.ndarray, load: Callable[[], Sample]) -> Response:
    """Return a sample as the next mask sees it: with the tokens that earlier masks left."""

    def read() -> tuple[np.ndarray, np.ndarray]:
        loaded = load()
        old_R = loaded.log_probs_R if loaded.old_log_probs_R is None else loaded.old_log_probs_R
        rollout_N, old_N = (column_R[loaded.predicted_R][keep_N] for column_R in (loaded.log_probs_R, old_R))
        return rollout_N.astype(np.float64), old_N.astype(np.float64)

    return Response(sample.advantage, int(keep_N.sum()), sample.is_cut, sample.source, read)


def _kept(sample: TrainingSample, masks: Masks, load: Callable[[], Sample]) -> tuple[np.ndarray, list[float]]:
    """Return the remaining tokens, bool [N]; per mask, whether it emptied the sample and its token count."""
    keep_N, taken = np.ones(sample.predicted_tokens, np.bool_), []
    for mask in masks:
        before = int(keep_N.sum())
        if before:
            keep_N[keep_N] = ~mask(_response(sample, keep_N.copy(), load))
        after = int(keep_N.sum())
        taken += [float(before > 0 and after == 0), float(before - after)]
    return keep_N, taken


def _masked(sample: Sample, masks: Masks) -> Sample:
    return _with_mask(sample, _kept(sample, masks, sample.loaded)[0])


def _with_mask(sample: Sample, keep_N: np.ndarray) -> Sample:
    mask_R = sample.trained_R.copy()
    mask_R[sample.predicted_R] = keep_N
    return replace(sample, loss_mask_R=mask_R)


def _weight(sample: Sample) -> float:
    """Return the sum of the importance weights over trained tokens; without weights, the number of tokens."""
    if sample.importance_R is None:
        return float(sample.predicted_tokens)
    return float(sample.importance_R[sample.predicted_R].sum(dtype=np.float64))
