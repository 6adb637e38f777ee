"""Streaming tensor hashes: equal to SGLang's on a CPU and on a GPU."""

from __future__ import annotations

import hashlib

import pytest
import torch
from torch import Tensor

from bapo_megatron.rollout.engines.sglang import fused_weights
from bapo_megatron.rollout.engines.sglang.fused_weights import HASHES, CpuHash, GpuHash

# What `gpu_tensor_hash` of SGLang 0.5.23 returns for `pattern`, by triton 3.9.0 with TRITON_INTERPRET=1.
BY_TRITON = {
    (1, "uint8"): "3d93a6540b54ef2a",
    (3, "uint8"): "1d9f0dfb19964121",
    (5, "bfloat16"): "65af05f85dd8b2d6",
    (4096, "float32"): "55f557d10bd261c2",
    (8192, "float32"): "04fae94c7059ae5b",
    (8193, "float32"): "d05c31de9bce8210",
    (30001, "bfloat16"): "70eed263ad33c43c",
    (100000, "bfloat16"): "292edff613e43345",
    (60000, "float32"): "a9c2046a169d92b0",
}


def pattern(size: int, dtype: str) -> Tensor:
    values = torch.arange(size, dtype=torch.int64) * 2654435761 % 251
    return values.to(torch.float32).to(getattr(torch, dtype))


def literal(data: bytes, seed: int = 0x243F6A88) -> str:
    """The formula, with Python's integers, word by word."""
    full = 2**32 - 1

    def fmix(x: int) -> int:
        x = (x ^ (x >> 16)) * 0x85EBCA6B & full
        x = (x ^ (x >> 13)) * 0xC2B2AE35 & full
        return x ^ (x >> 16)

    def rotated(x: int, by: int) -> int:
        return (x << by | x >> (32 - by)) & full

    data += bytes(-len(data) % 4)
    words = [int.from_bytes(data[at : at + 4], "little") for at in range(0, len(data), 4)]
    variants = (0x27D4EB2D, 15, seed), (0x165667B1, 13, (seed * 0x9E3779B1 ^ 0xDEADBEEF) & full)
    total = 0
    for tile in range(0, len(words), 8192):
        halves = []
        for factor, by, start in variants:
            mixed = (
                fmix(word ^ ((place * factor + start & full) ^ rotated(place, by)))
                for place, word in enumerate(words[tile : tile + 8192], tile)
            )
            halves.append(fmix(sum(mixed) & full ^ len(data)))
        total += halves[0] << 32 | halves[1]
    total &= 2**64 - 1
    total = (total ^ total >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    total = (total ^ total >> 27) * 0x94D049BB133111EB % 2**64
    return f"{total ^ total >> 31:016x}"


def bytes_of(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(("case", "expected"), BY_TRITON.items(), ids=str)
def test_the_gpu_hash_equals_sglangs_kernel(case: tuple[int, str], expected: str) -> None:
    tensor = pattern(*case)
    for cut in (0, len(tensor) // 3):
        found = GpuHash()
        found.add(tensor[:cut])
        found.add(tensor[cut:])
        assert found.digest() == expected
    assert literal(bytes_of(tensor)) == expected


@pytest.mark.parametrize("device", HASHES)
def test_the_hash_does_not_depend_on_the_pieces(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_weights, "_CHUNK", 40_000)  # more than a tile, and not whole tiles
    whole = torch.randn(301, 203, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    left = whole[:, :101]  # not contiguous
    reference = literal if device == "cuda" else lambda data: hashlib.sha256(data).hexdigest()[:16]
    for tensor, pieces in (
        (whole, [whole[:1], whole[1:150], whole[150:]]),
        (whole, [one for row in whole[:3] for one in row.split(7)] + [whole[3:]]),
        (left, [left[:200], left[200:]]),
        (whole.view(-1)[1:], [whole.view(-1)[1:]]),  # words that do not begin at a multiple of four bytes
        (whole[:0], [whole[:0]]),
    ):
        found = HASHES[device]()
        for piece in pieces:
            found.add(piece)
        assert found.digest() == (
            reference(bytes_of(tensor)) if tensor.numel() or device == "cpu" else "0" * 16
        )


def test_the_cpu_hash_is_eight_bytes_of_sha_256() -> None:
    found = CpuHash()
    found.add(torch.tensor([97, 98, 99], dtype=torch.uint8))
    assert found.digest() == "ba7816bf8f01cfea"  # FIPS 180-2's example, "abc"


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than a chunk and the rest of a tile is mixed at a time."""
    mixed = []
    monkeypatch.setattr(GpuHash, "_sum", lambda _self, words_TW: mixed.append(words_TW.numel()))
    found = GpuHash()
    found.add(torch.zeros(5 * 2**20))
    assert sum(mixed) == 5 * 2**20
    assert max(mixed) <= 257 * fused_weights.TILE_WORDS


@pytest.mark.parametrize("device", HASHES)
def test_a_hashed_tensor_s_storage_can_still_be_resized(device: str) -> None:
    """The policy's offload resizes the storages that the tensors are views of."""
    weight = torch.zeros(20_000)
    found = HASHES[device]()
    found.add(weight[:9000])
    found.digest()
    weight.untyped_storage().resize_(0)
    assert weight.untyped_storage().nbytes() == 0
