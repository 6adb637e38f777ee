"""Sequence packing: turns groups of rollouts into samples, and samples into balanced ``thd`` micro-batches.

The shift to predicting positions happens here, once: a sample of n tokens has n - 1 of them, and position i
holds token i as input and token i + 1 as label, with all per-token columns of that label. All ranks compute
the same plan from the same numbers (``pack_plan.py``), and each builds its own packs without communication:
of a ``StoredSample`` only the ranks that pack it read the columns.

Shapes: ``_R`` tokens of a response, ``_T`` tokens of a pack, ``_N`` tokens of a response that are trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Literal, Protocol, Self, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike

from bapo_megatron.algo.advantages import group_advantages
from bapo_megatron.data.pack_plan import plan_packs
from bapo_megatron.data.routes import read_routes, unknown_expert
from bapo_megatron.tensor_types import MicroBatch
from bapo_megatron.types import (
    PackLayout,
    ResponseColumns,
    ResponseHeader,
    ResponseTokens,
    StepHeader,
    StoredRoutes,
    VersionSpan,
)

T = TypeVar("T")

RouteReplay = Literal["off", "measure", "replay"]

RouteRow = tuple[int, int, np.dtype[Any]]
"""Layers and experts of a token, and the dtype of its routes."""

UNKNOWN_BYTE = unknown_expert(np.uint8)
"""The mark of an unknown route in a pack of bytes; in one of int16, which uint16 becomes, it is -1."""

# Padding is cut into documents of at most this many tokens, so that attention over it stays cheap.
_PADDING_DOCUMENT = 512


class TrainingBatch(Protocol):
    """A step's batch on one rank: the header, and columns on request. ``StepColumns`` implements it."""

    @property
    def header(self) -> StepHeader:
        """The numbers of all responses, equal on every rank."""

    def read(self, group: int, response: int) -> tuple[np.ndarray, ResponseTokens]:
        """Token ids of a group's prompt, and the tokens of one of its responses, by their numbers."""


class TrainingSample(Protocol):
    """Training sequence as every rank sees it: its numbers, and on request its columns, as a ``Sample``.

    ``Sample`` has them in memory, ``StoredSample`` in a step's file. Code asks for the columns of samples
    that this rank packs, and of no others.
    """

    @property
    def advantage(self) -> float: ...
    @property
    def source(self) -> int: ...
    @property
    def response_tokens(self) -> int: ...
    @property
    def trained_tokens(self) -> int: ...
    @property
    def predicted_tokens(self) -> int: ...
    @property
    def positions(self) -> int: ...
    @property
    def versions(self) -> VersionSpan: ...
    @property
    def route_row(self) -> RouteRow | None: ...
    @property
    def replays_routes(self) -> bool: ...

    def load_routes(self) -> np.ndarray | None:
        """Routes of its tokens, [R, layers, per_token]; None if it has none."""

    def without_routes(self) -> Self:
        """The sample without routes: the routers choose."""

    def loaded(self) -> Sample:
        """The sample with its columns."""

    def changed(self, change: Callable[[Sample], Sample]) -> Self:
        """The sample with columns that ``change`` adds wherever it is loaded. It must keep the numbers."""

    def with_advantage(self, advantage: float) -> Self:
        """The sample with another advantage."""


@dataclass(frozen=True)
class _TokenIds:
    token_ids: np.ndarray
    """Token ids of prompt and response, int32."""


@dataclass(frozen=True)
class Sample(ResponseColumns, _TokenIds):
    """Training sequence, as plain data: a prompt and a response with its advantage.

    It has all columns of the response. ValueError for a loss mask that has not one value for each token of
    the response. Positional arguments: token ids, log-probs, versions, advantage. Made by ``StoredSample``
    from a step's file, by ``trainer/sft.py`` from a solution; packed by ``pack_samples``.
    """

    advantage: float
    old_log_probs_R: np.ndarray | None = None
    """Log-probs under pi_old, the ratio's denominator, float32; None: ``log_probs_R``."""
    importance_R: np.ndarray | None = None
    """Importance weights: factors of each token's weight in the loss, float32; None: 1."""
    source: int = -1
    """Index of its source among ``data.sources``; -1 without sources."""
    reference_log_probs_R: np.ndarray | None = None
    """Log-probs under the frozen reference policy, float32; None in a run without one."""
    replays_routes: bool = True
    """See ``MicroBatch``."""

    def __post_init__(self) -> None:
        if self.loss_mask_R is not None and len(self.loss_mask_R) != self.response_tokens:
            raise ValueError(
                f"loss_mask_R has {len(self.loss_mask_R)} values for a response of {self.response_tokens} "
                f"tokens; give one for each"
            )

    @property
    def response_tokens(self) -> int:
        """Tokens of the response, trained on or not."""
        return len(self.log_probs_R)

    @property
    def trained_R(self) -> np.ndarray:
        """Loss mask of the response, bool [R]: the tokens that are trained on."""
        if self.loss_mask_R is None:
            return np.ones(self.response_tokens, np.bool_)
        return self.loss_mask_R.astype(np.bool_)

    @property
    def predicted_R(self) -> np.ndarray:
        """``trained_R`` without the first token of the sample, which no position predicts."""
        predicted_R = self.trained_R
        predicted_R[: max(0, len(predicted_R) - self.positions)] = False
        return predicted_R

    @property
    def trained_tokens(self) -> int:
        """Number of response tokens that are trained on."""
        return int(self.trained_R.sum())

    @property
    def predicted_tokens(self) -> int:
        """Number of trained tokens that a position predicts."""
        return int(self.predicted_R.sum())

    @property
    def positions(self) -> int:
        """Number of predicting positions, the sample's length in a pack."""
        return len(self.token_ids) - 1

    @property
    def versions(self) -> VersionSpan:
        """Weight versions of the tokens that are trained on."""
        return VersionSpan.of(self.versions_R[self.trained_R])

    @property
    def route_row(self) -> RouteRow | None:
        """Layers and experts of a token, and the dtype of its routes; None if it has none."""
        return None if self.routes_R is None else (*self.routes_R.shape[1:], self.routes_R.dtype)

    def load_routes(self) -> np.ndarray | None:
        """As of ``TrainingSample``."""
        return self.routes_R

    def without_routes(self) -> Sample:
        """As of ``TrainingSample``."""
        return replace(self, routes_R=None)

    def loaded(self) -> Sample:
        """This sample, whose columns are in memory."""
        return self

    def changed(self, change: Callable[[Sample], Sample]) -> Sample:
        """The sample that ``change`` makes of it."""
        return change(self)

    def with_advantage(self, advantage: float) -> Sample:
        """The sample with another advantage."""
        return replace(self, advantage=advantage)


@dataclass(frozen=True)
class StoredSample:
    """Training sequence in a step's file: its numbers on every rank, its columns where it is packed.

    ``loaded`` reads them anew at each call, because the updates of a step give a sample to different ranks,
    and costs a read of the response. StorageFailed, on this rank alone, if they cannot be read. Made by
    ``samples_of``.
    """

    response: ResponseHeader
    prompt_tokens: int
    read: Callable[[], tuple[np.ndarray, ResponseTokens]]
    """Reads the prompt's token ids and the response's tokens."""
    advantage: float
    source: int = -1
    route_replay: RouteReplay = "off"
    """What is made of its routes; `off`: they are left where they are."""
    changes: tuple[Callable[[Sample], Sample], ...] = ()

    @property
    def response_tokens(self) -> int:
        """As of ``Sample``."""
        return self.response.tokens

    @property
    def trained_tokens(self) -> int:
        """As of ``Sample``."""
        return self.response.trained_tokens

    @property
    def predicted_tokens(self) -> int:
        """As of ``Sample``."""
        return self.response.predicted_tokens

    @property
    def positions(self) -> int:
        """As of ``Sample``."""
        return self.prompt_tokens + self.response_tokens - 1

    @property
    def versions(self) -> VersionSpan:
        """As of ``Sample``."""
        return self.response.versions

    @property
    def route_row(self) -> RouteRow | None:
        """As of ``Sample``."""
        at = self._routes
        return None if at is None else (at.layers, at.per_token, np.dtype(at.dtype))

    @property
    def replays_routes(self) -> bool:
        """As of ``Sample``."""
        return self.route_replay == "replay"

    @property
    def _routes(self) -> StoredRoutes | None:
        return None if self.route_replay == "off" else self.response.routes

    def load_routes(self) -> np.ndarray | None:
        """As of ``TrainingSample``. StorageFailed, on this rank alone, if they cannot be read."""
        return None if self._routes is None else read_routes(self._routes)

    def without_routes(self) -> StoredSample:
        """As of ``TrainingSample``."""
        return replace(self, route_replay="off")

    def loaded(self) -> Sample:
        """The sample with its columns, and with all changes."""
        ids_P, tokens = self.read()
        sample = Sample(
            token_ids=np.concatenate([ids_P, tokens.token_ids_R]),
            **{name: x for name, x in tokens.columns.items() if name != "token_ids_R"},
            advantage=self.advantage,
            source=self.source,
        )
        for change in self.changes:
            sample = change(sample)
        return sample

    def changed(self, change: Callable[[Sample], Sample]) -> StoredSample:
        """The sample with ``change`` after those that it has."""
        return replace(self, changes=(*self.changes, change))

    def with_advantage(self, advantage: float) -> StoredSample:
        """The sample with another advantage."""
        return replace(self, advantage=advantage)


def samples_of(
    batch: TrainingBatch,
    advantage: Literal["grpo", "dr_grpo"],
    sources: Sequence[str] = (),
    route_replay: RouteReplay = "off",
) -> list[list[StoredSample]]:
    """Samples of a step, group by group, with advantages normalized within each group. Reads no column.

    ``sources``: names of the run's sources; a sample gets the index of its own. ``route_replay``: what is
    made of the rollouts' routes; `off`: they are left where they are.
    """
    found = []
    for number, group in enumerate(batch.header.groups):
        source = sources.index(group.source) if group.source in sources else -1
        advantages = group_advantages([one.reward for one in group.responses], advantage)
        reads = (partial(batch.read, number, index) for index in range(len(group.responses)))
        found.append(
            [
                StoredSample(response, group.prompt_tokens, read, float(value), source, route_replay)
                for response, read, value in zip(group.responses, reads, advantages, strict=True)
            ]
        )
    return found


def split_into_updates(groups: Sequence[T], updates: int, seed: Sequence[int]) -> list[list[T]]:
    """Mini-batches of a step: groups in random order, spread evenly over at most ``updates`` updates.

    Groups are not split: within one, advantages sum to zero, so every update has both signs, unless
    ``algorithm.corrections`` later reject all responses of one sign.
    """
    order = np.random.default_rng(list(seed)).permutation(len(groups))
    parts = np.array_split(order, min(updates, len(groups))) if len(groups) else []
    return [[groups[i] for i in part] for part in parts]


def pack_samples(
    samples: Sequence[TrainingSample],
    pack_tokens: int,
    loss_mean: str = "token",
    layout: PackLayout | None = None,
) -> list[MicroBatch]:
    """Pack the samples of an update into this rank's micro-batches; every rank has the same number.

    A pack is at most ``pack_tokens`` long, rounded down to the layout's length multiple. A rank without
    samples gets a dummy pack of one such multiple. Loads the samples of this rank's packs alone. ValueError
    if a sample does not fit.
    """
    layout = layout or PackLayout()
    lengths = [_round_up(sample.positions, layout.document_multiple) for sample in samples]
    plan = plan_packs(lengths, pack_tokens, layout)
    totals = [sum(lengths[i] for i in pack) for rank in plan for pack in rank]
    shortest = max(totals) if layout.fixed_length else 1
    weights = _loss_weights(samples, loss_mean)
    trained_tokens = tuple(sample.trained_tokens for sample in samples)
    packs = (_build(samples, weights, pack, shortest, layout) for pack in plan[layout.data_rank])
    # The same for all ranks: one without samples of this kind must have the column, too.
    if rows := [row for sample in samples if (row := sample.route_row) is not None]:
        packs = (_with_routes(pack, samples, rows[0]) for pack in packs)
    sources = tuple(sample.source for sample in samples)
    sources = () if set(sources) <= {-1} else sources
    return [replace(pack, trained_tokens=trained_tokens, sources=sources) for pack in packs]


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _loss_weights(samples: Sequence[TrainingSample], loss_mean: str) -> list[float]:
    """Loss weight of each sample's tokens: 1, or for a mean over sequences ``(sum_j n_j / N) / n_i``.

    The loss sum is then divided by the number of trained tokens. With N sequences of n_i trained tokens,
    sum_i (1 / N) sum_t l_it / n_i = (1 / sum_j n_j) sum_i sum_t l_it * (sum_j n_j / N) / n_i.
    """
    if loss_mean == "token":
        return [1.0] * len(samples)
    mean_tokens = sum(sample.trained_tokens for sample in samples) / max(1, len(samples))
    return [mean_tokens / max(1, sample.trained_tokens) for sample in samples]


def _build(
    samples: Sequence[TrainingSample],
    weights: Sequence[float],
    members: Sequence[int],
    shortest: int,
    layout: PackLayout,
) -> MicroBatch:
    """Micro-batch of the samples ``members``, padded to at least ``shortest`` tokens and never empty."""
    bounds, rows = [0], []
    for index in members:
        positions = samples[index].positions
        rows.append((index, bounds[-1], positions))
        if positions:  # documents without tokens are left out of the attention kernel's bounds
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
    """The pack with the column of routes, read for its own samples. ``row``: ``Sample.route_row``."""
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
        # The row of a token is that of the position which predicts it; the first token may have none.
        count = min(len(routes_R), positions)
        route_TLK[start + positions - count : start + positions] = routes_R[len(routes_R) - count :]
    signed = route_TLK.view(np.int16) if dtype == np.uint16 else route_TLK  # torch indexes no uint16
    return replace(pack, route_TLK=torch.from_numpy(signed), replays_routes=replays)


def _padding_bounds(start: int, end: int, multiple: int) -> list[int]:
    """Ends of the padding documents that fill ``start:end``."""
    piece = max(1, _PADDING_DOCUMENT // multiple) * multiple
    return [*range(start + piece, end, piece), end] if start < end else []


def trained_columns(sample: Sample, index: int, weight: float) -> dict[str, ArrayLike]:
    """Per-token columns (``tensor_types.COLUMNS``) of a response: for each an array [R], or one scalar.

    ``index``: index of the sample in the update. ``weight``: loss weight of its tokens.
    """
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
        "sequence_T": index,
    }


def _write(pack: MicroBatch, sample: Sample, start: int, columns: dict[str, ArrayLike]) -> None:
    """Write a sample into a pack: its token ids and labels, and ``columns`` where the label is trained on."""
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
