"""The data types of a step's header, which rank 0 broadcasts, and of routes: no per-token columns.

Apart from ``types.py`` for their number; users may import these names from there, too. Imports no torch. Used
by ``types.py``, ``planning/memory.py``, ``planning/sizes.py`` and ``bapo_rehearsal/program.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


@dataclass(frozen=True)
class RouteShape:
    """The shape of routes, the experts that tokens took: [tokens, ``layers``, ``per_token``].

    The row of a token is that of the position that predicts it. It has the dtype's largest value throughout
    where the route is unknown: no expert has that number, or else a route would have the expert twice.
    """

    layers: int
    per_token: int
    experts: int
    """Experts of a layer."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """uint8 up to 256 experts, uint16 above."""
        fits = self.experts < 256 + (self.per_token > 1)
        return np.dtype(np.uint8 if fits else np.uint16)


@dataclass(frozen=True)
class StoredRoutes:
    """The place of a response's routes in the file of a step's routes: a sample is sent without them."""

    file: Path
    first: int
    """The row of its first token."""
    tokens: int
    layers: int
    per_token: int
    dtype: str
    crc: int
    """CRC-32 of its rows."""


class VersionSpan(NamedTuple):
    """Weight versions of tokens in four numbers: all that ages and on-policy checks need.

    Part of a ``ResponseHeader``, and ``Sample.versions`` of a sample in memory.
    """

    tokens: int
    oldest: int
    """As ``newest`` 0 without tokens."""
    newest: int
    total: int
    """Sum over the tokens."""

    @classmethod
    def of(cls, versions_R: np.ndarray) -> VersionSpan:
        """The span of these versions."""
        if not len(versions_R):
            return cls(0, 0, 0, 0)
        total = int(versions_R.sum(dtype=np.int64))
        return cls(len(versions_R), int(versions_R.min()), int(versions_R.max()), total)

    def is_only(self, version: int) -> bool:
        """Whether ``version`` sampled every token."""
        return not self.tokens or self.oldest == self.newest == version


class ResponseHeader(NamedTuple):
    """The numbers of a response that every rank needs: for advantages, packing plan, normalizers, ages."""

    reward: float
    trained_tokens: int
    predicted_tokens: int
    """Trained tokens without the first token of an empty prompt, which no position predicts."""
    tokens: int
    """Number of the response's tokens, trained on or not."""
    versions: VersionSpan
    """Of the tokens that are trained on."""
    checksum: int
    """CRC-32 of the prompt's ids and all columns, with which a rank verifies what it reads."""
    has_teacher_log_probs: bool = False
    """Whether it has log-probs of the teacher."""
    routes: StoredRoutes | None = None
    """Where its routes are; None if it was sampled without."""
    is_cut: bool = False
    """Whether it was cut at ``rollout.max_response_tokens``, or another branch of its episode was."""
    named_rewards: Mapping[str, float] = {}
    """The named rewards of which its reward is made; none where the reward function gives a number."""
    branch: int = 0
    """As of ``Rollout``, as is ``has_prompt``."""
    has_prompt: bool = True


class GroupHeader(NamedTuple):
    """A group without its tokens: source and length of its prompt, headers of its responses."""

    source: str
    prompt_tokens: int
    responses: tuple[ResponseHeader, ...]
    """Several of an episode with branches, one after the other."""

    @property
    def episodes(self) -> list[list[ResponseHeader]]:
        """The responses of each episode; its reward, that of each of them, counts once."""
        found: list[list[ResponseHeader]] = []
        for one in self.responses:
            if one.branch == 0:
                found.append([])
            found[-1].append(one)
        return found


class ColumnFile(NamedTuple):
    """A file of per-token columns, as rank 0 has read it: how others find it whole, and where its values are.

    Part of a ``StepHeader``, opened by ``StepColumns``.
    """

    path: Path
    size: int
    """Bytes."""
    tail: str
    """SHA-256 of its last bytes, where a zip file has the CRC-32 of everything in it."""
    columns: dict[str, tuple[int, str]]
    """For each array the offset of its first value in bytes, and its dtype as numpy writes it."""


@dataclass(frozen=True)
class StepHeader:
    """A step's batch without its per-token columns, about 50 bytes a response: rank 0 broadcasts it.

    Equal on every rank. Advantages and packs come later.
    """

    groups: tuple[GroupHeader, ...]
    metrics: dict[str, float | None]
    file: ColumnFile
