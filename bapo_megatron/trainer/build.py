"""RunConfig to objects. The only place that chooses between implementations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from bapo_megatron.checkpoint.resume_check import LEARNING_RATE, certificate, differences
from bapo_megatron.checkpoint.run_directory import changed_settings, check_within_step, store_config
from bapo_megatron.checkpoint.step_exports import StepExports
from bapo_megatron.checkpoint.store import Checkpoint, CheckpointStore
from bapo_megatron.config import RunConfig
from bapo_megatron.data.difficulty import within_difficulty
from bapo_megatron.data.prompts import PromptSet, load_prompts
from bapo_megatron.data.suites import Suite, load_suite
from bapo_megatron.errors import ConfigError, ResumeError
from bapo_megatron.hf.tokenizer import load_tokenizer
from bapo_megatron.interfaces import Policy, Sampler, WeightSync
from bapo_megatron.policy.device import has_cuda, select_device
from bapo_megatron.policy.megatron import MegatronPolicy
from bapo_megatron.reward.functions import ground_truth_check
from bapo_megatron.rollout.engines.registry import engine_backend
from bapo_megatron.rollout.sampler.client import SamplerClient
from bapo_megatron.rollout.sampler.process import Setup
from bapo_megatron.rollout.sampler.step_batches import ReplaySampler
from bapo_megatron.rollout.weight_sync.broadcast import BroadcastSync, WeightBroadcast, sender_address
from bapo_megatron.rollout.weight_sync.disk import DiskSync, WeightStaging
from bapo_megatron.runtime.distributed import is_main, share
from bapo_megatron.runtime.preemption import PreemptionSignal
from bapo_megatron.runtime.watchdog import Watchdog
from bapo_megatron.trainer.clip_bounds import Clipping
from bapo_megatron.trainer.metrics_log import evaluation_means
from bapo_megatron.trainer.recorder import Recorder
from bapo_megatron.types import Metrics

Within = tuple[int, list[Metrics]]
"""A step that a checkpoint has cut: the policy's version at its start, and its updates so far."""


@dataclass
class Run:
    """The parts of a run on one rank."""

    config: RunConfig
    policy: Policy
    clip_bounds: Clipping
    sync: WeightSync
    checkpoints: CheckpointStore
    sampler: Sampler | None
    """Rank 0's; the others are sent its batches."""
    recorder: Recorder | None
    """Rank 0's."""
    first_step: int
    """1 for a new run, else the step after the checkpoint that it continues."""
    has_work: bool
    """Steps are left, or the evaluation of the last."""
    within: Within | None
    """The part of the first step that is done already."""
    preemption: PreemptionSignal
    watchdog: Watchdog
    exports: StepExports | None = None
    """Rank 0's."""


@contextmanager
def open_run(config: RunConfig, preemption: PreemptionSignal) -> Iterator[Run]:
    """The run of ``config``, continued from its newest whole checkpoint if it has one."""
    policy = build_policy(config)
    store = CheckpointStore(config.directory, config.checkpoint)
    clip_bounds = Clipping(config.algorithm, config.batch.hold_forwards)
    if is_main():
        store.clear_leftovers()
    latest = store.latest()
    first_step, within = latest.step + 1 if latest else 1, None
    has_work = first_step <= config.steps or share(is_main() and _lacks_its_end(config, latest))
    if latest:
        store.newest = latest.moment
        within = latest.trainer["within"] and tuple(latest.trainer["within"])
    changed = share(changed_settings(config) if is_main() else None)
    if within:
        check_within_step(changed, config)
    if latest:
        policy.load(latest.policy, latest.trainer["version"])
        clip_bounds.load_state(latest.trainer["clipping"])
    with ExitStack() as opened:
        recorder = sampler = staging = exports = None
        if is_main():
            if has_work:
                store_config(config)
            recorder = opened.enter_context(closing(Recorder(config, first_step, has_work)))
            if changed and has_work:
                recorder.event({"kind": "config_changed", "fields": {name: now for name, _, now in changed}})
            store.scores = evaluation_means(config.directory)
            exports = opened.enter_context(_exports(config, store, recorder))
        if recorder and has_work:
            sampler = opened.enter_context(_sampler(config, recorder.event))
            sampler.start(first_step, latest.trainer["sampler"] if latest else None)
            if config.rollout.replay is None:
                staging = WeightStaging(config.directory / "weights", config.model.hf_path)
        disk = DiskSync(sampler, staging)
        sync: WeightSync = disk
        if config.rollout.replay is None and config.rollout.engine_config.sync == "broadcast":
            sync = _broadcast_sync(config, policy, sampler, disk, recorder)
        if latest and has_work:
            _check_certificate(config, policy, sampler, latest)
        sync.push(policy, first_step - 1)
        watchdog = opened.enter_context(closing(Watchdog(config.hang_minutes)))
        yield Run(
            *(config, policy, clip_bounds, sync, store, sampler, recorder, first_step, has_work, within),
            *(preemption, watchdog, exports),
        )


def _lacks_its_end(config: RunConfig, latest: Checkpoint | None) -> bool:
    """Whether all steps are saved, and a kill has cut the evaluation of the last."""
    last = config.steps
    if not latest or (latest.step, latest.trainer["within"]) != (last, None) or not config.evaluates(last):
        return False
    return last not in evaluation_means(config.directory)


@contextmanager
def _exports(config: RunConfig, store: CheckpointStore, recorder: Recorder) -> Iterator[StepExports]:
    """Those of checkpoints, begun with what the run before has left undone."""
    every = config.checkpoint.export_every
    with closing(StepExports(config.directory, config.model.hf_path, every, recorder.event)) as exports:
        store.holds = exports.holds
        exports.resume(store.steps())
        yield exports


def _check_certificate(
    config: RunConfig, policy: Policy, sampler: Sampler | None, latest: Checkpoint
) -> None:
    """ResumeError, on every rank, if the run would not go on where it was."""
    found = certificate(config, policy, share(sampler.state() if sampler else None))
    lines = differences(config, latest.trainer["certificate"], found)
    if any(name.startswith("optimizer.") for name in config.allow_change):
        lines = [line for line in lines if not line.startswith(LEARNING_RATE)]
    if lines:
        raise ResumeError(f"{latest.path} does not come back as it was saved:\n" + "\n".join(lines))


def _broadcast_sync(
    config: RunConfig,
    policy: MegatronPolicy,
    sampler: Sampler | None,
    disk: DiskSync,
    recorder: Recorder | None,
) -> BroadcastSync:
    engine = config.rollout.engine_config
    if not isinstance(sampler, SamplerClient) or recorder is None:
        return BroadcastSync(None, None, disk, lambda _event: None)
    sender = WeightBroadcast(
        policy.device, sender_address(engine), engine.bucket_mb, 60 * engine.update_minutes
    )
    return BroadcastSync(sampler, sender, disk, recorder.event)


def build_policy(config: RunConfig) -> MegatronPolicy:
    """The policy with the weights of the recipe's model. Process groups must exist."""
    return MegatronPolicy(
        config.model,
        config.parallel,
        config.batch,
        config.optimizer,
        config.planned_updates,
        config.rollout.temperature,
    )


@contextmanager
def _sampler(config: RunConfig, on_event: Callable[[dict[str, Any]], None]) -> Iterator[Sampler]:
    """The sampler of a run, with the servers that the run starts."""
    if config.rollout.replay is not None:
        yield ReplaySampler(config.rollout.replay)
        return
    tokenizer = load_tokenizer(config.model.hf_path)
    problems = load_problems(config, tokenizer)
    if problems.too_long:
        print(f"left out {problems.too_long} prompts of more than {config.data.max_prompt_tokens} tokens")
    if left_out := problems.found - len(problems.prompts):
        print(f"left out {left_out} prompts by their {config.data.difficulty}")
    with engine_backend(config.rollout.engine).serve(config, has_cuda(), on_event) as servers:

        def heard(event: dict[str, Any]) -> None:
            on_event(event)
            servers.heed(event)

        suites = load_suites(config, tokenizer)
        setup = Setup(config, problems, tuple(servers.urls), str(select_device()), suites)
        with closing(SamplerClient(setup, heard)) as sampler:
            yield sampler


def load_suites(config: RunConfig, tokenizer: Any) -> tuple[Suite, ...]:
    """What evaluations during training ask. ConfigError if a suite does not exist, or two have one name."""
    if not config.evaluation.every or config.rollout.replay is not None:
        return ()
    found = [load_suite(name, tokenizer, config.data.max_prompt_tokens) for name in config.evaluation.suites]
    names = [suite.name for suite in found]
    if len(set(names)) < len(names):
        raise ConfigError(f"evaluation.suites: two of them are called alike ({', '.join(names)})")
    return tuple(found)


def load_problems(config: RunConfig, tokenizer: Any) -> PromptSet:
    """The training problems, tokenized, each with a ground truth that its reward can judge."""
    check = ground_truth_check(config.reward.function)
    found = load_prompts(config.data.path, tokenizer, config.data.max_prompt_tokens, check)
    return replace(found, prompts=within_difficulty(found.prompts, config.data), found=len(found.prompts))
