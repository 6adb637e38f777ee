"""Background copy of tensors to the host: pinned staging buffers and a thread that feeds a sink.

``stream_writer.py`` uses it for the weights of a disk sync. A copy from a GPU into pinned memory overlaps
with the caller's kernels, at the speed of the bus. Into pageable memory the caller would wait for it, at a
fraction of that speed.

Shapes (suffix of a name): ``_B`` bytes. Used by ``stream_writer.py``.
"""

from __future__ import annotations

import threading
from queue import SimpleQueue
from types import TracebackType
from typing import Protocol

import torch
from torch import Tensor

CHUNK_BYTES = 2**25
CHUNKS = 12
"""Most buffers: 384 MiB in a process, more than any tensor of a 32B model except the two embeddings."""


class Sink(Protocol):
    """Consumer protocol: takes the tensors in the order in which they were added, in the background thread.

    ``stream_writer.py`` implements it.
    For each tensor ``begin``, then any number of ``append``; at the end ``close`` or ``abandon``.
    """

    def begin(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        """Begin a tensor."""

    def append(self, bytes_B: Tensor) -> None:
        """Take the next bytes of the tensor, in host memory that is overwritten later."""

    def close(self) -> None:
        """Finish: all tensors were given."""

    def abandon(self) -> None:
        """Abort after an error of the sink or the caller."""


class _Chunk:
    """Staging buffer with the bytes of a tensor, copied or in flight."""

    def __init__(self, pinned: bool) -> None:
        self._memory_B = torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=pinned)
        self._held = 0
        self._copied: torch.cuda.Event | None = None

    def fill(self, bytes_B: Tensor) -> None:
        """Begin the copy. Later work of the source's stream may overwrite the source."""
        self._held = len(bytes_B)
        self._memory_B[: self._held].copy_(bytes_B, non_blocking=True)
        if bytes_B.is_cuda:
            self._copied = torch.cuda.current_stream(bytes_B.device).record_event()

    def bytes_B(self) -> Tensor:
        """Wait for the copy; its bytes."""
        if self._copied is not None:
            torch.cuda.set_device(self._copied.device)  # a thread begins with GPU 0: a context for nothing
            self._copied.synchronize()
        return self._memory_B[: self._held]


_Job = tuple[str, torch.dtype, tuple[int, ...]] | _Chunk | None
"""Job of the thread: the begin of a tensor, some of its bytes, or the end."""


class BackgroundCopy:
    """Background copy to ``sink``: a context manager, at whose end the sink has all tensors.

    It takes at most 384 MiB of buffers. An error of the block aborts the copy. An error of the sink is raised
    by the next ``add``, or at the end. Made by ``stream_writer.write_shards``.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self._free: SimpleQueue[_Chunk] = SimpleQueue()
        self._made = 0
        self._error: BaseException | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weights-copy", daemon=True)

    def __enter__(self) -> BackgroundCopy:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._stopped.set()
        self._jobs.put(None)
        self._thread.join()
        if error is None and self._error is not None:
            raise self._error

    def add(self, name: str, tensor: Tensor) -> None:
        """Copy a tensor. When this returns it may change, on a GPU by work of the current stream.

        Waits while all buffers are in use.
        """
        self._jobs.put((name, tensor.dtype, tuple(tensor.shape)))
        bytes_B = tensor.detach().contiguous().view(-1).view(torch.uint8)
        for piece_B in bytes_B.split(CHUNK_BYTES):
            chunk = self._take(piece_B.is_cuda)
            chunk.fill(piece_B)
            self._jobs.put(chunk)
        if self._error is not None:
            raise self._error

    def _take(self, pinned: bool) -> _Chunk:
        """A free buffer; a new one while there are fewer than the limit."""
        if self._free.empty() and self._made < CHUNKS:
            self._made += 1
            return _Chunk(pinned)
        return self._free.get()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self._error is None and not self._stopped.is_set():
                self._attempt(job)
            if isinstance(job, _Chunk):
                self._free.put(job)
        try:
            if self._error is None and not self._stopped.is_set():
                self._sink.close()
            else:
                self._sink.abandon()
        except BaseException as error:
            self._error = self._error or error

    def _attempt(self, job: _Job) -> None:
        try:
            if isinstance(job, _Chunk):
                self._sink.append(job.bytes_B())
            elif job is not None:
                self._sink.begin(*job)
        except BaseException as error:
            self._error = error
