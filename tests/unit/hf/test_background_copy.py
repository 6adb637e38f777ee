"""The thread that writes weights while the caller continues."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from bapo_megatron.hf import weight_stream
from bapo_megatron.hf.weight_stream import BackgroundCopy, write_shards


class Kept:
    """A sink that keeps everything, and may be slow or fail."""

    def __init__(self) -> None:
        self.tensors: dict[str, list[int]] = {}
        self.ended = ""
        self.gate = threading.Event()
        self.gate.set()
        self.fails_at: str | None = None
        self._name = ""

    def begin(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self._name = name
        self.tensors[name] = []

    def append(self, bytes_B: Tensor) -> None:
        assert self.gate.wait(20)
        if self._name == self.fails_at:
            raise OSError(28, "No space left on device")
        self.tensors[self._name] += bytes_B.tolist()

    def close(self) -> None:
        self.ended = "whole"

    def abandon(self) -> None:
        self.ended = "abandoned"


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_stream, "CHUNK_BYTES", 4)
    monkeypatch.setattr(weight_stream, "CHUNKS", 3)


def test_tensors_come_in_order_and_whole_through_few_buffers() -> None:
    kept = Kept()
    with BackgroundCopy(kept) as copy:
        copy.add("a", torch.arange(10, dtype=torch.uint8))  # 4, 4 and 2 bytes
        copy.add("none", torch.zeros(0))
        copy.add("b", torch.arange(6, dtype=torch.uint8).view(2, 3).T)
        copy.add("c", torch.tensor(7.0))
    assert kept.tensors["a"] == list(range(10))
    assert kept.tensors["none"] == []
    assert kept.tensors["b"] == [0, 3, 1, 4, 2, 5]
    assert torch.tensor(kept.tensors["c"], dtype=torch.uint8).view(torch.float32).item() == 7.0
    assert (list(kept.tensors), kept.ended) == (["a", "none", "b", "c"], "whole")


def test_a_tensor_may_change_when_it_was_added() -> None:
    """As gathered weights do, whose memory is used again."""
    kept, value = Kept(), torch.full((8,), 5, dtype=torch.uint8)
    kept.gate.clear()  # nothing is written before
    with BackgroundCopy(kept) as copy:
        copy.add("a", value)
        value.fill_(9)
        kept.gate.set()
    assert kept.tensors["a"] == [5] * 8


def test_the_caller_goes_on_until_all_buffers_are_full() -> None:
    kept = Kept()
    kept.gate.clear()
    opener = threading.Timer(0.3, kept.gate.set)
    with BackgroundCopy(kept) as copy:
        copy.add("a", torch.ones(12, dtype=torch.uint8))  # three buffers: does not wait
        assert not kept.gate.is_set()
        opener.start()
        copy.add("b", torch.ones(4, dtype=torch.uint8))  # waits for one of them
        assert kept.gate.is_set()
        assert copy._made == 3
    assert len(kept.tensors["b"]) == 4


def test_an_error_of_the_sink_is_the_callers() -> None:
    kept = Kept()
    kept.fails_at = "a"
    with pytest.raises(OSError, match="No space left"), BackgroundCopy(kept) as copy:
        for _ in range(100):
            copy.add("a", torch.ones(40, dtype=torch.uint8))  # more than the buffers: they are given back
    assert kept.ended == "abandoned"


def test_an_error_of_the_caller_leaves_no_whole_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"weight b is of torch\.int64"):
        write_shards([("a", torch.ones(50)), ("b", torch.zeros(1, dtype=torch.int64))], tmp_path)
    [file] = tmp_path.iterdir()
    with pytest.raises(Exception, match=r"(?i)header"):
        load_file(file)
