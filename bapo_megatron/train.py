"""The loop. Data flows one way, once per step:

prompts -> rollouts -> rewards -> advantages -> packed micro-batches -> bounds -> loss -> optimizer
-> weights to the engines -> checkpoint -> metrics
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any, Literal

from bapo_megatron.alarm import check_gap
from bapo_megatron.algo.objective import update_metrics
from bapo_megatron.algo.staleness import age_metrics
from bapo_megatron.build import Run
from bapo_megatron.data.packing import Sample, pack_samples, samples_of, split_into_updates
from bapo_megatron.distributed import share
from bapo_megatron.errors import RunStopped
from bapo_megatron.interfaces import Sampler
from bapo_megatron.old_log_probs import with_old_log_probs
from bapo_megatron.record import StepClock, step_metrics
from bapo_megatron.types import Metrics, MicroBatch, StepBatch

WAIT_S = 30.0
"""How long rank 0 waits for groups before it tells the others that there are none yet."""


def train(run: Run) -> None:
    """Run every step that is left, on every rank alike."""
    for step in range(run.first_step, run.config.steps + 1):
        clock = StepClock()
        batch = next_batch(run, step)
        clock.lap("rollout")
        updates = train_on(run, step, batch)
        clock.lap("update")
        run.sync.push(run.policy, step)
        clock.lap("sync")
        if run.recorder:
            run.recorder.step(step, updates, step_metrics(batch, updates, clock, run.config.algorithm.bounds))
        check_gap(run.config.algorithm, step, updates, run.recorder)
        if _is_due(run, step):
            checkpoint(run, step)


def next_batch(run: Run, step: int) -> StepBatch:
    """The groups of ``step``, on every rank. RunStopped, after a checkpoint, if there will be none.

    The ranks meet every ``WAIT_S`` seconds: however long sampling takes, no collective times out.
    """
    while True:
        batch: Any = share(_asked(run.sampler, step) if run.sampler else None)
        if isinstance(batch, StepBatch):
            return batch
        if batch == "weights":
            run.sync.push(run.policy, step - 1)
        elif batch is not None:
            if step > run.first_step and not _is_due(run, step - 1):
                checkpoint(run, step - 1)
            raise batch


def _asked(sampler: Sampler, step: int) -> StepBatch | RunStopped | Literal["weights"] | None:
    """What rank 0 tells the others: a batch, that there is none yet, or why there will be none."""
    try:
        return sampler.next_batch(step, WAIT_S)
    except RunStopped as stopped:
        return stopped


def train_on(run: Run, step: int, batch: StepBatch) -> list[Metrics]:
    """Every update of one step: reuse_epochs passes of updates_per_epoch updates each."""
    algorithm, step_version = run.config.algorithm, run.policy.version
    groups = [samples_of(group, algorithm.advantage) for group in batch.groups]
    if algorithm.old_log_probs == "trainer":
        groups = with_old_log_probs(
            run.policy, groups, run.config.batch.pack_tokens, algorithm.importance_cap
        )
    return [
        {"epoch": epoch, **update(run, part, step_version)}
        for epoch in range(algorithm.reuse_epochs)
        for part in split_into_updates(groups, algorithm.updates_per_epoch, (run.config.seed, step, epoch))
    ]


def update(run: Run, groups: Sequence[Sequence[Sample]], step_version: int) -> Metrics:
    """Pack the groups, find the clipping bounds at the present weights, make one optimizer step.

    ``step_version``: of the policy at the beginning of the step.
    """
    policy, config = run.policy, run.config
    samples = [sample for group in groups for sample in group]
    if config.algorithm.old_log_probs == "trainer":
        on_policy = policy.version == step_version
    else:
        on_policy = all((sample.versions_R == policy.version).all() for sample in samples)
    versions = [[sample.versions_R for sample in group] for group in groups]
    ages = age_metrics(versions, policy.version, step_version)
    packs = pack_samples(samples, config.batch.pack_tokens, config.algorithm.loss_mean, policy.pack_layout)
    return {"version": policy.version + 1, **optimize(run, packs, on_policy), **ages}


def optimize(run: Run, packs: Sequence[MicroBatch], on_policy: bool) -> Metrics:
    """One update on packs, with the clipping bounds that belong to it."""
    loss, found = run.clipping.loss(run.policy, packs, on_policy)
    result = run.policy.update(packs, loss)
    run.clipping.observe(result.sums)
    return {
        **update_metrics(result.sums, found, run.config.algorithm.bounds),
        "policy/grad_norm": result.grad_norm,
        "policy/lr": result.learning_rate,
    }


def _is_due(run: Run, step: int) -> bool:
    return step % run.config.checkpoint.every == 0 or step == run.config.steps


def checkpoint(run: Run, step: int) -> None:
    """Write all that a continuation after ``step`` needs."""
    start = perf_counter()
    sampler = share(run.sampler.state() if run.sampler else None)
    state = {"version": run.policy.version, "sampler": sampler, "clipping": run.clipping.state()}
    run.checkpoints.save(step, run.policy.save, state)
    if run.sampler:
        run.sampler.checkpointed(run.checkpoints.oldest_step())
    if run.recorder:
        run.recorder.checkpoint(step, perf_counter() - start)
