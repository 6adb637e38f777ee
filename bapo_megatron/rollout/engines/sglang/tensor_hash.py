"""Streaming tensor hashes, equal to those of SGLang's `/weights_checker`: a tensor's bytes, piece by piece.

CPU  the first 8 bytes of SHA-256.
GPU  each 32-bit word is mixed with its place and summed by tiles of 8,192 words, in two variants of 32 bits;
     the tiles' sums are mixed with the tensor's size, added up modulo 2^64, and mixed once more. It is that
     of ``sglang/kernels/ops/memory/gpu_tensor_hash.py``, computed with torch's integers where a piece is.

Both take a bounded chunk at a time. Of a GPU's tensor 16 bytes a tile are kept until its size is known.

Shapes (suffix of a name): ``_B`` bytes; ``_TW`` tiles, words of a tile; ``_W`` words; ``_T`` tiles. Used by
``fused_weights.py``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

TILE_WORDS = 8192
_WORD = 4
_TILE = _WORD * TILE_WORDS
_CHUNK = 256 * _TILE
"""Bytes that are hashed at once; a chunk of a GPU's takes a few times as much memory."""
_PLACES = ((0x27D4EB2D, 15), (0x165667B1, 13))
_SEED = 0x243F6A88
_SEEDS = (_SEED, (_SEED * 0x9E3779B1) ^ 0xDEADBEEF)
_MASK32, _MASK64 = 2**32 - 1, 2**64 - 1


class TensorHash(Protocol):
    """The streaming hash of one tensor that comes in pieces (protocol): ``add`` each, then ``digest``."""

    def add(self, piece: Tensor) -> None:
        """Add the next elements, in row-major order."""

    def digest(self) -> str:
        """The digest after all pieces: 16 hexadecimal digits."""


class CpuHash:
    """SGLang's hash of a tensor on a CPU (a ``TensorHash``)."""

    def __init__(self) -> None:
        self._sha = hashlib.sha256()

    def add(self, piece: Tensor) -> None:
        """Add the next elements."""
        for chunk_B in _chunks(piece):
            # A copy: a storage that numpy has seen cannot be resized any more, which the offload does.
            self._sha.update(chunk_B.to("cpu", copy=True).numpy().data)

    def digest(self) -> str:
        """The first 8 bytes of SHA-256."""
        return self._sha.hexdigest()[:16]


class GpuHash:
    """SGLang's hash of a tensor on a GPU (a ``TensorHash``), equal wherever its pieces are."""

    def __init__(self) -> None:
        self._rest_B: Tensor | None = None
        """Bytes after the last whole tile."""
        self._words = 0
        """Number of words in the sums."""
        self._sums: list[tuple[Tensor, Tensor]] = []
        """Sums of tiles, in both variants."""

    def add(self, piece: Tensor) -> None:
        """Add the next elements."""
        for chunk_B in _chunks(piece):
            run_B = chunk_B if self._rest_B is None else torch.cat([self._rest_B, chunk_B])
            whole = len(run_B) // _TILE * _TILE
            self._rest_B = run_B[whole:].clone() if whole < len(run_B) else None
            if whole:
                self._sum(_words(run_B[:whole]).view(-1, TILE_WORDS))

    def digest(self) -> str:
        """The hash of all pieces."""
        if self._rest_B is not None:
            padded_B = torch.nn.functional.pad(self._rest_B, (0, -len(self._rest_B) % _WORD))
            self._sum(_words(padded_B).view(1, -1))
            self._rest_B = None
        if not self._words:
            return f"{0:016x}"
        size = _signed(_WORD * self._words)
        high_T, low_T = (
            _mixed(torch.cat(sums).to(torch.int32) ^ size).long() for sums in zip(*self._sums, strict=True)
        )
        total = int(((high_T << 32) | (low_T & _MASK32)).sum())
        return f"{_mixed64(total & _MASK64):016x}"

    def _sum(self, words_TW: Tensor) -> None:
        """Add the sums of the next tiles."""
        first, count = self._words, words_TW.numel()
        places_TW = torch.arange(first, first + count, device=words_TW.device).to(torch.int32)
        places_TW = places_TW.view(words_TW.shape)
        sums = []
        for (factor, turn), seed in zip(_PLACES, _SEEDS, strict=True):
            place_TW = (places_TW * _signed(factor) + _signed(seed)) ^ _rotated(places_TW, turn)
            sums.append(_mixed(words_TW ^ place_TW).sum(dim=1, dtype=torch.int64) & _MASK32)
        self._sums.append((sums[0], sums[1]))
        self._words += count


HASHES: dict[str, Callable[[], TensorHash]] = {"cpu": CpuHash, "cuda": GpuHash}
"""The hash by the kind of device that the server computes on."""


def _chunks(piece: Tensor) -> Iterator[Tensor]:
    """The bytes of a tensor in order, in chunks of bounded size; a strided tensor is copied by chunks."""
    piece = piece.detach()
    if not piece.is_contiguous() and piece.dim() > 1:
        rows = max(1, _CHUNK // max(1, piece[0].numel() * piece.itemsize))
        for part in piece.split(rows):
            yield from _chunks(part.contiguous())
        return
    if piece.numel():
        yield from piece.contiguous().view(-1).view(torch.uint8).split(_CHUNK)


def _words(run_B: Tensor) -> Tensor:
    """Bytes as little-endian words, int32: arithmetic modulo 2^32, whatever the sign."""
    if run_B.data_ptr() % _WORD or run_B.storage_offset() % _WORD:
        run_B = run_B.clone()
    return run_B.view(torch.int32)


def _signed(value: int) -> int:
    """The int32 with the bits of ``value`` modulo 2^32."""
    value &= _MASK32
    return value - 2**32 if value >= 2**31 else value


def _shifted(words: Tensor, by: int) -> Tensor:
    """Logical shift: ``words >> by`` of unsigned words."""
    return (words >> by) & ((1 << (32 - by)) - 1)


def _rotated(words: Tensor, by: int) -> Tensor:
    return (words << by) | _shifted(words, 32 - by)


def _mixed(words: Tensor) -> Tensor:
    """The 32-bit finalizer of MurmurHash3."""
    words = words ^ _shifted(words, 16)
    words = words * _signed(0x85EBCA6B)
    words = words ^ _shifted(words, 13)
    words = words * _signed(0xC2B2AE35)
    return words ^ _shifted(words, 16)


def _mixed64(value: int) -> int:
    """The finalizer of splitmix64."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)
