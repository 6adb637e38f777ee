"""Handles of tensors: bytes by which another process of this machine reads the memory that they lie in.

    GPU    CUDA IPC: the handle of the allocation, and the GPU's UUID, whatever number its reader knows it by
    CPU    POSIX shared memory, by its name

They are torch's own pickles of shared tensors, which SGLang loads with a list of allowed names. On a GPU
torch counts the readers, and would keep for good what a reader has that dies. Here the owner knows when its
memory was read, and readers count at a counter that nobody looks at. Nor do they wait for a CUDA event, of
which torch opens one for each handle and closes none: what is shared has been written.
"""

from __future__ import annotations

import inspect
import io
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import get_sharing_strategy, reductions, set_sharing_strategy

from bapo_megatron.runtime.device import ALLOCATOR_VARIABLE, GROWING_SEGMENTS

_OLD_S = 600.0
"""Age of a file in shared memory that no hand-over uses any more."""
_ARGUMENTS = tuple(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
"""Names of what a reader rebuilds a GPU's tensor from."""


def shareable(nbytes: int, device: torch.device) -> Tensor:
    """A tensor of ``nbytes`` bytes (uint8) with any values, which ``handles_of`` can share.

    Not in a growing segment of CUDA's allocator: a process that may not trace this one cannot open it.
    """
    if device.type != "cuda":
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    with _fixed_segments():
        return torch.empty(nbytes, dtype=torch.uint8, device=device)


def handles_of(named: Sequence[tuple[str, Tensor]]) -> bytes:
    """A pickle of names and handles of tensors in ``shareable`` memory, for one reader. It holds no data.

    The memory must exist, and stay as it is, until the reader is done (``ipc.py``).
    """
    if any(tensor.is_cuda for _, tensor in named):
        torch.cuda.current_stream().synchronize()
    written = io.BytesIO()
    with _shared_by_name():
        _HandlePickler(written).dump([(name, tensor.detach()) for name, tensor in named])
    return written.getvalue()


def remove_leftovers(folder: Path = Path("/dev/shm")) -> None:
    """Remove the shared memory of this user's processes that were killed: nothing else frees a CPU's.

    Young files stay: they may be of a process in another namespace of numbers. A hand-over takes less.
    """
    for path in folder.glob("torch_*_*_*"):
        number = path.name.split("_")[1]
        with suppress(OSError):  # another process was faster
            about = path.lstat()
            is_old = time.time() - about.st_mtime > _OLD_S and about.st_uid == os.getuid()
            if is_old and number.isdecimal() and not Path("/proc", number).exists():
                path.unlink()


class _HandlePickler(ForkingPickler):
    """Pickles tensors as handles. A GPU goes by its UUID: its reader may know it by another number."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.dispatch_table = {**self.dispatch_table, Tensor: _reduced}


def _reduced(tensor: Tensor) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
    rebuild, arguments = reductions.reduce_tensor(tensor)
    if not tensor.is_cuda:
        return rebuild, arguments
    named = dict(zip(_ARGUMENTS, arguments, strict=True))
    device = named["storage_device"]
    _release_reader(named["ref_counter_handle"], named["ref_counter_offset"])
    counter = _dummy_counter(device)
    named |= {
        "storage_device": str(torch.cuda.get_device_properties(device).uuid),
        "ref_counter_handle": counter["ref_counter_handle"],
        "ref_counter_offset": counter["ref_counter_offset"],
        "event_sync_required": False,
    }
    return rebuild, tuple(named.values())


def _release_reader(handle: bytes, offset: int) -> None:
    """Count a reader as done, as it would itself."""
    torch.UntypedStorage._release_ipc_counter_cuda(handle, offset)


@cache
def _dummy_counter(device: int) -> dict[str, Any]:
    """The counter of a tensor that is never freed, and lies in no growing segment: it is exported, too."""
    tensor = shareable(4, torch.device("cuda", device))
    _never_freed.append(tensor)
    _, arguments = reductions.reduce_tensor(tensor)
    return dict(zip(_ARGUMENTS, arguments, strict=True))


_never_freed: list[Tensor] = []


@contextmanager
def _shared_by_name() -> Iterator[None]:
    """Share a CPU's memory by its name within the block: a descriptor would have to go over a socket, with a
    key that the reader does not have."""
    before = get_sharing_strategy()
    set_sharing_strategy("file_system")
    try:
        yield
    finally:
        set_sharing_strategy(before)


@contextmanager
def _fixed_segments() -> Iterator[None]:
    """Let CUDA's allocator make segments that do not grow within the block."""
    settings = os.environ.get(ALLOCATOR_VARIABLE) or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    if GROWING_SEGMENTS not in settings:
        yield
        return
    set_allocator: Callable[[str], None] = torch._C._accelerator_setAllocatorSettings
    set_allocator(settings.replace(GROWING_SEGMENTS, "expandable_segments:False"))
    try:
        yield
    finally:
        set_allocator(settings)
