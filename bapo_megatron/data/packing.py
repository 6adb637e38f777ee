"""Sequence packing: ``pack_samples`` turns an update's samples into this rank's ``thd`` micro-batches.

``updates_of_step`` splits a step's groups into updates. Only this module shifts tokens to the positions that
predict them: a sample of n tokens has n - 1 positions; position i has token i as input, token i + 1 as label,
and the per-token columns of that label. All ranks compute the same plan from the same numbers
(``pack_plan.py``), without communication, and each loads only the samples of its own packs.

Shapes: ``_R`` tokens of a response, ``_T`` tokens of a pack, ``_N`` trained tokens of a response.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike

from bapo_megatron.data.pack_plan import plan_packs
from bapo_megatron.data.routes import unknown_expert
from bapo_megatron.data.samples import RouteRow, Sample, TrainingSample
from bapo_megatron.tensor_types import MicroBatch
from bapo_megatron.types import GIVEN, PackLayout

T = TypeVar("T")

UNKNOWN_BYTE = unknown_expert(np.uint8)
"""Mark of an unknown route in a pack of bytes; in int16, which replaces uint16, it is -1."""

# Longest document of padding, which keeps attention over padding cheap.
_PADDING_DOCUMENT = 512


def split_into_updates(groups: Sequence[T], updates: int, seed: Sequence[int]) -> list[list[T]]:
    """Return a step's mini-batches: groups, shuffled by ``seed``, spread evenly over at most ``updates``.

    Groups are not split: a group's advantages sum to zero, so every update has both signs, unless
    ``algorithm.corrections`` later reject all responses of one sign.
    """
    order = np.random.default_rng(list(seed)).permutation(len(groups))
    parts = np.array_split(order, min(updates, len(groups))) if len(groups) else []
    return [[groups[i] for i in part] for part in parts]


def updates_of_step(
    groups: Sequence[T], epochs: int, updates: int, seed: int, step: int
) -> list[tuple[int, list[T]]]:
    """Return all updates of ``step`` in order, each as (pass number, groups); every pass is split anew."""
    return [
        (epoch, part)
        for epoch in range(epochs)
        for part in split_into_updates(groups, updates, (seed, step, epoch))
    ]


def pack_samples(
    samples: Sequence[TrainingSample],
    pack_tokens: int,
    loss_mean: str = "token",
    layout: PackLayout | None = None,
    max_response_tokens: int = 1,
) -> list[MicroBatch]:
    """Pack an update's samples into this rank's micro-batches; every rank has the same number.

    A pack is at most ``pack_tokens`` long, rounded down to the layout's length multiple. A rank without
    samples gets a dummy pack of one such multiple. Loads only the samples of this rank's packs. Raises
    ValueError if a sample does not fit. ``loss_mean``: see ``AlgorithmConfig``; `constant` divides by
    ``max_response_tokens``.
    """
    layout = layout or PackLayout()
    lengths = [_round_up(sample.positions, layout.document_multiple) for sample in samples]
    plan = plan_packs(lengths, pack_tokens, layout)
    totals = [sum(lengths[i] for i in pack) for rank in plan for pack in rank]
    shortest = max(totals) if layout.fixed_length else 1
    weights = _loss_weights(samples, loss_mean, max_response_tokens)
    trained_tokens = tuple(sample.trained_tokens for sample in samples)
    packs = (_build(samples, weights, pack, shortest, layout) for pack in plan[layout.data_rank])
    # Equal on all ranks: one without such samples must have the column, too.
    if rows := [row for sample in samples if (row := sample.route_row) is not None]:
        packs = (_with_routes(pack, samples, rows[0]) for pack in packs)
    sources = tuple(sample.source for sample in samples)
    sources = () if set(sources) <= {-1} else sources
    return [replace(pack, trained_tokens=trained_tokens, sources=sources) for pack in packs]


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _loss_weights(samples: Sequence[TrainingSample], loss_mean: str, constant: int) -> list[float]:
    """Return each sample's token weight in the loss: 1, or for a mean over sequences (sum_j n_j / N) / n_i.

    For `constant` n_i is the same number for all sequences (Dr. GRPO, arXiv 2503.20783).

    The loss sum is then divided by the number of trained tokens. With N sequences of n_i trained tokens,
    sum_i (1 / N) sum_t l_it / n_i = (1 / sum_j n_j) sum_i sum_t l_it * (sum_j n_j / N) / n_i. A sequence
    without trained tokens is not one of the N: it has no mean, and would only shrink the step.
    """
    if loss_mean == "token":
        return [1.0] * len(samples)
    tokens = [sample.trained_tokens for sample in samples]
    mean_tokens = sum(tokens) / max(1, sum(count > 0 for count in tokens))
    return [mean_tokens / (constant if loss_mean == "constant" else max(1, count)) for count in tokens]


def _build(
    samples: Sequence[TrainingSample],
    weights: Sequence[float],
    members: Sequence[int],
    shortest: int,
    layout: PackLayout,
) -> MicroBatch:
    """Return the micro-batch of ``members``, padded to at least ``shortest`` tokens and never empty."""
    bounds, rows = [0], []
    for index in members:
        positions = samples[index].positions
        rows.append((index, bounds[-1], positions))
        if positions:  # the attention kernel's bounds skip empty documents
            bounds.append(bounds[-1] + _round_up(positions, layout.document_multiple))
    length = _round_up(max(1, shortest, bounds[-1]), layout.length_multiple)
    documents = list(pairwise(bounds))
    bounds += _padding_bounds(bounds[-1], length, layout.document_multiple)
    pack = MicroBatch.of(tuple(bounds), tuple(rows), len(samples))
    for start, end in documents:
        pack.position_T[start:end] = torch.arange(end - start)
    for index, start, positions in rows:
        if positions:
            sample = samples[index].loaded()
            _write(pack, sample, start, trained_columns(sample, index, weights[index]))
    return pack


def _with_routes(pack: MicroBatch, samples: Sequence[TrainingSample], row: RouteRow) -> MicroBatch:
    """Return the pack with its samples' routes. ``row``: ``Sample.route_row``."""
    layers, per_token, dtype = row
    route_TLK = np.full((pack.token_T.numel(), layers, per_token), unknown_expert(dtype), dtype)
    replays = True
    for index, start, positions in pack.rows:
        sample = samples[index]
        if sample.route_row is None or not positions:
            continue
        replays = sample.replays_routes
        routes_R = sample.load_routes()
        assert routes_R is not None
        # A token's row belongs to the position that predicts it; the first token may have none.
        count = min(len(routes_R), positions)
        route_TLK[start + positions - count : start + positions] = routes_R[len(routes_R) - count :]
    signed = route_TLK.view(np.int16) if dtype == np.uint16 else route_TLK  # torch indexes no uint16
    return replace(pack, route_TLK=torch.from_numpy(signed), replays_routes=replays)


def _padding_bounds(start: int, end: int, multiple: int) -> list[int]:
    piece = max(1, _PADDING_DOCUMENT // multiple) * multiple
    return [*range(start + piece, end, piece), end] if start < end else []


def trained_columns(sample: Sample, index: int, weight: float) -> dict[str, ArrayLike]:
    """Return a response's per-token columns (``tensor_types.COLUMNS``): each an array [R] or a scalar.
    ``index``: the sample's index in the update. ``weight``: loss weight of its tokens."""
    importance_R = 1.0 if sample.importance_R is None else sample.importance_R
    old_log_probs_R = sample.log_probs_R if sample.old_log_probs_R is None else sample.old_log_probs_R
    teacher_R = 0.0 if sample.teacher_log_probs_R is None else sample.teacher_log_probs_R
    reference_R = 0.0 if sample.reference_log_probs_R is None else sample.reference_log_probs_R
    return {
        "mask_T": 1.0,
        "weight_T": np.float32(weight) * importance_R,
        "advantage_T": sample.advantage,
        "rollout_log_prob_T": sample.log_probs_R,
        "old_log_prob_T": old_log_probs_R,
        "reference_log_prob_T": reference_R,
        "teacher_log_prob_T": teacher_R,
        "version_T": sample.versions_R,
        "oldest_version_T": _oldest(sample.versions_R),
        "sequence_T": index,
    }


def _oldest(versions_R: np.ndarray) -> np.ndarray:
    """Return for each token the oldest version among the sampled tokens up to it."""
    sampled_R = np.where(versions_R == GIVEN, np.iinfo(versions_R.dtype).max, versions_R)
    oldest_R: np.ndarray = np.minimum.accumulate(sampled_R)
    return oldest_R


def _write(pack: MicroBatch, sample: Sample, start: int, columns: dict[str, ArrayLike]) -> None:
    end = start + sample.positions
    tokens = torch.from_numpy(sample.token_ids.astype(np.int64))
    pack.token_T[start:end] = tokens[:-1]
    pack.label_T[start:end] = tokens[1:]
    trained_R = sample.predicted_R
    place_N = torch.from_numpy(np.flatnonzero(trained_R) + end - len(trained_R))
    for name, value in columns.items():
        value_N = np.broadcast_to(value, trained_R.shape)[trained_R]
        column_T = getattr(pack, name)
        column_T[place_N] = torch.from_numpy(value_N).to(column_T.dtype)
