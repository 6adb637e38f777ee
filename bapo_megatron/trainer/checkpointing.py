"""Checkpointing of the training loop: asynchronous saves between steps, and the save before a stop.

Functions on a ``Run``, all collective. A save between steps is begun by one call and completed by a later one
(``checkpoint.background=false``: by the same); a new one waits for the one before. DiskError, on the rank
that meets it, for a full or failing disk. Used by ``commands/train.py``, ``train.py`` and
``flow_control.py``.
"""

from __future__ import annotations

from time import perf_counter

from bapo_megatron.checkpoint.resume_check import state_fingerprint
from bapo_megatron.errors import RunStopped
from bapo_megatron.runtime.distributed import broadcast_from_main
from bapo_megatron.runtime.run_paths import POLICY, Moment
from bapo_megatron.trainer.build import Run
from bapo_megatron.trainer.resume import PartialStep


def bring_policy_back(run: Run) -> None:
    """Hand-over of the GPUs to the policy for a save or the export, also if engines are lost. Collective.

    RunStopped only if the policy has no room on its GPU.
    """
    try:
        run.handover.to_policy()
    except RunStopped:
        if not run.handover.policy_has_gpus:
            raise


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
