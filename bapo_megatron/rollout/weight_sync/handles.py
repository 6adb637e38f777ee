"""Memory handles of tensors (CUDA IPC, POSIX shared memory), by which another process maps their memory.

    GPU    CUDA IPC: handle of the allocation, and UUID of the GPU (its number differs between processes)
    CPU    POSIX shared memory, by its name

``ipc.py`` makes them for colocated engines. A handle is torch's own pickle of a shared tensor, which SGLang
loads with a list of allowed names. On a GPU torch counts references, and would leak the memory of a reader
that dies. Here the owner knows when its memory was read, and readers decrement a dummy counter. They do not
wait for a CUDA event either, of which torch opens one for each handle and closes none: the stream is
synchronized before a handle is made. Used by ``ipc.py`` and ``planning/rehearsal/program.py``.
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
"""Age of a stale shared-memory file, in seconds: longer than any hand-over."""
_ARGUMENTS = tuple(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
"""Names of the arguments from which a reader rebuilds a GPU tensor."""


def shareable(nbytes: int, device: torch.device) -> Tensor:
    """An uninitialized uint8 tensor of ``nbytes`` bytes in shareable memory, for ``handles_of``.

    It is in no expandable segment of CUDA's allocator: a process that may not ptrace this one cannot map it.
    """
    if device.type != "cuda":
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    with _fixed_segments():
        return torch.empty(nbytes, dtype=torch.uint8, device=device)


def handles_of(named: Sequence[tuple[str, Tensor]]) -> bytes:
    """A pickle of names and memory handles of tensors in ``shareable`` memory, without data, for one reader.

    It waits until the GPU has written them. The memory must be kept, unchanged, until the reader has finished
    (``ipc.py``).
    """
    # Readers wait for no event: the bytes must be written before the handle exists.
    if any(tensor.is_cuda for _, tensor in named):
        torch.cuda.current_stream().synchronize()
    written = io.BytesIO()
    with _shared_by_name():
        _HandlePickler(written).dump([(name, tensor.detach()) for name, tensor in named])
    return written.getvalue()


def remove_leftovers(folder: Path = Path("/dev/shm")) -> None:
    """Remove stale shared memory that this user's killed processes have left: on a CPU nothing else does.

    Young files stay: they may belong to a process in another PID namespace.
    """
    for path in folder.glob("torch_*_*_*"):
        number = path.name.split("_")[1]
        with suppress(OSError):  # another process was faster
            about = path.lstat()
            is_old = time.time() - about.st_mtime > _OLD_S and about.st_uid == os.getuid()
            if is_old and number.isdecimal() and not Path("/proc", number).exists():
                path.unlink()


class _HandlePickler(ForkingPickler):
    """A pickler of tensors as memory handles, with the GPU's UUID in place of its number."""

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
    """Decrement torch's reference count of a reader, as the reader itself would."""
    torch.UntypedStorage._release_ipc_counter_cuda(handle, offset)


@cache
def _dummy_counter(device: int) -> dict[str, Any]:
    """The dummy reference counter: of a tensor that is never freed; shareable, because readers map it."""
    tensor = shareable(4, torch.device("cuda", device))
    _never_freed.append(tensor)
    _, arguments = reductions.reduce_tensor(tensor)
    return dict(zip(_ARGUMENTS, arguments, strict=True))


_never_freed: list[Tensor] = []


@contextmanager
def _shared_by_name() -> Iterator[None]:
    """Share CPU memory by name within the block: a file descriptor would go over a socket, with a key that
    the reader does not have."""
    before = get_sharing_strategy()
    set_sharing_strategy("file_system")
    try:
        yield
    finally:
        set_sharing_strategy(before)


@contextmanager
def _fixed_segments() -> Iterator[None]:
    """Disable expandable segments of CUDA's allocator within the block."""
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
