"""The sampler of a run, and the way of the weights to its engines, as the configuration asks for them."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from bapo_megatron.config import DataConfig, EvaluationConfig, RolloutConfig, RunConfig
from bapo_megatron.data.difficulty import within_difficulty
from bapo_megatron.data.prompts import PromptSet, load_prompts
from bapo_megatron.data.suites import Suite, load_suite
from bapo_megatron.errors import ConfigError
from bapo_megatron.hf.tokenizer import load_tokenizer
from bapo_megatron.interfaces import Sampler, WeightSync
from bapo_megatron.policy.device import has_cuda, select_device
from bapo_megatron.policy.megatron import MegatronPolicy
from bapo_megatron.reward.functions import ground_truth_check
from bapo_megatron.rollout.engines.sglang.supervisor import are_local, servers_of
from bapo_megatron.rollout.sampler.client import SamplerClient
from bapo_megatron.rollout.sampler.process import Setup
from bapo_megatron.rollout.sampler.step_batches import ReplaySampler
from bapo_megatron.rollout.weight_sync.broadcast import WeightBroadcast
from bapo_megatron.rollout.weight_sync.broadcast_sync import BroadcastSync
from bapo_megatron.rollout.weight_sync.disk import DiskSync
from bapo_megatron.rollout.weight_sync.staging import WeightStaging

OnEvent = Callable[[dict[str, Any]], None]
"""Records an event: its kind and its fields."""


@contextmanager
def open_sampler(config: RunConfig, on_event: OnEvent) -> Iterator[Sampler]:
    """The sampler of a run, with the servers that the run starts. Rank 0 alone has one."""
    if config.rollout.replay is not None:
        yield ReplaySampler(config.rollout.replay)
        return
    tokenizer = load_tokenizer(config.model.hf_path)
    problems = load_problems(config.data, config.reward.function, tokenizer)
    suites = load_suites(config.evaluation, config.data.max_prompt_tokens, tokenizer)
    if problems.too_long:
        print(f"left out {problems.too_long} prompts of more than {config.data.max_prompt_tokens} tokens")
    if left_out := problems.found - len(problems.prompts):
        print(f"left out {left_out} prompts by their {config.data.difficulty}")
    with ExitStack() as opened:
        servers = None
        if config.rollout.engine == "sglang":
            servers = opened.enter_context(servers_of(config, has_cuda(), on_event))

        def on_sampler_event(event: dict[str, Any]) -> None:
            on_event(event)
            if servers:
                servers.heed(event)

        urls = tuple(servers.urls if servers else ())
        setup = Setup(config, problems, urls, str(select_device()), suites)
        yield opened.enter_context(closing(SamplerClient(setup, on_sampler_event)))


def load_problems(data: DataConfig, reward_function: str, tokenizer: Any) -> PromptSet:
    """The training problems, tokenized, each with a ground truth that ``reward_function`` can judge."""
    check = ground_truth_check(reward_function)
    found = load_prompts(data.path, tokenizer, data.max_prompt_tokens, check)
    return replace(found, prompts=within_difficulty(found.prompts, data), found=len(found.prompts))


def load_suites(evaluation: EvaluationConfig, max_prompt_tokens: int, tokenizer: Any) -> tuple[Suite, ...]:
    """The held-out problems of evaluations during training, tokenized; none if there are no evaluations.

    ConfigError if a suite does not exist, or two have one name.
    """
    if not evaluation.every:
        return ()
    found = [load_suite(name, tokenizer, max_prompt_tokens) for name in evaluation.suites]
    names = [suite.name for suite in found]
    if len(set(names)) < len(names):
        raise ConfigError(f"evaluation.suites: two of them are called alike ({', '.join(names)})")
    return tuple(found)


def build_weight_sync(
    rollout: RolloutConfig,
    folder: Path,
    hf_path: Path,
    policy: MegatronPolicy,
    sampler: Sampler | None,
    on_event: OnEvent,
) -> WeightSync:
    """The way of the weights to the engines: by broadcast, or as files in ``folder``. Collective.

    ``hf_path``: the folder of the model's config. ``sampler``: None on every rank but 0.
    """
    samples = rollout.replay is None
    disk = DiskSync(sampler, WeightStaging(folder, hf_path) if sampler and samples else None)
    if not samples or rollout.engine != "sglang" or rollout.sglang.sync != "broadcast":
        return disk
    if not isinstance(sampler, SamplerClient):
        return BroadcastSync(None, None, disk, on_event)
    sglang = rollout.sglang
    address = sglang.address or ("127.0.0.1" if are_local(sglang.urls) else socket.gethostname())
    sender = WeightBroadcast(policy.device, address, sglang.bucket_mb, 60 * sglang.update_minutes)
    return BroadcastSync(sampler, sender, disk, on_event)
