"""How all ranks wait for what only rank 0's sampler can tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bapo_megatron.errors import RunStopped
from bapo_megatron.interfaces import Sampler
from bapo_megatron.runtime.distributed import share
from bapo_megatron.trainer.build import Run
from bapo_megatron.trainer.checkpointing import finalize, save_now, stop_if_told

WAIT_S = 5.0
"""How long rank 0 waits for an answer before it tells the others that there is none yet."""


def wait_for_sampler(run: Run, step: int, ask: Callable[[Sampler], Any]) -> Any:
    """The sampler's answer to ``ask``, on every rank, at the weights that ``step`` has made.

    Asked until it is not None; ``weights``: an engine needs the present weights once more. RunStopped, behind
    a checkpoint, if there will be no answer. The ranks meet every ``WAIT_S`` seconds: however long
    sampling takes, no collective times out.
    """
    while True:
        stop_if_told(run, step)
        finalize(run)
        answer = share(_asked(run.sampler, ask) if run.sampler else None)
        if answer == "weights":
            run.sync.push(run.policy, step)
        elif isinstance(answer, RunStopped):
            save_now(run, step)
            raise answer
        elif answer is not None:
            return answer


def _asked(sampler: Sampler, ask: Callable[[Sampler], Any]) -> Any:
    """What rank 0 tells the others: an answer, that there is none yet, or why there will be none."""
    try:
        return ask(sampler)
    except RunStopped as stopped:
        return stopped
