"""Profiles of chosen steps: torch profiler traces and GPU memory snapshots, in profile/ of the run directory.

``profiled(config, step)`` is the context manager around a step's updates and weight sync; it writes files on
the ranks in ``config.profile``: a trace (for chrome://tracing or ui.perfetto.dev) and, with
``profile.memory`` on CUDA, a snapshot with the latest million allocations and their stacks (for
pytorch.org/memory_viz). A failed write is a warning.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity

from bapo_megatron.config import RunConfig
from bapo_megatron.policy.device import has_cuda

_ENTRIES = 1_000_000


@contextmanager
def profiled(config: RunConfig, step: int) -> Iterator[None]:
    """Context manager: if ``config.profile`` selects this step and rank, profile the block into files."""
    profile, rank = config.profile, dist.get_rank()
    if step not in profile.steps or rank not in profile.ranks:
        yield
        return
    paths = config.paths
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if has_cuda() else [])]
    remembers = profile.memory and has_cuda()
    with _snapshot(paths.profile_of(step, rank, "memory.pickle")) if remembers else nullcontext():
        with torch.profiler.profile(activities=activities, profile_memory=profile.memory) as trace:
            yield
        with _written_whole(paths.profile_of(step, rank, "trace.json.gz")) as path:
            trace.export_chrome_trace(str(path))


@contextmanager
def _snapshot(path: Path) -> Iterator[None]:
    torch.cuda.memory._record_memory_history(max_entries=_ENTRIES)
    try:
        yield
        with _written_whole(path) as part:
            torch.cuda.memory._dump_snapshot(str(part))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


@contextmanager
def _written_whole(path: Path) -> Iterator[Path]:
    """Yield a hidden name, renamed to ``path`` on exit: an atomic write. An error only warns."""
    part = path.with_name(f".{path.name}")
    try:
        path.parent.mkdir(exist_ok=True)
        yield part
        part.rename(path)
    except (OSError, RuntimeError) as error:  # a full disk must not end a run for a profile
        print(f"warning: {path} was not written: {error}", file=sys.stderr, flush=True)
        with suppress(OSError):
            part.unlink(missing_ok=True)
