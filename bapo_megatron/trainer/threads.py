"""The number of CPU threads of a run, which its continuations keep.

Threads split long sums between them, so their number decides about the last bits: of matrix products over
thousands of tokens, of means, of vectorized functions at the ends of the parts. A GPU does not depend on it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from bapo_megatron.checkpoint.run_directory import THREADS, read_config
from bapo_megatron.config import RunConfig
from bapo_megatron.config.validation import flat
from bapo_megatron.policy.device import has_cuda
from bapo_megatron.runtime.distributed import is_main, share

Event = dict[str, Any]


def pin_threads(config: RunConfig) -> tuple[RunConfig, Event | None]:
    """Set this rank's number of threads: that asked for, else the run directory's, else the present one.

    Returns ``config`` with it, and the event to record if the environment would have given another. On a GPU
    only a number that is asked for is set. Collective.
    """
    asked, present = config.threads, torch.get_num_threads()
    threads, present = share((asked or _kept(config) or present, present))
    if asked is None and has_cuda():
        return config, None
    torch.set_num_threads(threads)
    config = replace(config, threads=threads)
    if asked is not None or threads == present:
        return config, None
    message = (
        f"{threads} threads a rank, as when the run began, and not {present}: its sums would differ in their "
        f"last bits (--threads {present} --allow-change {THREADS} takes {present})"
    )
    if is_main():
        print(message, flush=True)
    return config, {"kind": "threads_kept", "threads": threads, "environment": present, "message": message}


def _kept(config: RunConfig) -> int | None:
    """The number that the run directory names; None at another layout, which adds in another order anyhow."""
    stored = read_config(config.directory) or {}
    now = flat(config)
    if any(value != now.get(name) for name, value in stored.items() if name.startswith("parallel.")):
        return None
    kept: int | None = stored.get(THREADS)
    return kept
