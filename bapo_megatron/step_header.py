"""Data types of a step's header: each response's numbers (reward, lengths, versions), no per-token columns.

Rank 0 broadcasts a ``StepHeader`` and the advantages, computed from it. Every rank computes the same packing
plan from the header and reads the tokens of its own samples from the step file that the header names. Also
the shape and file location of routes, the experts that an engine's tokens took. Users may import these names
from ``types.py``. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


@dataclass(frozen=True)
class RouteShape:
    """Shape of routes (the experts that tokens took): [tokens, ``layers``, ``per_token``]. A token's row
    belongs to the position that predicts it. An unknown route holds the dtype's largest value throughout: no
    expert has that number, or no known route has it twice."""

    layers: int
    per_token: int
    experts: int
    """Number of experts per layer."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """uint8 up to 256 experts (255 if ``per_token`` is 1), uint16 above."""
        fits = self.experts < 256 + (self.per_token > 1)
        return np.dtype(np.uint8 if fits else np.uint16)


@dataclass(frozen=True)
class StoredRoutes:
    """Location of a response's routes in a step's routes file: rows, shape, dtype and CRC. Headers and stored
    rollouts hold it in place of the routes."""

    file: Path
    first: int
    """Row of its first token."""
    tokens: int
    layers: int
    per_token: int
    dtype: str
    crc: int
    """CRC-32 of its rows."""


class VersionSpan(NamedTuple):
    """Weight versions that sampled some tokens, as four numbers: token count, oldest, newest and sum of
    versions; enough for mean age and on-policy checks."""

    tokens: int
    oldest: int
    """Like ``newest``, 0 without tokens."""
    newest: int
    total: int
    """Sum over the tokens."""

    @classmethod
    def of(cls, versions_R: np.ndarray) -> VersionSpan:
        """Return the span of ``versions_R``."""
        if not len(versions_R):
            return cls(0, 0, 0, 0)
        total = int(versions_R.sum(dtype=np.int64))
        return cls(len(versions_R), int(versions_R.min()), int(versions_R.max()), total)

    def is_only(self, version: int) -> bool:
        """Return whether ``version`` sampled every token."""
        return not self.tokens or self.oldest == self.newest == version


class ResponseHeader(NamedTuple):
    """Numbers of a response that every rank has: reward, token counts, versions, checksum, location of
    routes. Advantages, packing plan, loss divisors and ages follow from them."""

    reward: float
    trained_tokens: int
    predicted_tokens: int
    """Trained tokens, except the first token after an empty prompt, which no position predicts."""
    tokens: int
    """Response tokens, trained or not."""
    versions: VersionSpan
    """Span of the trained tokens."""
    checksum: int
    """CRC-32 of the prompt ids and all columns; verifies what a rank reads."""
    has_teacher_log_probs: bool = False
    routes: StoredRoutes | None = None
    """Location of its routes; None if it was sampled without."""
    is_cut: bool = False
    """Whether it, or another branch of its episode, was cut at ``rollout.max_response_tokens``."""
    named_rewards: Mapping[str, float] = {}
    """The named parts of its reward; empty if the reward function returns a number."""
    branch: int = 0
    """This and ``has_prompt``: see ``Rollout``."""
    has_prompt: bool = True


class GroupHeader(NamedTuple):
    """A group without its tokens: source and length of its prompt, and response headers."""

    source: str
    prompt_tokens: int
    responses: tuple[ResponseHeader, ...]
    """Headers of an episode's branches are consecutive."""

    @property
    def episodes(self) -> list[list[ResponseHeader]]:
        """The responses of each episode; its reward, which all its branches carry, counts once."""
        found: list[list[ResponseHeader]] = []
        for one in self.responses:
            if one.branch == 0:
                found.append([])
            found[-1].append(one)
        return found


class ColumnFile(NamedTuple):
    """Description of a step's file of per-token columns: path, size, digest of its end, byte offset of each
    array. With it a rank verifies that it sees rank 0's complete file, and reads single responses."""

    path: Path
    size: int
    """Bytes."""
    tail: str
    """SHA-256 of its last bytes, which in a zip file hold the CRC-32 of every member."""
    columns: dict[str, tuple[int, str]]
    """For each array the byte offset of its first value and its numpy dtype string."""


@dataclass(frozen=True)
class StepHeader:
    """A step's batch without per-token columns, about 50 bytes per response: group headers, sampling metrics,
    and the file of the columns. Rank 0 broadcasts it; equal on every rank. Holds no advantages and no packs.
    """

    groups: tuple[GroupHeader, ...]
    metrics: dict[str, float | None]
    file: ColumnFile
