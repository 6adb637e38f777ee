"""RunConfig to objects. The only place that chooses between implementations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Any

from bapo_megatron.clipping import Clipping
from bapo_megatron.config import RunConfig
from bapo_megatron.data.prompts import PromptSet, load_prompts
from bapo_megatron.data.tokenizer import load_tokenizer
from bapo_megatron.distributed import is_main, share
from bapo_megatron.interfaces import Engine, Policy, Sampler, WeightSync
from bapo_megatron.policy.device import has_cuda, select_device
from bapo_megatron.policy.megatron import MegatronPolicy
from bapo_megatron.record import Recorder
from bapo_megatron.reward.math import MathReward, check_ground_truth
from bapo_megatron.rollout.journal import ReplaySampler
from bapo_megatron.rollout.local import LocalEngine
from bapo_megatron.rollout.sampler import GroupSampler
from bapo_megatron.rollout.sglang.engine import SglangEngine
from bapo_megatron.rollout.sglang.servers import servers_of
from bapo_megatron.state.checkpoint import CheckpointStore
from bapo_megatron.state.run_directory import store_config
from bapo_megatron.sync.in_process import InProcessSync


@dataclass
class Run:
    """The parts of a run on one rank."""

    config: RunConfig
    policy: Policy
    clipping: Clipping
    sync: WeightSync
    checkpoints: CheckpointStore
    sampler: Sampler | None
    """Rank 0's; the others are sent its batches."""
    recorder: Recorder | None
    """Rank 0's."""
    first_step: int
    """1 for a new run, else the step after the checkpoint that it continues."""


@contextmanager
def open_run(config: RunConfig) -> Iterator[Run]:
    """The run of ``config``, continued from its newest whole checkpoint if it has one."""
    policy = build_policy(config)
    opened = ExitStack()
    engine = opened.enter_context(_engine(config)) if is_main() and config.rollout.replay is None else None
    sampler = _sampler(config, engine) if is_main() else None
    sync = InProcessSync(engine)
    store = CheckpointStore(config.directory, config.checkpoint.keep_last)
    clipping = Clipping(config.algorithm, config.batch.hold_forwards)
    first_step = _continue(policy, clipping, sampler, store)
    recorder = None
    if is_main():
        if first_step <= config.steps:
            store_config(config)
        recorder = Recorder(config, first_step)
    sync.push(policy)
    try:
        yield Run(config, policy, clipping, sync, store, sampler, recorder, first_step)
    finally:
        if recorder:
            recorder.close()
        opened.close()


def _continue(policy: Policy, clipping: Clipping, sampler: Sampler | None, store: CheckpointStore) -> int:
    """Load the newest whole checkpoint; the number of the first step to make."""
    latest = share(store.latest() if is_main() else None)
    if latest is None:
        return 1
    policy.load(latest.policy, latest.trainer["version"])
    clipping.load_state(latest.trainer["clipping"])
    if sampler:
        sampler.load_state(latest.trainer["sampler"])
    return latest.step + 1


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
def _engine(config: RunConfig) -> Iterator[Engine]:
    """The engine of a run, with the servers that it starts."""
    rollout, model = config.rollout, config.model
    with ExitStack() as opened:
        if rollout.engine == "local":
            local = LocalEngine(model.hf_path, rollout.max_batch, model.dtype, str(select_device()))
            yield opened.enter_context(closing(local))
            return
        urls = opened.enter_context(servers_of(config, has_cuda()))
        timeout = 60 * rollout.sglang.update_minutes
        staging = config.directory / "weights"
        served = SglangEngine(urls, model.hf_path, staging, rollout.sglang.on_update, timeout)
        yield opened.enter_context(closing(served))


def _sampler(config: RunConfig, engine: Engine | None) -> Sampler:
    if engine is None:
        assert config.rollout.replay is not None
        return ReplaySampler(config.rollout.replay)
    tokenizer = load_tokenizer(config.model.hf_path)
    problems = load_problems(config, tokenizer)
    if problems.too_long:
        print(f"left out {problems.too_long} prompts of more than {config.data.max_prompt_tokens} tokens")
    reward = MathReward(config.reward.correct, config.reward.wrong)
    return GroupSampler(engine, problems.prompts, reward, config, tokenizer)


def load_problems(config: RunConfig, tokenizer: Any) -> PromptSet:
    """The training problems, tokenized, each with a ground truth that its reward can judge."""
    return load_prompts(config.data.path, tokenizer, config.data.max_prompt_tokens, check_ground_truth)
