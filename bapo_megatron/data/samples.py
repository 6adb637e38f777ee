"""Training samples: sequences with an advantage, in memory or in a step's file, built from a step's batch.

``samples_of`` returns a step's ``StoredSample``s by group: their numbers (lengths, versions, advantage), on
every rank. ``StoredSample.loaded`` reads the per-token columns and returns a ``Sample``; each rank calls it
only for the samples that it packs (``packing.py``).

Shapes: ``_R`` tokens of a response.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np

from bapo_megatron.algo.advantages import Advantage, BranchReward, Rewards, branch_advantages
from bapo_megatron.data.routes import read_routes
from bapo_megatron.types import (
    ResponseColumns,
    ResponseHeader,
    ResponseTokens,
    StepHeader,
    StoredRoutes,
    VersionSpan,
)

RouteReplay = Literal["off", "measure", "replay"]

RouteRow = tuple[int, int, np.dtype[Any]]
"""Layers and experts per token, and the dtype of its routes."""


@dataclass(frozen=True)
class _TokenIds:
    token_ids: np.ndarray
    """Token ids of prompt and response, int32."""


@dataclass(frozen=True)
class Sample(ResponseColumns, _TokenIds):
    """Training sequence in memory: prompt and response ids, advantage, and all per-token columns of the
    response. Raises ValueError unless a loss mask has one value per response token. Positional arguments:
    token ids, log-probs, versions, advantage."""

    advantage: float
    old_log_probs_R: np.ndarray | None = None
    """Log-probs under pi_old, the ratio's denominator, float32; None: ``log_probs_R``."""
    importance_R: np.ndarray | None = None
    """Importance weights, factors of the token weights in the loss, float32; None: 1."""
    source: int = -1
    """Index of its source among ``data.sources``; -1 without sources."""
    reference_log_probs_R: np.ndarray | None = None
    """Log-probs under the frozen reference policy, float32; None without one."""
    replays_routes: bool = True
    """See ``MicroBatch``."""
    is_cut: bool = False
    """Whether it was cut at ``rollout.max_response_tokens``."""

    def __post_init__(self) -> None:
        if self.loss_mask_R is not None and len(self.loss_mask_R) != self.response_tokens:
            raise ValueError(
                f"loss_mask_R has {len(self.loss_mask_R)} values for a response of {self.response_tokens} "
                f"tokens; give one for each"
            )

    @property
    def response_tokens(self) -> int:
        """Number of response tokens, trained on or not."""
        return len(self.log_probs_R)

    @property
    def trained_R(self) -> np.ndarray:
        """Loss mask of the response, bool [R]; True for tokens that are trained on."""
        if self.loss_mask_R is None:
            return np.ones(self.response_tokens, np.bool_)
        return self.loss_mask_R.astype(np.bool_)

    @property
    def predicted_R(self) -> np.ndarray:
        """``trained_R`` without the sample's first token, which no position predicts."""
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
        """Number of predicting positions, i.e. the sample's length in a pack."""
        return len(self.token_ids) - 1

    @property
    def versions(self) -> VersionSpan:
        """Weight versions of the trained tokens."""
        return VersionSpan.of(self.versions_R[self.trained_R])

    @property
    def route_row(self) -> RouteRow | None:
        """Layers and experts per token, and the dtype of its routes; None if it has none."""
        return None if self.routes_R is None else (*self.routes_R.shape[1:], self.routes_R.dtype)

    def load_routes(self) -> np.ndarray | None:
        """Return its tokens' routes, [R, layers, per_token]; None if it has none."""
        return self.routes_R

    def without_routes(self) -> Sample:
        """Return the sample without routes, so that the routers choose."""
        return replace(self, routes_R=None)

    def loaded(self) -> Sample:
        return self

    def changed(self, change: Callable[[Sample], Sample], **_numbers: Any) -> Sample:
        """Return the sample with ``change`` applied to its columns."""
        return change(self)

    def with_advantage(self, advantage: float) -> Sample:
        return replace(self, advantage=advantage)


@dataclass(frozen=True)
class StoredSample:
    """Training sequence in a step's file: holds its numbers (lengths, advantage); ``loaded`` returns a
    ``Sample``. It reads the columns at each call and keeps none, since each update may pack a sample on
    another rank. Raises FailingDiskError, on this rank only, if they cannot be read."""

    response: ResponseHeader
    prompt_tokens: int
    read: Callable[[], tuple[np.ndarray, ResponseTokens]]
    """Reads the prompt's token ids and the response's tokens."""
    advantage: float
    source: int = -1
    route_replay: RouteReplay = "off"
    """Use of its routes; `off` leaves them unread."""
    changes: tuple[Callable[[Sample], Sample], ...] = ()

    @property
    def response_tokens(self) -> int:
        return self.response.tokens

    @property
    def is_cut(self) -> bool:
        return self.response.is_cut

    @property
    def trained_tokens(self) -> int:
        return self.response.trained_tokens

    @property
    def predicted_tokens(self) -> int:
        return self.response.predicted_tokens

    @property
    def positions(self) -> int:
        return self.prompt_tokens + self.response_tokens - 1

    @property
    def versions(self) -> VersionSpan:
        return self.response.versions

    @property
    def route_row(self) -> RouteRow | None:
        at = self._routes
        return None if at is None else (at.layers, at.per_token, np.dtype(at.dtype))

    @property
    def replays_routes(self) -> bool:
        return self.route_replay == "replay"

    @property
    def _routes(self) -> StoredRoutes | None:
        return None if self.route_replay == "off" else self.response.routes

    def load_routes(self) -> np.ndarray | None:
        """Read and return the routes. Raises FailingDiskError, on this rank only, if they cannot be read."""
        return None if self._routes is None else read_routes(self._routes)

    def without_routes(self) -> StoredSample:
        return replace(self, route_replay="off")

    def loaded(self) -> Sample:
        """Return the sample with its columns and all changes."""
        ids_P, tokens = self.read()
        sample = Sample(
            token_ids=np.concatenate([ids_P, tokens.token_ids_R]),
            **{name: x for name, x in tokens.columns.items() if name != "token_ids_R"},
            advantage=self.advantage,
            source=self.source,
            is_cut=self.is_cut,
        )
        for change in self.changes:
            sample = change(sample)
        return sample

    def changed(self, change: Callable[[Sample], Sample], **numbers: Any) -> StoredSample:
        """Return the sample with ``change`` after its earlier changes. ``numbers``: those of its
        ``ResponseHeader`` that ``change``, which may set a loss mask, alters."""
        response = self.response._replace(**numbers)
        return replace(self, changes=(*self.changes, change), response=response)

    def with_advantage(self, advantage: float) -> StoredSample:
        return replace(self, advantage=advantage)


TrainingSample = Sample | StoredSample
"""Training sequence as every rank sees it: its numbers, and by ``loaded`` its columns, which a rank reads
only if it packs the sample."""


def samples_of(
    header: StepHeader,
    read: Callable[[int, int], tuple[np.ndarray, ResponseTokens]],
    advantage: Advantage,
    sources: Sequence[str] = (),
    route_replay: RouteReplay = "off",
    branch_reward: BranchReward = "whole",
) -> list[list[StoredSample]]:
    """Return the samples of the step of ``header`` by group, with the values of ``advantage``.

    ``read``, called when a sample is loaded, returns the prompt's token ids and the tokens of a response,
    given the numbers of its group and of the response. ``advantage``: from ``build_advantage``; each branch
    of an episode is a sample, with a share of the episode's advantage by ``branch_reward``. ``sources``:
    names of the run's sources, which samples index. ``route_replay``: use of the rollouts' routes; `off`
    leaves them unread.
    """
    samples = []
    groups = header.groups
    values = iter(branch_advantages(groups, advantage(Rewards.of_step(groups)), branch_reward))
    for number, group in enumerate(groups):
        source = sources.index(group.source) if group.source in sources else -1
        samples.append(
            [
                StoredSample(
                    response,
                    group.prompt_tokens if response.has_prompt else 0,
                    partial(read, number, index),
                    next(values),
                    source,
                    route_replay,
                )
                for index, response in enumerate(group.responses)
            ]
        )
    return samples
