"""When the state of a run goes to disk: checkpoints that are due, and the one before the run stops."""

from __future__ import annotations

from time import perf_counter

from bapo_megatron.checkpoint.resume_check import certificate
from bapo_megatron.errors import Preempted
from bapo_megatron.runtime.distributed import share
from bapo_megatron.trainer.build import Run, Within


def checkpoint(run: Run, step: int, within: Within | None = None) -> None:
    """Begin to write all that a continuation after ``step``, or ``within`` the next, needs. Collective."""
    start = perf_counter()
    finalize(run, wait=True)  # the one before
    sampler = share(run.sampler.state() if run.sampler else None)
    state = {
        "version": run.policy.version,
        "sampler": sampler,
        "clipping": run.clip_bounds.state(),
        "within": within,
        "certificate": certificate(run.config, run.policy, sampler),
    }
    run.checkpoints.begin((step, len(within[1]) if within else 0), run.policy.save, state)
    if not run.config.checkpoint.background:
        finalize(run, wait=True)
    if run.recorder:
        run.recorder.saving(step, perf_counter() - start)


def finalize(run: Run, wait: bool = False) -> None:
    """If a checkpoint has become whole it counts from now on: what only earlier ones needed may go."""
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


def save_now(run: Run, step: int, within: Within | None = None) -> None:
    """Return when a checkpoint of this moment counts."""
    if (step, len(within[1]) if within else 0) > run.checkpoints.newest:
        checkpoint(run, step, within)
    finalize(run, wait=True)


def stop_if_told(run: Run, step: int, within: Within | None = None) -> None:
    """Interrupted, when all is saved, if a signal or the clock says so. Collective; a sign of life."""
    run.watchdog.beat()
    if reason := run.preemption.reason():
        save_now(run, step, within)
        updates = f" and {len(within[1])} updates of the next" if within else ""
        raise Preempted(f"{reason}; saved after step {step}{updates}")
