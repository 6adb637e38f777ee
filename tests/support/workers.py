"""Forked gloo workers: imports are paid once, a layout costs about a second."""

from __future__ import annotations

import gc
import os
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from bapo_megatron.config import ParallelConfig
from bapo_megatron.policy.layout import parallel_processes
from bapo_megatron.runtime.distributed import free_port
from tests.support.gloo_device import share_gloo_device


def run_layout(function: Callable[..., Any], parallel: ParallelConfig, *args: Any) -> list[Any]:
    """``function(*args)`` on every rank of ``parallel``; what each returned, in rank order.

    A rank that raises fails the test with its traceback.
    """
    world = parallel.model_size * (parallel.data or 1)
    with tempfile.TemporaryDirectory() as folder:
        _start_at_a_free_port(lambda port: (function, parallel, args, world, port, folder), world)
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(world)]


def _start_at_a_free_port(arguments: Callable[[int], tuple[Any, ...]], world: int) -> None:
    """Start the ranks, again if another program has taken the port since it was found free."""
    for attempts_left in (2, 1, 0):
        try:
            mp.start_processes(_worker, arguments(free_port()), world, start_method="fork")
            return
        except mp.ProcessRaisedException as error:
            if not attempts_left or "cannot listen at" not in str(error):
                raise


def _worker(
    rank: int,
    function: Callable[..., Any],
    parallel: ParallelConfig,
    args: tuple[Any, ...],
    world: int,
    port: int,
    folder: str,
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(1)
    share_gloo_device()
    gc.freeze()  # what the tests before have left is not taken apart here: a store would wait for its thread
    try:
        with parallel_processes(parallel):
            result = function(*args)
        torch.save(result, Path(folder) / f"{rank}.pt")
    except BaseException:
        traceback.print_exc()
        raise
