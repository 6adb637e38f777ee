"""Training loop: ``train(run)`` trains all remaining steps and returns None; every rank calls it.

Data flow of a step:

    prompts -> rollouts -> rewards -> advantages -> packed micro-batches -> bounds -> loss -> optimizer
    -> weights to the engines -> metrics -> checkpoint

All functions here are collective. Exceptions that end a run are raised on every rank: Preempted and
RunStopped (after a checkpoint, if possible), ConfigError (including GapError), FloatingPointError. Only disk
errors (DiskError) may be raised on a single rank. ``trainer/build.py`` builds the ``Run``.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

import numpy as np

from bapo_megatron.algo.advantages import Rewards
from bapo_megatron.algo.diagnostics import age_metrics
from bapo_megatron.data.packing import pack_samples, updates_of_step
from bapo_megatron.data.samples import TrainingSample, samples_of
from bapo_megatron.rollout.sampler.step_columns import StepColumns
from bapo_megatron.trainer.build import Run
from bapo_megatron.trainer.checks import (
    check_stored_routes,
    check_updates,
    expert_metrics,
    route_metrics,
)
from bapo_megatron.trainer.corrections import corrected, with_old_log_probs
from bapo_megatron.trainer.flow_control import (
    WAIT_S,
    begin_checkpoint,
    evaluate_if_due,
    finalize_checkpoint,
    give_gpus_to_engines,
    give_gpus_to_policy,
    open_columns,
    stop_if_preempted,
    wait_for_sampler,
)
from bapo_megatron.trainer.profile import profiled
from bapo_megatron.trainer.records.recorder import StepClock, step_metrics
from bapo_megatron.trainer.reference import check_teacher_log_probs, with_reference
from bapo_megatron.trainer.resume import PartialStep
from bapo_megatron.types import Metrics, StepHeader


def train(run: Run) -> None:
    """Train the remaining steps of a run. Collective. Raises Preempted, after a checkpoint, if the run is
    asked to stop; RunStopped if it cannot continue."""
    for step in range(run.first_step, run.config.steps + 1):
        evaluate_if_due(run, step - 1)
        clock = StepClock()
        give_gpus_to_engines(run, step - 1)
        batch = next_batch(run, step)
        clock.lap("rollout")
        give_gpus_to_policy(run, step - 1)
        with profiled(run.config, step), closing(batch):
            updates = train_on(run, step, batch)
            clock.lap("update")
            run.sync.push(run.policy, step)  # while the policy has the GPUs: offloaded it has no weights
            clock.lap("sync")
        _record(run, step, batch.header, updates, clock)
        check_updates(run, step, updates)  # after `_record`: a check that stops the run leaves its metrics
        if step % run.config.checkpoint.every == 0 or step == run.config.steps:
            begin_checkpoint(run, step)
        finalize_checkpoint(run, wait=step == run.config.steps)
    if run.has_work:
        evaluate_if_due(run, run.config.steps)


def next_batch(run: Run, step: int) -> StepColumns:
    """Return the training batch of ``step``, on every rank. Rank 0 broadcasts the header; each rank reads the
    columns of its own samples when packing. Raises RunStopped, after a checkpoint, if no batch will come."""
    header: StepHeader = wait_for_sampler(run, step - 1, lambda sampler: sampler.next_batch(step, WAIT_S))
    return open_columns(run, step - 1, header)


def train_on(run: Run, step: int, batch: StepColumns) -> list[Metrics]:
    """Train ``step`` on its batch: reuse_epochs passes of updates_per_epoch updates; return the updates'
    metrics. Continues a partly trained step after its last finished update. Collective."""
    algorithm = run.config.algorithm
    version, done = run.partial_step or PartialStep(run.policy.version, [])
    run.partial_step = None
    uses = algorithm.reuse_epochs, algorithm.updates_per_epoch
    parts = updates_of_step(training_samples(run, step, batch), *uses, run.config.seed, step)
    for epoch, part in parts[len(done) :]:
        run.watchdog.beat()  # each update is progress, even in a step that cannot be split
        # With the trainer's pi_old there is no checkpoint within a step: a resumed run could not compute it.
        if done and algorithm.old_log_probs == "rollout":
            stop_if_preempted(run, step - 1, PartialStep(version, done))
        done.append({"epoch": epoch, **update(run, part, version)})
    return done


def training_samples(run: Run, step: int, batch: StepColumns) -> Sequence[Sequence[TrainingSample]]:
    """Return the samples of ``step``, by group, with every column that the loss needs. Collective. Raises
    ConfigError or RunStopped, on every rank, if stored rollouts lack one."""
    config, algorithm = run.config, run.config.algorithm
    check_stored_routes(config.rollout, step, batch.header)
    if algorithm.distillation.enabled:
        check_teacher_log_probs(step, batch.header)
    sources, routes = config.data.source_names, config.rollout.route_replay
    # With a penalty in the reward, `with_reference` computes the advantages.
    advantage = _none_yet if algorithm.reference_kl.in_reward else run.advantage
    groups: Sequence[Sequence[TrainingSample]] = samples_of(
        batch.header, batch.read, advantage, sources, routes, algorithm.branch_reward
    )
    if algorithm.old_log_probs == "trainer":
        cap, level = algorithm.importance_cap, algorithm.importance_level
        # Before the first update, because pi_old of all updates is the policy at the start of the step.
        groups = with_old_log_probs(run.policy, groups, config.batch.pack_tokens, cap, level)
    if algorithm.reference_kl.enabled:  # after pi_old, which a penalty in the reward needs
        penalty, pack = algorithm.reference_kl, config.batch.pack_tokens
        shares = run.advantage, algorithm.branch_reward
        groups = with_reference(run.policy, groups, batch.header, penalty, pack, *shares)
    return groups


def _none_yet(rewards: Rewards) -> np.ndarray:
    return np.zeros_like(rewards.reward_N)


def update(run: Run, groups: Sequence[Sequence[TrainingSample]], step_version: int) -> Metrics:
    """Apply masks and rejection, pack the remaining samples, search the bounds and step the optimizer; return
    the update's metrics. ``step_version``: policy version at the start of the step. Collective. Raises
    FloatingPointError, on every rank, if log-probs, loss or gradient norm are not finite."""
    policy, config = run.policy, run.config
    samples = [sample for group in groups for sample in group]
    if config.algorithm.old_log_probs == "trainer":
        on_policy = policy.version == step_version
    else:
        on_policy = all(sample.versions.is_only(policy.version) for sample in samples)
    groups, corrections = corrected(policy, groups, config.algorithm, config.batch.pack_tokens, on_policy)
    if not any(groups):  # policy, version, optimizer and schedule stay unchanged
        return {"version": policy.version, "policy/tokens": 0.0, **corrections}
    samples = [sample for group in groups for sample in group]
    versions = [[sample.versions for sample in group] for group in groups]
    ages = age_metrics(versions, policy.version, step_version)
    packs = pack_samples(
        samples,
        config.batch.pack_tokens,
        config.algorithm.loss_mean,
        policy.pack_layout,
        config.rollout.max_response_tokens,
    )
    result = policy.update(packs, run.update_loss.loss(policy, packs, on_policy))
    return {
        "version": policy.version,
        **run.update_loss.metrics(result.sums, on_policy),
        "policy/grad_norm": result.grad_norm,
        "policy/lr": result.learning_rate,
        **expert_metrics(result.experts),
        **route_metrics(result.routes),
        **corrections,
        **ages,
    }


def _record(run: Run, step: int, header: StepHeader, updates: Sequence[Metrics], clock: StepClock) -> None:
    if run.recorder:
        metrics = step_metrics(header, updates, clock)
        run.recorder.step(step, updates, {**metrics, **run.handover.metrics()})
