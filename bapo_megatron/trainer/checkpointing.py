"""Checkpoints in the training loop: when one is written, and what happens when the run has to stop.

All ranks take the same path: a rank 0 that waits for its sampler meets the others every few seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

from bapo_megatron.checkpoint.resume_check import state_fingerprint
from bapo_megatron.errors import Preempted, RunStopped
from bapo_megatron.interfaces import Sampler
from bapo_megatron.runtime.distributed import share
from bapo_megatron.runtime.run_paths import POLICY, Moment
from bapo_megatron.trainer.build import Run
from bapo_megatron.trainer.resume import PartialStep

WAIT_S = 5.0
"""How long rank 0 waits for its sampler before the ranks meet again."""


def begin_training(run: Run, step: int) -> None:
    """Give the GPUs to the policy, after ``step``. Collective.

    RunStopped if the sampler or the memory is lost: after a checkpoint, if the policy is back.
    """
    try:
        run.time_sharing.train()
    except RunStopped:
        if run.time_sharing.trains:
            save_now(run, step)
        raise


def bring_policy_back(run: Run) -> None:
    """Give the GPUs to the policy, for what needs no engines any more. Collective."""
    try:
        run.time_sharing.train()
    except RunStopped:
        if not run.time_sharing.trains:
            raise


def begin_checkpoint(run: Run, step: int, partial: PartialStep | None = None) -> None:
    """Begin to write the checkpoint after ``step``, or after the ``partial`` next step. Collective."""
    start = perf_counter()
    bring_policy_back(run)
    finalize_checkpoint(run, wait=True)  # the one before
    sampler = share(run.sampler.state() if run.sampler else None)
    state = {
        "version": run.policy.version,
        "sampler": sampler,
        "clipping": run.clip_bounds.state(),
        "within": partial,
        "certificate": state_fingerprint(run.config, run.policy, sampler),
    }
    run.checkpoints.begin(_moment(step, partial), {POLICY: run.policy.save}, state)
    if not run.config.checkpoint.background:
        finalize_checkpoint(run, wait=True)
    if run.recorder:
        run.recorder.saving(step, perf_counter() - start)


def finalize_checkpoint(run: Run, wait: bool = False) -> None:
    """If the checkpoint that was begun has become whole, record it, export it, and delete what only older
    checkpoints needed. Collective; without ``wait`` it does not wait for the disk."""
    if run.exports:
        run.exports.poll()
    saved = run.checkpoints.finalize(wait)
    if saved is None:
        return
    run.preemption.saved(saved.seconds)
    if run.sampler:
        run.sampler.checkpointed(run.checkpoints.oldest_step())
    if run.recorder:
        run.recorder.checkpoint(saved)
    if run.exports and not saved.updates:
        run.exports.offer(saved.step)


def save_now(run: Run, step: int, partial: PartialStep | None = None) -> None:
    """Write a checkpoint of this moment, unless there is one, and wait until it is whole. Collective."""
    if _moment(step, partial) > run.checkpoints.newest:
        begin_checkpoint(run, step, partial)
    finalize_checkpoint(run, wait=True)


def stop_if_preempted(run: Run, step: int, partial: PartialStep | None = None) -> None:
    """Save, then raise Preempted, if a signal or the job's clock asks the run to stop. Collective.

    Every call also resets the watchdog.
    """
    run.watchdog.beat()
    if reason := run.preemption.reason():
        save_now(run, step, partial)
        updates = f" and {len(partial.updates)} updates of the next" if partial else ""
        raise Preempted(f"{reason}; saved after step {step}{updates}")


def wait_for_sampler(run: Run, step: int, ask: Callable[[Sampler], Any]) -> Any:
    """The sampler's answer to ``ask``, on every rank, at the weights after ``step``. Collective.

    ``ask`` returns None where there is no answer yet, or ``"weights"`` if an engine needs the present weights
    again; it is called until there is an answer. The ranks meet every ``WAIT_S`` seconds, so no collective
    times out however long sampling takes. RunStopped, after a checkpoint, if there will be no answer.
    """
    while True:
        stop_if_preempted(run, step)
        finalize_checkpoint(run)
        answer = _answer(run, ask)
        if answer == "weights":
            begin_training(run, step)  # colocated engines are ended, and the policy comes back
            run.sync.push(run.policy, step)
        elif isinstance(answer, RunStopped):
            save_now(run, step)
            raise answer
        elif answer is not None:
            return answer


def _answer(run: Run, ask: Callable[[Sampler], Any]) -> Any:
    """The sampler's answer, or the RunStopped that it raised, on every rank. Engines get the GPUs first."""
    try:
        run.time_sharing.sample()
    except RunStopped as stopped:
        return stopped
    return share(_answer_or_error(run.sampler, ask) if run.sampler else None)


def _answer_or_error(sampler: Sampler, ask: Callable[[Sampler], Any]) -> Any:
    try:
        return ask(sampler)
    except RunStopped as stopped:
        return stopped


def _moment(step: int, partial: PartialStep | None) -> Moment:
    return step, len(partial.updates) if partial else 0
