"""Memory handles of a GPU, on a played one: readers, order, allocator.

That SGLang's own unpickler reads the handles: tests/contract/test_released_memory.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing import reductions

from bapo_megatron.rollout.weight_sync import ipc
from bapo_megatron.rollout.weight_sync.ipc import handles_of, shareable


class Gpu:
    """A fake of torch's GPU memory sharing: reference counters and devices."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.counts: dict[tuple[bytes, int], int] = {}
        """Reference counts by file and offset of the counter."""
        self.calls: list[str] = []
        ipc._dummy_counter.cache_clear()
        patch.setattr(reductions, "reduce_tensor", self._share)
        patch.setattr(torch.UntypedStorage, "_release_ipc_counter_cuda", self.lower, raising=False)
        patch.setattr(torch.cuda, "get_device_properties", lambda n: SimpleNamespace(uuid=f"uuid of {n}"))
        patch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=self._synchronize))
        patch.setattr(torch, "empty", lambda *_, device, **__: SimpleNamespace(is_cuda=True, device=device))

    def _share(self, tensor: Any) -> tuple[Any, tuple[Any, ...]]:
        self.calls.append("share")
        place = b"counters", len(self.counts)
        self.counts[place] = 1
        values = {name: f"{name} of torch" for name in ipc._ARGUMENTS}
        values |= {"storage_device": tensor.device.index, "event_sync_required": True}
        values |= {"ref_counter_handle": place[0], "ref_counter_offset": place[1]}
        return reductions.rebuild_cuda_tensor, tuple(values.values())

    def lower(self, handle: bytes, offset: int) -> None:
        self.counts[handle, offset] -= 1

    def _synchronize(self) -> None:
        self.calls.append("synchronize")


def test_a_dead_reader_cannot_leak_gpu_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own count is released; readers decrement the dummy counter, whose memory is never freed."""
    gpu = Gpu(monkeypatch)
    tensor: Any = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 3))
    found = []
    for _ in range(3):
        rebuild, arguments = ipc._reduced(tensor)
        assert rebuild is reductions.rebuild_cuda_tensor
        found.append(dict(zip(ipc._ARGUMENTS, arguments, strict=True)))
    shared = {(one["ref_counter_handle"], one["ref_counter_offset"]) for one in found}
    assert len(shared) == 1
    assert {place: count for place, count in gpu.counts.items() if place not in shared} == {
        (b"counters", n): 0 for n in (0, 2, 3)
    }
    assert ipc._dummy_counter.cache_info().currsize == 1
    for one in found:
        own = {"ref_counter_handle", "ref_counter_offset", "storage_device", "event_sync_required"}
        assert one["storage_device"] == "uuid of 3"
        assert one["event_sync_required"] is False, "each reader would open an event, and never close it"
        assert all(one[name] == f"{name} of torch" for name in ipc._ARGUMENTS if name not in own)


def test_the_stream_is_synchronized_before_handles_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers wait for no event, so the bytes must be there first."""
    gpu = Gpu(monkeypatch)

    class Written:
        def __init__(self, _file: object) -> None: ...

        def dump(self, named: list[Any]) -> None:
            gpu.calls.append(f"dump {len(named)}")

    monkeypatch.setattr(ipc, "_HandlePickler", Written)
    tensor = SimpleNamespace(is_cuda=True, detach=lambda: None)
    handles_of([("a", tensor), ("b", tensor)])  # type: ignore[list-item]
    assert gpu.calls == ["synchronize", "dump 2"]


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("PYTORCH_ALLOC_CONF", "expandable_segments:True", ["expandable_segments:False", None]),
        (
            "PYTORCH_CUDA_ALLOC_CONF",
            "max_split_size_mb:64,expandable_segments:True",
            ["max_split_size_mb:64,expandable_segments:False", None],
        ),
        ("PYTORCH_ALLOC_CONF", "max_split_size_mb:64", []),
    ],
)
def test_shareable_memory_is_in_no_expandable_segment(
    variable: str, value: str, told: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The allocator's setting is changed, and restored."""
    said: list[str] = []
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, value)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", said.append)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: said.append("memory"))
    shareable(8, torch.device("cuda", 0))
    between = [one or value for one in told]
    assert said == [*between[:1], "memory", *between[1:]]
