"""Buckets of weights: sizes by hand, round trip, double buffering, memory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from bapo_megatron.rollout.weight_sync.buckets import Buckets
from bapo_megatron.rollout.weight_sync.ipc import shareable

CPU = torch.device("cpu")


def numbered(name: str, count: int, dtype: torch.dtype = torch.float32) -> tuple[str, Tensor]:
    return name, torch.arange(count).to(dtype)


DTYPES = {"f": torch.float32, "h": torch.bfloat16, "b": torch.uint8}


def made_of(text: str) -> list[tuple[str, Tensor]]:
    """Tensors by words of name, count and dtype: ``a3f``."""
    return [numbered(one[0], int(one[1:-1]), DTYPES[one[-1]]) for one in text.split()]


@pytest.mark.parametrize(
    ("weights", "size", "buckets"),
    [
        ("a3f b2f c1f", 20, [("ab", 20), ("c", 4)]),  # filled to the last byte; the next 4 would be 24
        ("a3f b3f c1f", 20, [("a", 12), ("bc", 16)]),  # receivers may rely on the order
        ("a1f L6f b1f e4f", 16, [("a", 4), ("L", 24), ("b", 4), ("e", 16)]),  # L alone, without a copy
        # 2 x 2 = 4 bytes, aligned for float32: 4 + 8 = 12; 3 x 2 more = 18, which is not: a new bucket.
        ("a2h b2f c3h d1f e1b f1h", 100, [("abc", 18), ("de", 5), ("f", 2)]),
        ("", 8, []),
    ],
)
def test_tensors_are_cut_into_buckets(weights: str, size: int, buckets: list[tuple[str, int]]) -> None:
    tensors, found = made_of(weights), []
    for bucket in Buckets(size, CPU).cut(tensors):
        found.append(("".join(bucket.spec.names), bucket.spec.nbytes))
        assert bucket.is_borrowed == (bucket.spec.names == ("L",))
        if bucket.is_borrowed:
            assert bucket.payload_B.data_ptr() == dict(tensors)["L"].data_ptr()
    assert found == buckets


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("size", [1, 8, 20, 64, 1000])
def test_every_tensor_round_trips_at_any_bucket_size(size: int, is_shared: bool) -> None:
    """In shared memory, for handles, a tensor that is larger than a bucket has a buffer of its own."""
    torch.manual_seed(0)
    weights = {
        "a": torch.randn(3, 5),
        "transposed": torch.randn(4, 2).T,
        "half": torch.randn(7).bfloat16(),
        "b": torch.randn(6),
        "scalar": torch.randn(()),
        "empty": torch.zeros(0),
    }
    found: dict[str, Tensor] = {}
    buckets = Buckets(size, CPU, partial(shareable, device=CPU) if is_shared else None)
    for bucket in buckets.cut(weights.items()):
        found |= {name: tensor.clone() for name, tensor in bucket.tensors()}
        assert not (is_shared and bucket.is_borrowed)
    assert list(found) == list(weights)
    for name, tensor in weights.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)


def test_memory_is_bounded_by_two_buffers() -> None:
    made: list[int] = []

    def allocate(nbytes: int) -> Tensor:
        made.append(nbytes)
        return shareable(nbytes, CPU)

    one = torch.zeros(4)
    cutter = Buckets(16, CPU, allocate)
    for _ in range(3):
        assert len(list(cutter.cut((str(n), one) for n in range(10)))) == 10
    assert made == [16, 16]
    cutter.release()
    assert len(list(cutter.cut([("a", one)]))) == 1
    assert made == [16, 16, 16]


def test_an_aborted_push_leaves_no_tensor_in_the_buffers() -> None:
    cutter = Buckets(100, CPU)
    whole = cutter.cut([numbered("a", 3), numbered("b", 30)])
    next(whole)
    [found] = cutter.cut([numbered("d", 2)])
    assert found.spec.names == ("d",)
    assert dict(found.tensors())["d"].tolist() == [0, 1]


@pytest.mark.parametrize("fails_at", [0, 1])
def test_a_failed_copy_is_raised_at_the_end_of_the_bucket(fails_at: int) -> None:
    """All ranks gather the next tensor: one that stopped at once would leave the others waiting."""
    gathered: list[str] = []
    calls = 0

    def no_memory(nbytes: int) -> Tensor:
        nonlocal calls
        calls += 1
        if calls > fails_at:
            raise MemoryError("no room for a bucket")
        return torch.empty(nbytes, dtype=torch.uint8)

    def weights() -> Iterator[tuple[str, Tensor]]:
        for name in "abcdefgh":
            gathered.append(name)
            yield numbered(name, 4)

    cut = Buckets(3 * 16, CPU, no_memory).cut(weights())  # of three tensors; the next is gathered before
    for _ in range(fails_at):
        next(cut)
    with pytest.raises(MemoryError, match="no room for a bucket"):
        next(cut)
    assert len(gathered) == 3 * (fails_at + 1) + 1
