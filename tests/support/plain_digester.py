"""Digests of sent weights under their own names."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from torch import Tensor

from bapo_megatron.rollout.engines.sent_weights import SentDigests


class PlainDigester:
    """A ``WeightDigester`` of engines that hold each tensor as it was sent, on one rank."""

    def __init__(self) -> None:
        self._digests: dict[str, str] = {}
        self._bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        self._digests[name] = hashlib.sha256(str(tensor.tolist()).encode()).hexdigest()
        self._bytes += tensor.nbytes

    def result(self) -> SentDigests:
        return SentDigests((self._digests,), self._bytes)


def plain_digests(weights: Iterable[tuple[str, Tensor]]) -> SentDigests:
    """Those of ``weights``."""
    digester = PlainDigester()
    for name, tensor in weights:
        digester.add(name, tensor)
    return digester.result()
