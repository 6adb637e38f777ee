"""The host copies of a checkpoint's tensors: in blocks, each with a storage of its own size."""

from __future__ import annotations

import ctypes
import io
import mmap
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from bapo_megatron.policy import background_save
from bapo_megatron.policy.background_save import BLOCK, fork_reads, staged


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor is taken for a GPU's."""
    monkeypatch.setattr(background_save, "is_on_host", lambda _: False)


@pytest.fixture
def allocated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each allocation of host memory."""
    sizes: list[int] = []
    empty = torch.empty

    def counted(size: int, **named: Any) -> Tensor:
        sizes.append(size)
        return empty(size, **named)

    monkeypatch.setattr(torch, "empty", counted)
    return sizes


def copies_of(tensors: list[Tensor]) -> list[Tensor]:
    half = len(tensors) // 2
    parts = [
        [(f"item {number}", one) for number, one in enumerate(some)]
        for some in (tensors[:half], tensors[half:])
    ]
    buckets = staged([(f"file {n}", f"key {n}", (["object"], part)) for n, part in enumerate(parts)])
    assert [(file, key, objects) for file, key, (objects, _) in buckets] == [
        ("file 0", "key 0", ["object"]),
        ("file 1", "key 1", ["object"]),
    ]
    assert [item for _, _, (_, copies) in buckets for item, _ in copies] == [
        item for part in parts for item, _ in part
    ]
    return [one for _, _, (_, copies) in buckets for _, one in copies]


@pytest.mark.usefixtures("on_gpu")
def test_copies_are_equal_and_a_writer_pickles_no_more_than_each() -> None:
    generator = torch.Generator().manual_seed(1)
    tensors = [
        torch.randn(3, 5, generator=generator),
        torch.randn(7, generator=generator, dtype=torch.bfloat16),
        torch.randn(64, 32, generator=generator)[:, 3:9],  # of a larger storage, and not contiguous
        torch.tensor(4.5),
        torch.empty(0, 8),
        torch.arange(5),
    ]
    before = [one.clone() for one in tensors]
    copies = copies_of(tensors)
    for one in tensors:
        one.zero_()
    for copy, value in zip(copies, before, strict=True):
        assert copy.dtype == value.dtype
        assert torch.equal(copy, value)
        assert copy.untyped_storage().nbytes() == value.numel() * value.element_size()
        written = io.BytesIO()
        torch.save(copy, written)
        assert torch.equal(torch.load(io.BytesIO(written.getvalue())), value)
        assert len(written.getvalue()) < 4096


@pytest.mark.usefixtures("on_gpu")
def test_blocks_take_little_more_than_their_tensors(
    allocated: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One allocation each, rounded up to a power of two as pinned memory is, would take 1.8 times as much."""
    monkeypatch.setattr(background_save, "BLOCK", 2**16)
    tensors = [torch.zeros(n) for n in 40 * [17 * 256, 17 * 64, 17 * 16]]  # 17, 4.25 and 1.06 KiB
    tensors.insert(0, torch.zeros(2**16 + 1))  # larger than a block, and just above a power of two
    copies_of(tensors)
    whole = sum(one.nbytes for one in tensors)
    assert sorted(set(allocated)) == [2**16, 2**19]
    assert whole <= sum(allocated) < 1.15 * whole
    assert BLOCK == 2**28


def test_tensors_on_the_host_are_not_copied(allocated: list[int]) -> None:
    tensors = [torch.ones(3), torch.ones(4)]
    assert all(copy is one for copy, one in zip(copies_of(tensors), tensors, strict=True))
    assert not allocated


def test_copies_are_pageable_where_a_fork_cannot_read_pinned_memory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    memory = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert fork_reads(address)
    libc = ctypes.CDLL(None)
    assert libc.madvise(ctypes.c_void_p(address), mmap.PAGESIZE, mmap.MADV_DONTFORK) == 0
    assert not fork_reads(address)

    with monkeypatch.context() as patched:  # an exception: the fork must not go on as a second trainer
        patched.delattr(ctypes, "string_at")
        number = os.getpid()
        try:
            reads = fork_reads(address)
        finally:
            if os.getpid() != number:
                os._exit(0)
        assert not reads
    pinned = SimpleNamespace(data_ptr=lambda: address)
    monkeypatch.setattr(background_save, "has_cuda", lambda: True)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: pinned)
    assert not background_save._pins.__wrapped__()
    assert "a fork of this process cannot read pinned memory" in capsys.readouterr().err
