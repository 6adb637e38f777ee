"""The loop. Data flows one way, once per step:

prompts -> rollouts -> rewards -> advantages -> packed micro-batches -> bounds -> loss -> optimizer
-> weights to the engines -> checkpoint -> metrics
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from bapo_megatron.algo.objective import update_metrics
from bapo_megatron.build import Run
from bapo_megatron.data.packing import pack_samples, samples_of, split_into_updates
from bapo_megatron.distributed import share
from bapo_megatron.record import StepClock, step_metrics
from bapo_megatron.types import Group, Metrics, MicroBatch, StepBatch


def train(run: Run) -> None:
    """Run every step that is left, on every rank alike."""
    for step in range(run.first_step, run.config.steps + 1):
        clock = StepClock()
        batch = share(run.sampler.next_batch(step) if run.sampler else None)
        clock.lap("rollout")
        updates = train_on(run, step, batch)
        clock.lap("update")
        run.sync.push(run.policy)
        clock.lap("sync")
        if run.recorder:
            run.recorder.batch(step, batch)
            run.recorder.step(step, updates, step_metrics(batch, updates, clock, run.config.algorithm.bounds))
        if step % run.config.checkpoint.every == 0 or step == run.config.steps:
            checkpoint(run, step)


def train_on(run: Run, step: int, batch: StepBatch) -> list[Metrics]:
    """Every update of one step: reuse_epochs passes of updates_per_epoch updates each."""
    algorithm = run.config.algorithm
    return [
        {"epoch": epoch, **update(run, groups)}
        for epoch in range(algorithm.reuse_epochs)
        for groups in split_into_updates(
            batch.groups, algorithm.updates_per_epoch, (run.config.seed, step, epoch)
        )
    ]


def update(run: Run, groups: Sequence[Group]) -> Metrics:
    """Pack the groups, find the clipping bounds at the present weights, make one optimizer step."""
    policy, config = run.policy, run.config
    samples = samples_of(groups, config.algorithm.advantage)
    on_policy = all((sample.versions_R == policy.version).all() for sample in samples)
    packs = pack_samples(samples, config.batch.pack_tokens, config.algorithm.loss_mean, policy.pack_layout)
    return {"version": policy.version + 1, **optimize(run, packs, on_policy)}


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


def checkpoint(run: Run, step: int) -> None:
    """Write all that a continuation after ``step`` needs."""
    start = perf_counter()
    sampler = share(run.sampler.state() if run.sampler else None)
    state = {"version": run.policy.version, "sampler": sampler, "clipping": run.clipping.state()}
    run.checkpoints.save(step, run.policy.save, state)
    if run.recorder:
        run.recorder.checkpoint(step, perf_counter() - start)
