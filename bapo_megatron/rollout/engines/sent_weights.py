"""Verification of a weight sync: each engine's tensor digests against those of the weights that were sent.

A digest is a hash. The trainer computes those that an engine must report while it sends the weights; the
engine pool compares. Engines that all lack the same tensor agree with each other: only the trainer's digests
show it. Used in this folder, ``rollout/engines/sglang/`` and ``rollout/weight_sync/``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from bapo_megatron.rollout.engines.digest_quorum import DigestMismatch

if TYPE_CHECKING:
    from torch import Tensor

FILE_NAME = "sent_digests.json"
"""The file of the digests in a folder of weights."""
_NO_WEIGHTS = ("cos_sin_cache", "cos_cache", "sin_cache", "inv_freq")
"""Parts of the names of buffers that an engine computes itself, such as RoPE tables."""
_NAMED = 3
"""Most tensors that a message names."""


class TensorDigests(str):
    """An engine's digest of all its weights (the string), with that of each tensor on each of its ranks.

    Made by ``SglangServer`` from the answer of its server.
    """

    ranks: Sequence[Mapping[str, str]]

    def __new__(cls, digest: str, ranks: Sequence[Mapping[str, str]]) -> TensorDigests:
        """``digest``: of all weights together."""
        made = super().__new__(cls, digest)
        made.ranks = ranks
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle support: it may be sent to another process."""
        return TensorDigests, (str(self), self.ranks)


@dataclass(frozen=True)
class SentDigests:
    """The digests of the sent weights, which an engine must report after it has loaded them.

    Plain data. Weights on disk have them in their folder, others in the call that ends the transfer.
    """

    ranks: tuple[Mapping[str, str], ...] = ()
    """For each of the engine's ranks: its name of each tensor, to the digest."""
    hashed_bytes: int = 0
    unknown: str = ""
    """Why the digests are unknown; empty if they are known."""

    def write(self, folder: Path) -> None:
        """Write the digests into a folder of weights."""
        content = {"ranks": self.ranks, "hashed_bytes": self.hashed_bytes, "unknown": self.unknown}
        (folder / FILE_NAME).write_text(json.dumps(content))

    @classmethod
    def read(cls, folder: Path) -> SentDigests | None:
        """The digests in a folder of weights; None if it has none, because no trainer wrote it."""
        path = folder / FILE_NAME
        if not path.is_file():
            return None
        content: dict[str, Any] = json.loads(path.read_text())
        return cls(tuple(content["ranks"]), content["hashed_bytes"], content["unknown"])


class WeightDigester(Protocol):
    """The streaming hash (protocol) of one version's weights, tensor by tensor, in the engine's layout."""

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a whole tensor by its Hugging Face name. ValueError if its layout on the engine is unknown."""

    def result(self) -> SentDigests:
        """The digests, after the last tensor. ValueError if they are unknown."""


MakeDigester = Callable[[], WeightDigester]


@dataclass(frozen=True)
class UnknownDigests:
    """The ``WeightDigester`` of engines whose digests cannot be computed here, with the reason."""

    reason: str

    def add(self, name: str, tensor: Tensor) -> None:
        """Do nothing."""

    def result(self) -> SentDigests:
        """Unknown digests, with the reason."""
        return SentDigests(unknown=self.reason)


class DigestingIterator:
    """An iterator over weights that computes their digests as they pass; ask ``sent`` after its end.

    A failing digest does not stop it: other ranks take part in the all-gathers. The weight syncs put it
    around the weights that they send.
    """

    def __init__(self, weights: Iterator[tuple[str, Tensor]], make: MakeDigester | None) -> None:
        """``make``: None where nothing is compared."""
        self._weights = weights
        self._digester = make() if make else None
        self._error = ""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """The weights, unchanged."""
        for name, tensor in self._weights:
            if self._digester is not None and not self._error:
                try:
                    self._digester.add(name, tensor)
                except Exception as error:  # of any kind: the weights must reach the engines
                    self._error = str(error) or repr(error)
            yield name, tensor

    def sent(self) -> SentDigests | None:
        """The digests of all weights; None where nothing is compared."""
        if self._digester is None:
            return None
        try:
            return SentDigests(unknown=self._error) if self._error else self._digester.result()
        except Exception as error:
            return SentDigests(unknown=str(error) or repr(error))


class SentCheck:
    """The comparison of engines' digests with the trainer's, one for an engine pool.

    Each reason not to compare is reported once, as an event. Made by ``EnginePool``.
    """

    def __init__(self, report: Callable[..., None]) -> None:
        """``report(kind, **fields)`` records an event."""
        self._report = report
        self._told = set[str]()
        self._has_matched = False

    def is_sent(self, sent: SentDigests | None, engine: str, digest: str) -> bool:
        """Whether an engine has the weights ``sent``; False if unknown, DigestMismatch if it has others.

        Before the first match of any tensor a complete mismatch counts as another hash function, not as other
        weights.
        """
        if sent is None:
            return False
        if reason := sent.unknown or _incomparable(digest, sent):
            self._tell(reason, engine)
            return False
        assert isinstance(digest, TensorDigests)
        found = _DigestDiff.between(sent.ranks, digest.ranks)
        if not self._has_matched and not found.matching:
            self._tell("no tensor's digest matches those sent: the engine uses another hash", engine)
            return False
        if problem := found.problem():
            raise DigestMismatch(f"not the weights that were sent: {problem}")
        if not self._has_matched:
            self._has_matched = True
            size = {"tensors": found.matching, "hashed_bytes": sent.hashed_bytes}
            self._report("digests_compared", engine=engine, ranks=len(sent.ranks), **size)
        if found.unknown:
            self._tell(f"tensors that were not sent: {_some(found.unknown)}", engine)
        return not found.unknown

    def _tell(self, reason: str, engine: str) -> None:
        if reason not in self._told:
            self._told.add(reason)
            self._report("digests_not_compared", engine=engine, reason=reason)


@dataclass(frozen=True)
class _DigestDiff:
    """The difference of sent and reported digests: names with their ranks, and the number of equal ones."""

    matching: int
    differing: list[str]
    missing: list[str]
    """Sent, but not on the engine."""
    unknown: list[str]
    """On the engine, but not sent."""

    @classmethod
    def between(cls, sent: Sequence[Mapping[str, str]], found: Sequence[Mapping[str, str]]) -> _DigestDiff:
        pairs = list(enumerate(zip(sent, found, strict=True)))
        common = [
            (name, rank, ours[name] == theirs[name])
            for rank, (ours, theirs) in pairs
            for name in sorted(ours.keys() & theirs.keys())
        ]
        return cls(
            sum(equal for *_, equal in common),
            [f"{name} on rank {rank}" for name, rank, equal in common if not equal],
            [
                f"{name} on rank {rank}"
                for rank, (ours, theirs) in pairs
                for name in sorted(ours.keys() - theirs.keys())
            ],
            [
                f"{name} on rank {rank}"
                for rank, (ours, theirs) in pairs
                for name in sorted(theirs.keys() - ours.keys())
                if not any(part in name for part in _NO_WEIGHTS)
            ],
        )

    def problem(self) -> str:
        """The mismatch in words; empty if there is none."""
        parts = []
        if self.differing:
            parts.append(f"other values in {_some(self.differing)}")
        if self.missing:
            parts.append(f"without {_some(self.missing)}")
        return "; ".join(parts)


def _incomparable(digest: str, sent: SentDigests) -> str:
    """Why an engine's digest cannot be compared; empty if it can."""
    if not isinstance(digest, TensorDigests):
        return "the engine reports no digests of single tensors"
    if len(digest.ranks) != len(sent.ranks):
        return f"the engine has {len(digest.ranks)} ranks, and not {len(sent.ranks)}"
    return ""


def _some(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
