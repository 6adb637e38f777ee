"""Thread pinning: a run resumed at its layout keeps its number of CPU threads, for sums equal bit for bit.

Threads split long sums between them, so their number changes the last bits of matrix products, means and
vectorized functions. A GPU does not depend on it. Every rank calls ``pin_threads``, which is collective,
before its first computation. Used by ``commands/train.py``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from bapo_megatron.checkpoint.fork_record import began_with
from bapo_megatron.checkpoint.run_directory import THREADS, plain_values
from bapo_megatron.config import RunConfig
from bapo_megatron.policy.device import has_cuda
from bapo_megatron.runtime.distributed import broadcast_from_main, is_main, launched_world_size

Event = dict[str, Any]

_LAYOUT = [f"parallel.{name}" for name in ("tensor", "pipeline", "virtual", "context", "sequence")]
_LAYOUT += ["parallel.pipeline_layers", "parallel.expert", "parallel.expert_tensor"]


def pin_threads(config: RunConfig) -> tuple[RunConfig, Event | None]:
    """Set this rank's number of threads: that of ``config``, else the run directory's, else torch's.

    Returns ``config`` with it, and the event to record if the environment would have given another. On a GPU
    only a number in ``config`` is set. Collective.
    """
    asked = config.threads
    kept, is_other, present = broadcast_from_main(
        (_kept(config), _has_other_layout(config), torch.get_num_threads())
    )
    # Another layout adds in another order anyway, so it need not keep the number.
    threads = asked or (None if is_other else kept) or present
    if asked is None and has_cuda():
        return config, None
    torch.set_num_threads(threads)
    config = replace(config, threads=threads)
    if asked is not None or (kept or present) == present:
        return config, None
    if is_other:
        message = (
            f"{present} threads a rank, and not {kept} as when the run began: another layout adds in another "
            f"order anyhow (--threads {kept} --allow-change {THREADS} takes {kept})"
        )
        return config, _announced("threads_anew", threads, present, message)
    message = (
        f"{threads} threads a rank, as when the run began, and not {present}: its sums would differ in their "
        f"last bits (--threads {present} --allow-change {THREADS} takes {present})"
    )
    return config, _announced("threads_kept", threads, present, message)


def _announced(kind: str, threads: int, environment: int, message: str) -> Event:
    """The event of a choice of threads, which is also printed on rank 0."""
    if is_main():
        print(message, flush=True)
    return {"kind": kind, "threads": threads, "environment": environment, "message": message}


def _kept(config: RunConfig) -> int | None:
    """Threads in the stored configuration of the run, or of the run that it is forked from."""
    kept: int | None = (began_with(config.directory) or {}).get(THREADS)
    return kept


def _has_other_layout(config: RunConfig) -> bool:
    """Whether the stored layout differs in a field that changes the order of sums."""
    stored, now, parallel = began_with(config.directory) or {}, plain_values(config), config.parallel
    if any(stored.get(name, now[name]) != now[name] for name in _LAYOUT):
        return True
    data = stored.get("parallel.data")  # None: as many as were launched, which the directory does not say
    present = parallel.data or max(1, (launched_world_size() or 1) // parallel.model_size)
    return data is not None and data != present
