"""Flow control of the training loop: GPU hand-over, waits for the sampler, evaluations, checkpoints, stops.

Functions on a ``Run``, all collective: all ranks take the same path, and while rank 0 waits for its sampler
they meet every few seconds. An error that ends the run (Preempted, RunStopped, the sampler's ConfigError) is
raised on every rank, after a checkpoint where one can be made and something was trained.

A save between steps is begun by one call and completed by a later one (``checkpoint.background=false``: by
the same); a new one waits for the one before. DiskError, on the rank that meets it, for a full or failing
disk.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

from bapo_megatron.checkpoint.resume_check import state_fingerprint
from bapo_megatron.config.validation import BOXED_REWARDS
from bapo_megatron.errors import ConfigError, Preempted, RunStopped
from bapo_megatron.evaluation.scoring import evaluation_metrics
from bapo_megatron.interfaces import Need, Sampler
from bapo_megatron.rollout.sampler.step_columns import StepColumns
from bapo_megatron.runtime.distributed import broadcast_from_main, on_all_ranks
from bapo_megatron.runtime.run_paths import POLICY, Moment
from bapo_megatron.trainer.build import Run
from bapo_megatron.trainer.records.metrics_log import kept_score
from bapo_megatron.trainer.resume import PartialStep
from bapo_megatron.types import StepHeader

WAIT_S = 5.0
"""Seconds that rank 0 waits for its sampler before the ranks meet again."""


def give_gpus_to_engines(run: Run, step: int) -> None:
    """GPU hand-over to colocated engines, which sample with the weights after ``step``. Collective.

    Does nothing where engines have GPUs of their own. RunStopped, after a checkpoint, if they cannot
    continue.
    """
    # Before the policy is offloaded: the save before a stop would reload it at once.
    stop_if_preempted(run, step)
    # A save that has ended gives back its copy of the state on the host: the offload needs host memory.
    finalize_checkpoint(run)
    try:
        run.handover.to_engines()
    except RunStopped:
        save_now(run, step)
        raise


def give_gpus_to_policy(run: Run, step: int) -> None:
    """GPU hand-over to the policy after ``step``: colocated engines release their memory. Collective.

    Does nothing where engines have GPUs of their own. RunStopped if the sampler or the memory is lost; after
    a checkpoint, if the policy could be reloaded.
    """
    try:
        run.handover.to_policy()
    except RunStopped:
        if run.handover.policy_has_gpus:
            save_now(run, step)
        raise


def wait_for_sampler(run: Run, step: int, ask: Callable[[Sampler], Any]) -> Any:
    """Poll of the sampler until it answers ``ask``: the answer, on every rank. Collective.

    ``ask`` returns None where there is no answer yet, or ``Need.WEIGHTS`` where engines lack the weights
    after ``step``. RunStopped, after a checkpoint, if there will be no answer; Preempted as of
    ``stop_if_preempted``.
    """
    # Rank 0 waits WAIT_S at most, and then all ranks meet in a broadcast: so no collective times out however
    # long sampling takes, every rank resets its watchdog, and a signal to any rank is seen by all.
    while True:
        stop_if_preempted(run, step)
        finalize_checkpoint(run)
        answer = broadcast_from_main(_answer_or_error(run.sampler, ask) if run.sampler else None)
        if answer is Need.WEIGHTS:
            give_gpus_to_policy(run, step)  # an offloaded policy has no weights to send
            run.sync.push(run.policy, step)
            give_gpus_to_engines(run, step)
        elif isinstance(answer, ConfigError):
            if step >= run.first_step:  # else nothing was trained that could be lost
                save_now(run, step)
            raise answer
        elif isinstance(answer, RunStopped):
            save_now(run, step)
            raise answer
        elif answer is not None:
            return answer


def bring_policy_back(run: Run) -> None:
    """Hand-over of the GPUs to the policy for a save or the export, also if engines are lost. Collective.

    RunStopped only if the policy has no room on its GPU.
    """
    try:
        run.handover.to_policy()
    except RunStopped:
        if not run.handover.policy_has_gpus:
            raise


def evaluate_if_due(run: Run, step: int) -> None:
    """Evaluate the weights after ``step`` if an evaluation is due; training waits. Collective.

    RunStopped or Preempted, after a checkpoint, as of ``wait_for_sampler``.
    """
    if not run.config.evaluates(step):
        return
    give_gpus_to_engines(run, step)
    path: Path = wait_for_sampler(run, step, lambda sampler: sampler.evaluated(step, WAIT_S))
    if run.recorder:
        metrics = evaluation_metrics(path, boxed=run.config.reward.function in BOXED_REWARDS)
        run.recorder.evaluation(step, metrics)
        if (score := kept_score(metrics)) is not None:
            run.checkpoints.record_score(step, score)


def begin_checkpoint(run: Run, step: int, partial: PartialStep | None = None) -> None:
    """Begin the asynchronous save after ``step``, or after the ``partial`` next step. Collective.

    Waits for the save before it. Training stands still while the resume check's fingerprint is taken and the
    state is copied; with ``checkpoint.background=false`` until all is on disk.
    """
    start = perf_counter()
    bring_policy_back(run)  # an offloaded policy has nothing on the GPU that could be copied
    finalize_checkpoint(run, wait=True)  # the one before: one writer at a time
    # The fingerprint compares what a resumed run restores, so it is taken of the same moment as the state.
    sampler = broadcast_from_main(run.sampler.state() if run.sampler else None)
    state = {
        "version": run.policy.version,
        "sampler": sampler,
        "clipping": run.update_loss.state(),
        "within": partial,
        "certificate": state_fingerprint(run.config, run.policy, sampler),
    }
    run.checkpoints.begin(_moment(step, partial), {POLICY: run.policy.save}, state)
    if not run.config.checkpoint.background:
        finalize_checkpoint(run, wait=True)
    if run.recorder:
        run.recorder.saving(step, perf_counter() - start)


def finalize_checkpoint(run: Run, wait: bool = False) -> None:
    """Complete the pending save, if it is on disk: record it, export it, trim the journal. Collective.

    The journal is the sampler's; it keeps what a resume from the oldest checkpoint needs. Without ``wait`` it
    does not wait for the disk, and does nothing if the save is not complete.
    """
    if run.exports:
        run.exports.poll()
    saved = run.checkpoints.finalize(wait)
    if saved is None:
        return
    run.preemption.saved(saved.seconds)
    # Only now: the sampler deletes journal that the checkpoints before this one needed.
    if run.sampler:
        run.sampler.checkpointed(run.checkpoints.oldest_step())
    if run.recorder:
        run.recorder.checkpoint(saved)
    if run.exports and not saved.updates:
        run.exports.offer(saved.step)


def save_now(run: Run, step: int, partial: PartialStep | None = None) -> None:
    """Synchronous save of this state of the run, unless it has a checkpoint. Collective."""
    if _moment(step, partial) > run.checkpoints.newest:
        begin_checkpoint(run, step, partial)
    finalize_checkpoint(run, wait=True)


def _moment(step: int, partial: PartialStep | None) -> Moment:
    return step, len(partial.updates) if partial else 0


def open_columns(run: Run, step: int, header: StepHeader) -> StepColumns:
    """The columns of the batch after ``step``, whose file this rank has open. Collective.

    StorageFailed, on every rank and after a checkpoint, if a rank does not see the file.
    """
    columns = StepColumns(header)
    try:
        on_all_ranks(columns.open)
    except RunStopped:
        save_now(run, step)
        raise
    return columns


def stop_if_preempted(run: Run, step: int, partial: PartialStep | None = None) -> None:
    """Preemption check: save and raise Preempted if a signal or the job's end asks for it. Collective.

    Every call also resets the watchdog.
    """
    run.watchdog.beat()
    if reason := run.preemption.reason():
        save_now(run, step, partial)
        updates = f" and {len(partial.updates)} updates of the next" if partial else ""
        raise Preempted(f"{reason}; saved after step {step}{updates}")


def _answer_or_error(sampler: Sampler, ask: Callable[[Sampler], Any]) -> Any:
    try:
        return ask(sampler)
    except (RunStopped, ConfigError) as error:
        return error
