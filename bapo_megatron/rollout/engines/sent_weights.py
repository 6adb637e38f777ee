"""Verification of a weight sync: digests (hashes) of each engine's tensors, compared with those sent.

The trainer's rank 0 wraps its weights in a ``DigestingIterator`` and gets ``SentDigests``. In the sampler
process ``DigestQuorum`` compares each engine's digest with them before the engine samples, and raises
DigestMismatch. If the sent ones are unknown, it compares engines with each other, and misses shared errors.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

FILE_NAME = "sent_digests.json"
"""Digest file in a weight folder."""
_NO_WEIGHTS = ("cos_sin_cache", "cos_cache", "sin_cache", "inv_freq", "axis_map", "gemma_weight")
"""Name parts of buffers that an engine computes itself: RoPE tables, and 1 + w of a norm's weight."""
_NAMED = 3


class TensorDigests(str):
    """An engine's digest of all its weights, a ``str``, with each tensor's digest: ``ranks[rank][name]``."""

    ranks: Sequence[Mapping[str, str]]

    def __new__(cls, digest: str, ranks: Sequence[Mapping[str, str]]) -> TensorDigests:
        made = super().__new__(cls, digest)
        made.ranks = ranks
        return made


@dataclass(frozen=True)
class SentDigests:
    """Digests that each engine must report after a load, by engine rank and tensor name, or why they are
    unknown. ``write`` stores them in a weight folder; other transports send them after the weights."""

    ranks: tuple[Mapping[str, str], ...] = ()
    """For each engine rank, tensor digests by the engine's tensor name."""
    hashed_bytes: int = 0
    unknown: str = ""
    """Why the digests are unknown; empty if they are known."""

    def write(self, folder: Path) -> None:
        content = {"ranks": self.ranks, "hashed_bytes": self.hashed_bytes, "unknown": self.unknown}
        (folder / FILE_NAME).write_text(json.dumps(content))

    @classmethod
    def read(cls, folder: Path) -> SentDigests | None:
        """Read the digests in a weight folder; None if it has none (no trainer wrote it)."""
        path = folder / FILE_NAME
        if not path.is_file():
            return None
        content: dict[str, Any] = json.loads(path.read_text())
        return cls(tuple(content["ranks"]), content["hashed_bytes"], content["unknown"])


class WeightDigester(Protocol):
    """Protocol of a hasher of one weight version in the engines' tensor layout: ``add`` each Hugging Face
    tensor, then ``result`` returns the ``SentDigests``."""

    def add(self, name: str, tensor: Tensor) -> None:
        """Add an unsharded tensor by its Hugging Face name. Raises ValueError if its layout is unknown."""

    def result(self) -> SentDigests:
        """Return the digests after the last tensor. Raises ValueError if they are unknown."""


MakeDigester = Callable[[], WeightDigester]
"""Factory of the ``WeightDigester`` of one weight version."""


@dataclass(frozen=True)
class UnknownDigests:
    """``WeightDigester`` without digests: its ``result`` says that they are unknown, for ``reason``."""

    reason: str

    def add(self, name: str, tensor: Tensor) -> None:
        pass

    def result(self) -> SentDigests:
        return SentDigests(unknown=self.reason)


class DigestingIterator:
    """Iterable of (name, tensor) that hashes the tensors it yields; ``sent`` then returns their digests. A
    failing hash only makes these unknown: the iteration is an all-gather in which other ranks take part."""

    def __init__(self, weights: Iterator[tuple[str, Tensor]], make: MakeDigester | None) -> None:
        self._weights = weights
        self._digester = make() if make else None
        self._error = ""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._weights:
            if self._digester is not None and not self._error:
                try:
                    self._digester.add(name, tensor)
                except Exception as error:  # any error: the weights must reach the engines
                    self._error = str(error) or repr(error)
            yield name, tensor

    def sent(self) -> SentDigests | None:
        """Return the digests of all weights; None if there is no digester."""
        if self._digester is None:
            return None
        try:
            return SentDigests(unknown=self._error) if self._error else self._digester.result()
        except Exception as error:
            return SentDigests(unknown=str(error) or repr(error))


class DigestMismatch(RuntimeError):
    """An engine's weights differ from those sent, or from the other engines' weights: it must not sample."""


class SentCheck:
    """Comparison of engines' digests with the sent ones, for ``DigestQuorum``: ``is_sent`` returns True if
    they are equal, False if it cannot tell, and raises DigestMismatch if they differ. The first match, and
    once each reason why it cannot tell, are reported as run events."""

    def __init__(self, report: Callable[..., None]) -> None:
        self._report = report
        self._told = set[str]()
        self._has_matched = False

    def is_sent(self, sent: SentDigests | None, engine: str, digest: str) -> bool:
        """Return whether an engine is known to have the weights ``sent``. Raises DigestMismatch if it has
        others; if no tensor matches and no engine ever matched, it must use another hash: returns False."""
        if sent is None:
            return False
        if reason := sent.unknown or _incomparable(digest, sent):
            self._tell(reason, engine)
            return False
        assert isinstance(digest, TensorDigests)
        matching, differing, unknown = _compared(sent.ranks, digest.ranks)
        if not self._has_matched and not matching:
            self._tell("no tensor's digest matches those sent: the engine uses another hash", engine)
            return False
        if differing:
            raise DigestMismatch(f"not the weights that were sent: other values in {_some(differing)}")
        if not self._has_matched:
            self._has_matched = True
            size = {"tensors": matching, "hashed_bytes": sent.hashed_bytes}
            self._report("digests_compared", engine=engine, ranks=len(sent.ranks), **size)
        if unknown:
            self._tell(f"tensors that were not sent: {_some(unknown)}", engine)
        return not unknown

    def _tell(self, reason: str, engine: str) -> None:
        if reason not in self._told:
            self._told.add(reason)
            self._report("digests_not_compared", engine=engine, reason=reason)


def _compared(
    sent: Sequence[Mapping[str, str]], reported: Sequence[Mapping[str, str]]
) -> tuple[int, list[str], list[str]]:
    """Return the number of equal digests, the tensors ("NAME on rank R") with another digest on the engine or
    none, and those on the engine that were not sent."""
    matching, differing, unknown = 0, list[str](), list[str]()
    for rank, (ours, theirs) in enumerate(zip(sent, reported, strict=True)):
        for name in sorted(ours.keys() | theirs.keys()):
            if name not in ours:
                if not any(part in name for part in _NO_WEIGHTS):
                    unknown.append(f"{name} on rank {rank}")
            elif ours[name] != theirs.get(name):
                differing.append(f"{name} on rank {rank}")
            else:
                matching += 1
    return matching, differing, unknown


def _incomparable(digest: str, sent: SentDigests) -> str:
    if not isinstance(digest, TensorDigests):
        return "the engine reports no digests of single tensors"
    if len(digest.ranks) != len(sent.ranks):
        return f"the engine has {len(digest.ranks)} ranks, and not {len(sent.ranks)}"
    return ""


def _some(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


IsSent = Callable[[str, str], bool]
"""``SentCheck.is_sent`` of one version: (engine name, digest) to whether these are the sent weights."""


class DigestQuorum:
    """Check of the engines' digests of one weight version, in the engine pool's event loop.

    For each engine call ``expect`` before its load; ``confirm`` with its digest, which returns if the digest
    is right and raises DigestMismatch if not; ``release`` after the load or its error. The right digest is
    that of the sent weights or, if unknown, the first that two engines report. An engine alone with its
    digest waits for those that still load, and is right if no other digest arrives. If no two agree, none is
    right, and all must load again.
    """

    def __init__(self, wait_s: float, is_sent: IsSent | None = None) -> None:
        """``wait_s``: longest wait for engines that still load."""
        self._wait_s = wait_s
        self.is_sent = is_sent
        self._digest: str | None = None
        self._reported: dict[str, str] = {}
        self._loading: set[str] = set()
        self._changed = asyncio.Condition()

    def expect(self, engine: str) -> None:
        """Note that the engine begins to load, so that others wait for its digest."""
        self._loading.add(engine)
        self._reported.pop(engine, None)

    def withdraw(self, engine: str) -> None:
        """Remove the digest of an engine that failed after its report."""
        self._reported.pop(engine, None)

    async def release(self, engine: str) -> None:
        """Note that the engine's load has ended, with or without a digest."""
        self._loading.discard(engine)
        async with self._changed:
            self._changed.notify_all()

    async def confirm(self, engine: str, digest: str) -> None:
        """Report the engine's ``digest``; return once it is known to be right, or raise DigestMismatch."""
        if self.is_sent is not None and self.is_sent(engine, digest):
            self._digest = digest
        self._reported[engine] = digest
        if self._digest is None and list(self._reported.values()).count(digest) > 1:
            self._digest = digest
        await self.release(engine)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._wait_s), self._changed:
                await self._changed.wait_for(lambda: self._digest or not self._loading)
        if self._digest is None and set(self._reported.values()) == {digest}:
            self._digest = digest
        if self._digest != digest:
            reported = ", ".join(
                f"{name}: {reported_digest[:12]}" for name, reported_digest in self._reported.items()
            )
            raise DigestMismatch(f"the engines have different weights: {reported}")
