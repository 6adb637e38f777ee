"""Flow control of the training loop: GPU hand-over, waits for the sampler, evaluations, checkpoints, stops.

All functions take the ``Run`` and are collective: all ranks take the same path, and synchronize every few
seconds while rank 0 waits for its sampler. An error that ends the run (Preempted, RunStopped, the sampler's
ConfigError) is raised on every rank, after a checkpoint if possible and if anything was trained. If a disk is
full or fails, only the rank that meets it raises DiskError.

``begin_checkpoint`` begins a save, and a later ``finalize_checkpoint`` completes it; with
``checkpoint.background=false`` the first does both. A new save waits for the previous one.
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
from bapo_megatron.runtime.run_paths import Moment
from bapo_megatron.trainer.build import Run
from bapo_megatron.trainer.records.metrics_log import kept_score
from bapo_megatron.trainer.resume import PartialStep
from bapo_megatron.types import StepHeader

WAIT_S = 5.0
"""Seconds that rank 0 waits for its sampler before the ranks synchronize again."""


def give_gpus_to_engines(run: Run, step: int) -> None:
    """Hand the GPUs to colocated engines, which sample with the weights after ``step``. Collective. Whatever
    the engines, stops the run if preempted and finalizes a written save first. Raises RunStopped, after a
    checkpoint, if they cannot continue."""
    # Before the policy is offloaded, because the save before a stop would reload it.
    stop_if_preempted(run, step)
    # A finished save frees its host copy of the state: the offload needs host memory.
    finalize_checkpoint(run)
    try:
        run.handover.to_engines()
    except RunStopped:
        save_now(run, step)
        raise


def give_gpus_to_policy(run: Run, step: int) -> None:
    """Hand the GPUs to the policy after ``step``: colocated engines release their memory. Collective. Does
    nothing if engines have their own GPUs. Raises RunStopped if the sampler or the memory is lost, after a
    checkpoint if the policy could be reloaded."""
    try:
        run.handover.to_policy()
    except RunStopped:
        if run.handover.policy_has_gpus:
            save_now(run, step)
        raise


def wait_for_sampler(run: Run, step: int, ask: Callable[[Sampler], Any]) -> Any:
    """Poll the sampler until it answers ``ask``; return the answer on every rank. Collective. ``ask`` returns
    None without an answer yet, ``Need.WEIGHTS`` if engines lack the weights after ``step``. Raises
    RunStopped, after a checkpoint, if no answer will come; Preempted as in ``stop_if_preempted``."""
    # All ranks meet in a broadcast at least every WAIT_S: no collective times out during long sampling, every
    # rank resets its watchdog, and all ranks see a signal to any rank.
    while True:
        stop_if_preempted(run, step)
        finalize_checkpoint(run)
        answer = broadcast_from_main(_answer_or_error(run.sampler, ask) if run.sampler else None)
        if answer is Need.WEIGHTS:
            give_gpus_to_policy(run, step)  # an offloaded policy has no weights to send
            run.sync.push(run.policy, step)
            give_gpus_to_engines(run, step)
        elif isinstance(answer, ConfigError):
            if step >= run.first_step:  # otherwise no training could be lost
                save_now(run, step)
            raise answer
        elif isinstance(answer, RunStopped):
            save_now(run, step)
            raise answer
        elif answer is not None:
            return answer


def bring_policy_back(run: Run) -> None:
    """Hand the GPUs to the policy for a save or the export, even if engines are lost. Collective. Raises
    RunStopped only if the policy does not fit on its GPU."""
    try:
        run.handover.to_policy()
    except RunStopped:
        if not run.handover.policy_has_gpus:
            raise


def evaluate_if_due(run: Run, step: int) -> None:
    """Evaluate the weights after ``step`` if an evaluation is due, and record it; training waits. Colocated
    engines keep the GPUs. Collective. Raises RunStopped or Preempted as in ``wait_for_sampler``."""
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
    """Begin the asynchronous save after ``step``, or after the ``partial`` next step. Collective. Waits for
    the previous save. Training pauses while the resume check's fingerprint is taken and the state is copied;
    with ``checkpoint.background=false`` until everything is on disk."""
    start = perf_counter()
    bring_policy_back(run)  # an offloaded policy has no GPU state to copy
    finalize_checkpoint(run, wait=True)  # the previous save: one writer at a time
    # The fingerprint describes what a resumed run restores, so take it at the same moment as the state.
    sampler = broadcast_from_main(run.sampler.state() if run.sampler else None)
    state = {
        "version": run.policy.version,
        "sampler": sampler,
        "clipping": run.update_loss.state(),
        "within": partial,
        "certificate": state_fingerprint(run.config, run.policy, sampler),
    }
    run.checkpoints.begin(_moment(step, partial), run.policy.save, state)
    if not run.config.checkpoint.background:
        finalize_checkpoint(run, wait=True)
    if run.recorder:
        run.recorder.saving(step, perf_counter() - start)


def finalize_checkpoint(run: Run, wait: bool = False) -> None:
    """Poll exports; complete the pending save if it is on disk (``wait``: once it is): record it, offer it
    for export, trim the sampler's journal to what a resume from the oldest checkpoint needs. Collective."""
    if run.exports:
        run.exports.poll()
    saved = run.checkpoints.finalize(wait)
    if saved is None:
        return
    run.preemption.saved(saved.seconds)
    # Only now: the sampler deletes journal files that earlier checkpoints needed.
    sampler = run.sampler
    on_all_ranks(lambda: sampler.checkpointed(run.checkpoints.oldest_step()) if sampler else None)
    if run.recorder:
        run.recorder.checkpoint(saved)
    if run.exports and not saved.updates:
        run.exports.offer(saved.step)


def save_now(run: Run, step: int, partial: PartialStep | None = None) -> None:
    """Save this state synchronously, unless a checkpoint of it exists. Collective."""
    if _moment(step, partial) > run.checkpoints.newest:
        begin_checkpoint(run, step, partial)
    finalize_checkpoint(run, wait=True)


def _moment(step: int, partial: PartialStep | None) -> Moment:
    return step, len(partial.updates) if partial else 0


def open_columns(run: Run, step: int, header: StepHeader) -> StepColumns:
    """Return the per-token columns of the batch after ``step``, their file open on this rank. Collective.
    Raises StorageFailed, on every rank and after a checkpoint, if a rank does not see the file."""
    columns = StepColumns(header)
    try:
        on_all_ranks(columns.open)
    except RunStopped:
        save_now(run, step)
        raise
    return columns


def stop_if_preempted(run: Run, step: int, partial: PartialStep | None = None) -> None:
    """Save and raise Preempted if a signal or the job's end asks for it. Collective. Resets the watchdog."""
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
