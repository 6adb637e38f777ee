"""Construction of a training run from a RunConfig: policy, sampler, weight sync, checkpoints and records.

``bapo train`` enters the context manager ``open_run`` on every rank, once process groups exist and the run
directory is locked; it yields the ``Run``. ``open_sampler`` and ``open_engines``, for rank 0 alone, start and
end the sampler process and engine servers (none for a replay of stored rollouts).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bapo_megatron.algo.advantages import Advantage, build_advantage
from bapo_megatron.checkpoint.exports import AfterExport, StepExports
from bapo_megatron.checkpoint.run_directory import has_steps, plain_values, store_config
from bapo_megatron.checkpoint.store import CheckpointStore
from bapo_megatron.config import DataConfig, RolloutConfig, RunConfig
from bapo_megatron.data.problem_sets import control_tokens_text, load_problems
from bapo_megatron.data.prompts import PromptSet
from bapo_megatron.hf.reader import TensorReader
from bapo_megatron.hf.tokenizer import load_tokenizer
from bapo_megatron.hf.weight_files import left_out_text
from bapo_megatron.interfaces import HandsOver, Policy, Sampler, WeightSync
from bapo_megatron.policy.device import has_cuda, select_device
from bapo_megatron.policy.megatron import MegatronPolicy
from bapo_megatron.rollout.engines.backend import EngineServers, engine_backend
from bapo_megatron.rollout.sampler.client import SamplerClient
from bapo_megatron.rollout.sampler.process import Setup
from bapo_megatron.rollout.sampler.step_batches import ReplaySampler
from bapo_megatron.rollout.sampler.turns import tools_of
from bapo_megatron.rollout.weight_sync.disk import DiskSync, NoSync, SenderParts, WeightStaging, sender
from bapo_megatron.runtime.distributed import barrier, is_main, on_all_ranks
from bapo_megatron.runtime.event_kinds import OnEvent
from bapo_megatron.runtime.guards import PreemptionSignal, Watchdog
from bapo_megatron.runtime.storage import OldFiles, print_kept
from bapo_megatron.trainer.gpu_handover import GpuHandover
from bapo_megatron.trainer.kernel_check import check_kernels
from bapo_megatron.trainer.records.metrics_log import evaluation_means
from bapo_megatron.trainer.records.recorder import Recorder, recorded_end, sending_events
from bapo_megatron.trainer.resume import Begun, PartialStep, ResumePoint, check_restored, find_resume_point
from bapo_megatron.trainer.suites import load_suites
from bapo_megatron.trainer.update_loss import UpdateLoss


@dataclass(kw_only=True)
class Run:
    """Parts of a run on one rank, for the training loop. Only rank 0 has a recorder, exports and, while work
    is left, a sampler; elsewhere these are None. The loop sets only the field ``partial_step``."""

    config: RunConfig
    policy: Policy
    advantage: Advantage
    """Computes advantages on rank 0 and returns them on every rank. Collective."""
    update_loss: UpdateLoss
    sync: WeightSync
    handover: GpuHandover
    checkpoints: CheckpointStore
    sampler: Sampler | None
    recorder: Recorder | None
    exports: StepExports | None
    first_step: int
    """1 for a new run, otherwise the step after its checkpoint."""
    has_work: bool
    """Whether steps, or the evaluation of the last step, are left."""
    partial_step: PartialStep | None
    """Finished updates of the first step, from a checkpoint within it."""
    preemption: PreemptionSignal
    watchdog: Watchdog


@contextmanager
def open_run(config: RunConfig, begun: Begun, preemption: PreemptionSignal) -> Iterator[Run]:
    """Context manager: the run of ``config``, new or resumed from its newest intact checkpoint. Collective.

    In order: loads the checkpoint and the reference policy, starts sampler and engines, checks the restored
    state, sends the weights. Parts close in reverse order, even after an error. Raises ResumeError, on every
    rank, if the restored state differs.
    """
    check_kernels(config.model, config.parallel)
    policy = build_policy(config)
    if is_main() and (left_out := left_out_text(config.model.hf_path)):
        print(f"note: {left_out}", file=sys.stderr, flush=True)
    hold_forwards, sources = config.batch.hold_forwards, config.data.source_names
    update_loss = UpdateLoss(config.algorithm, hold_forwards, sources, _keeps_keys(config))
    point = find_resume_point(config, begun)
    saved = point.checkpoint
    # Load checkpoint and reference before anything is written or started: a failed load then leaves the run's
    # records unchanged and no server running.
    if saved:
        policy.load(saved.policy, saved.trainer["version"])
        update_loss.load_state(point.clipping_state(config))
    penalized = config.algorithm.reference_kl.enabled and point.has_work
    if penalized:
        policy.load_reference(config.algorithm.reference_kl.model or config.model.hf_path)
    with ExitStack() as opened:
        recorder = exports = sampler = servers = None
        if is_main():
            # First in, last out: the sampler and its servers record events until they close.
            recorder = opened.enter_context(_recorder(config, begun, point))
            preemption.record = recorder.event
            exports = _exports(config, recorder)
            opened.enter_context(closing(exports))
        on_event = recorder.event if recorder else lambda _event: None
        store = _checkpoint_store(config, point, exports, _old_files(on_event))
        if recorder and point.has_work:
            sampler, servers = opened.enter_context(open_sampler(config, recorder.event))
            sampler.start(point.first_step, point.sampler_state(config))
        sync = build_weight_sync(
            config.rollout, config.paths.weights, config.model.hf_path, policy, sampler, servers, on_event
        )
        # After the sampler's start, because the resume check needs its position; before the first push, so
        # that no engine samples from unchecked weights.
        if saved and point.has_work:
            for event in check_restored(config, policy, sampler, saved, point.fork):
                on_event(event)
        if point.has_work:
            sync.push(policy, point.first_step - 1)
        handover = _handover(config, policy, sampler, servers, on_event, sync)
        # The watchdog starts last: loading a model and starting servers may take longer than its limit.
        watchdog = opened.enter_context(closing(Watchdog(config.hang_minutes)))
        barrier()  # before it, a rank with a stop signal exits immediately and ends the others
        preemption.begun()
        yield Run(
            config=config,
            policy=policy,
            advantage=agreed(build_advantage(config.algorithm)),
            update_loss=update_loss,
            sync=sync,
            handover=handover,
            checkpoints=store,
            sampler=sampler,
            recorder=recorder,
            exports=exports,
            first_step=point.first_step,
            has_work=point.has_work,
            partial_step=point.partial_step,
            preemption=preemption,
            watchdog=watchdog,
        )


def agreed(advantage: Advantage) -> Advantage:
    """Return a collective function that computes ``advantage`` on rank 0 and returns the result on every
    rank, because a user's function may differ between ranks."""
    return lambda rewards: on_all_ranks(lambda: advantage(rewards) if is_main() else np.zeros(0, np.float32))[
        0
    ]


def _handover(
    config: RunConfig,
    policy: MegatronPolicy,
    sampler: Sampler | None,
    servers: EngineServers | None,
    on_event: OnEvent,
    sync: WeightSync,
) -> GpuHandover:
    client = sampler if isinstance(sampler, SamplerClient) else None
    handing_over = sync if isinstance(sync, HandsOver) else None
    return GpuHandover(config, policy, client, servers, on_event, handing_over)


def _keeps_keys(config: RunConfig) -> bool:
    """Whether engines keep keys and values of older weights for responses in flight."""
    return getattr(config.rollout.engine_config, "on_update", None) == "in_place"


def build_policy(config: RunConfig, reader: TensorReader | None = None) -> MegatronPolicy:
    """Return the Megatron policy with the weights of ``reader``; None: of ``config.model``. Every rank calls
    it and builds its part; process groups must exist."""
    return MegatronPolicy(
        config.model,
        config.parallel,
        config.batch,
        config.optimizer,
        config.planned_updates,
        config.rollout.temperature,
        reader,
        _keeps_keys(config),
    )


@contextmanager
def _recorder(config: RunConfig, begun: Begun, point: ResumePoint) -> Iterator[Recorder]:
    """Yield a run's recorder, after storing the configuration and recording changed settings and a fork."""
    if point.has_work:
        store_config(config)
    # On exit: record `done` or `failed`, close the files, then send the last events.
    with (
        sending_events(config),
        closing(Recorder(config, point.first_step, point.has_work)) as recorder,
        recorded_end(config, point.has_work, recorder.event),
    ):
        if point.changed and point.has_work:
            recorder.event(
                {"kind": "config_changed", "fields": {name: now for name, _, now in point.changed}}
            )
        if point.fork and begun.settings is None:
            changed = {name: now for name, _, now in point.fork.changed(plain_values(config))}
            recorder.event({"kind": "forked", **asdict(point.fork.origin), "fields": changed})
        yield recorder


def _exports(config: RunConfig, recorder: Recorder) -> StepExports:
    asked, after = config.checkpoint, None
    if asked.after_export is not None:
        after = AfterExport(asked.after_export, asked.after_export_minutes, config.name, config.steps)
    return StepExports(config.paths, config.model.hf_path, asked.export_every, recorder.event, after)


def _old_files(on_event: OnEvent) -> OldFiles:
    def report(kind: str, *, path: str, reason: str) -> None:
        print_kept(kind, path=path, reason=reason)
        on_event({"kind": kind, "path": path, "reason": reason})

    return OldFiles(report)


def _checkpoint_store(
    config: RunConfig, point: ResumePoint, exports: StepExports | None, old: OldFiles
) -> CheckpointStore:
    """Return a run's checkpoint store. On rank 0, also begin the exports that earlier starts missed."""
    newest = point.checkpoint.moment if point.checkpoint else (0, 0)
    if exports is None:
        return CheckpointStore(config.paths, config.checkpoint, newest)  # only rank 0 deletes
    means = evaluation_means(config.directory)
    scores = {step: mean for step, mean in means.items() if mean is not None}
    store = CheckpointStore(config.paths, config.checkpoint, newest, scores, exports.is_using, old)
    exports.resume(store.steps())
    return store


@contextmanager
def open_sampler(config: RunConfig, on_event: OnEvent) -> Iterator[tuple[Sampler, EngineServers]]:
    """Context manager: a run's sampler and engine servers; for ``rollout.replay`` a reader of the stored
    rollouts, and no servers. On rank 0. Sampling begins with the sampler's ``start``."""
    if config.rollout.replay is not None:
        yield ReplaySampler(config.rollout.replay), EngineServers()
        return
    with open_engines(config, on_event) as opened:
        yield opened


@contextmanager
def open_engines(config: RunConfig, on_event: OnEvent) -> Iterator[tuple[SamplerClient, EngineServers]]:
    """Context manager: the sampler process and the engine servers that the run starts. On rank 0. Reads the
    dataset and the suites first. On exit the sampler ends before its servers."""
    tokenizer = load_tokenizer(config.model.hf_path)
    tools, begun = tools_of(config), has_steps(config.directory)
    problems = load_problems(config.data, config.reward.function, tokenizer, tools, begun)
    suites = load_suites(config, tokenizer, tools)
    tell_left_out(problems, config.data)
    if told := control_tokens_text(problems.prompts, tokenizer):
        print(f"warning: {told}", flush=True)
    with engine_backend(config.rollout.engine).serve(config, has_cuda(), on_event) as servers:

        def on_sampler_event(event: dict[str, Any]) -> None:
            on_event(event)
            servers.heed(event)

        setup = Setup(config, problems, tuple(servers.urls), str(select_device()), suites)
        # Close the sampler before its servers; otherwise every server's end would be a lost engine.
        with closing(SamplerClient(setup, on_sampler_event)) as sampler:
            yield sampler, servers


def tell_left_out(problems: PromptSet, data: DataConfig) -> None:
    """Print how many problems of a dataset the length limit and difficulty range of ``data`` leave out."""
    if problems.too_long:
        print(f"left out {problems.too_long} prompts of more than {data.max_prompt_tokens} tokens")
    if left_out := problems.found - len(problems.prompts):
        print(f"left out {left_out} prompts by their {data.difficulty}")


def build_weight_sync(
    rollout: RolloutConfig,
    folder: Path,
    hf_path: Path,
    policy: MegatronPolicy,
    sampler: Sampler | None,
    servers: EngineServers | None,
    on_event: OnEvent,
) -> WeightSync:
    """Return the weight sync to the engines: the transport's sender, with a disk sync in ``folder`` as its
    fallback; in a replay one that sends nothing. Collective. ``hf_path``: folder of the model's config.
    ``sampler``, ``servers``: None except on rank 0."""
    if rollout.replay is not None:
        return NoSync()
    make = engine_backend(rollout.engine).weight_digester(rollout, hf_path, policy.device.type)
    disk = DiskSync(sampler, WeightStaging(folder, hf_path, _old_files(on_event)), make)
    parts = SenderParts(
        engine=rollout.engine_config,
        disk=disk,
        client=sampler if isinstance(sampler, SamplerClient) else None,
        gpus=servers.gpus if servers else {},
        device=policy.device,
        on_event=on_event,
        make_digester=make,
    )
    return sender(parts)
