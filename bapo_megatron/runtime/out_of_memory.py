"""Out-of-memory errors: which rank had no memory left, of which kind, and which settings need less.

The context manager ``naming_memory`` encloses the work of each rank. ``death`` says in words why a child
process ended (a rank, the writer of a checkpoint, the sampler's process), for the process that waits for it.
Used in ``commands/``, ``policy/``, ``rollout/sampler/`` and this folder.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_MESSAGES = ("out of memory", "allocate memory", "not enough memory", "_STATUS_ALLOC_FAILED")
"""Texts in the messages of torch's allocators and CUDA's libraries, which raise a plain RuntimeError."""

_ON_A_GPU = "a smaller batch.pack_tokens or batch.logprob_chunk_tokens, batch.recompute=full, no \
batch.hold_forwards, or more parallel.tensor, pipeline or context need less"
_ON_THE_MACHINE = (
    "fewer processes on a node, a smaller batch.pack_tokens, or no checkpoint.background, whose copy \
of what is saved is there while it is written, need less"
)


class OutOfMemoryError(Exception):
    """Out of memory on one rank, which alone raises it; exit code 1. The launcher ends the other ranks."""


@contextmanager
def naming_memory() -> Iterator[None]:
    """Context manager: turns a failed allocation into an OutOfMemoryError with rank, host and advice."""
    try:
        yield
    except Exception as error:
        if not _is_shortage(error):
            raise
        on_gpu = isinstance(error, torch.OutOfMemoryError) or any(
            word in str(error) for word in ("CUDA", "CUBLAS")
        )
        kind, advice = ("GPU memory", _ON_A_GPU) if on_gpu else ("memory", _ON_THE_MACHINE)
        message = " ".join(str(error).split()) or type(error).__name__
        rank = os.environ.get("RANK", "0")
        raise OutOfMemoryError(
            f"rank {rank} on {socket.gethostname()} has no {kind} left; {advice}; "
            f"`bapo plan` shows what takes it: {message}"
        ) from error


def death(exit_code: int) -> str:
    """Cause of a process's death, in words. ``exit_code`` is negative for a signal."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    name = signal.Signals(-exit_code).name
    if exit_code == -signal.SIGKILL:
        return f"killed by {name}, most likely because the machine had no memory left (dmesg says so)"
    return f"killed by {name}"


def _is_shortage(error: Exception) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, (RuntimeError, OSError)) and any(words in str(error) for words in _MESSAGES)
