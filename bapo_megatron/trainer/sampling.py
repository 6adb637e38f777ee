"""Construction of the sampler, its engine servers and the weight sync of a run, from its configuration.

``open_sampler`` and ``open_engines`` are context managers for rank 0: they start processes (a replay none),
and end them with the block. ``build_weight_sync`` is called on every rank. ``load_suites`` reads the held-out
problems. Used by ``build.py``, ``preflight.py`` and
``rollout_only.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from bapo_megatron.checkpoint.run_directory import has_steps, known_suites
from bapo_megatron.config import RolloutConfig, RunConfig
from bapo_megatron.data.prepare.options import SUITES
from bapo_megatron.data.problem_sets import NO_TOOLS, Suite, load_problems, load_suite
from bapo_megatron.data.prompts import Tools
from bapo_megatron.errors import ConfigError
from bapo_megatron.hf.tokenizer import load_tokenizer
from bapo_megatron.interfaces import Sampler, WeightSync
from bapo_megatron.policy.device import has_cuda, select_device
from bapo_megatron.policy.megatron import MegatronPolicy
from bapo_megatron.rollout.engines.backend import EngineServers
from bapo_megatron.rollout.engines.registry import engine_backend
from bapo_megatron.rollout.sampler.client import SamplerClient
from bapo_megatron.rollout.sampler.process import Setup
from bapo_megatron.rollout.sampler.step_batches import ReplaySampler
from bapo_megatron.rollout.sampler.turns import tools_of
from bapo_megatron.rollout.weight_sync.broadcast import BroadcastSync, WeightBroadcast, sender_address
from bapo_megatron.rollout.weight_sync.disk import DiskSync, WeightStaging
from bapo_megatron.rollout.weight_sync.ipc import IpcSync

OnEvent = Callable[[dict[str, Any]], None]
"""Records an event: its kind and its fields."""


@contextmanager
def open_sampler(config: RunConfig, on_event: OnEvent) -> Iterator[tuple[Sampler, EngineServers]]:
    """Context manager: the sampler of a run with its engine servers, or of ``rollout.replay`` without any.

    On rank 0. The sampler does not sample before its ``start``.
    """
    if config.rollout.replay is not None:
        yield ReplaySampler(config.rollout.replay), EngineServers()
        return
    with open_engines(config, on_event) as opened:
        yield opened


@contextmanager
def open_engines(config: RunConfig, on_event: OnEvent) -> Iterator[tuple[SamplerClient, EngineServers]]:
    """Context manager: the sampler's process and the engine servers that the run starts. On rank 0.

    Reads the dataset and the suites first. Both end with the block, the sampler before its servers.
    """
    tokenizer = load_tokenizer(config.model.hf_path)
    tools, begun = tools_of(config), has_steps(config.directory)
    problems = load_problems(config.data, config.reward.function, tokenizer, tools, begun)
    suites = load_suites(config, tokenizer, tools)
    if problems.too_long:
        print(f"left out {problems.too_long} prompts of more than {config.data.max_prompt_tokens} tokens")
    if left_out := problems.found - len(problems.prompts):
        print(f"left out {left_out} prompts by their {config.data.difficulty}")
    with engine_backend(config.rollout.engine).serve(config, has_cuda(), on_event) as servers:

        def on_sampler_event(event: dict[str, Any]) -> None:
            on_event(event)
            servers.heed(event)

        setup = Setup(config, problems, tuple(servers.urls), str(select_device()), suites)
        # The sampler closes before its servers: else every server's end would be a lost engine.
        with closing(SamplerClient(setup, on_sampler_event)) as sampler:
            yield sampler, servers


def load_suites(
    config: RunConfig, tokenizer: Any, tools: Mapping[str, Tools] = NO_TOOLS
) -> tuple[Suite, ...]:
    """Evaluation suites of a run, tokenized; none if it has no evaluations.

    ``tools``: of the environments, by source. ConfigError if a suite does not exist, `reward.function` cannot
    score it (but for suites of the run's earlier steps), or two have one name.
    """
    if not config.evaluation.every:
        return ()
    known, limit = known_suites(config.directory), config.data.max_prompt_tokens
    reward = config.reward.function, "--reward.function"
    tools_of_suite = lambda suite: tools.get(config.source_of_suite(suite), ())  # noqa: E731
    found = [
        load_suite(name, tokenizer, limit, SUITES, *reward, tools_of_suite, name in known)
        for name in config.evaluation.suites
    ]
    names = [suite.name for suite in found]
    if len(set(names)) < len(names):
        raise ConfigError(f"evaluation.suites: two of them have one name ({', '.join(names)})")
    return tuple(found)


def build_weight_sync(
    rollout: RolloutConfig,
    folder: Path,
    hf_path: Path,
    policy: MegatronPolicy,
    sampler: Sampler | None,
    servers: EngineServers | None,
    on_event: OnEvent,
) -> WeightSync:
    """Weight sync to the engines: by files in ``folder``, by broadcast, or by CUDA IPC handles. Collective.

    ``hf_path``: the folder of the model's config. ``sampler``, ``servers``: None on every rank but 0.
    """
    samples, engine = rollout.replay is None, rollout.engine_config
    make = (
        engine_backend(rollout.engine).weight_digester(rollout, hf_path, policy.device.type)
        if samples
        else None
    )
    disk = DiskSync(sampler, WeightStaging(folder, hf_path) if samples else None, make)
    if not samples or engine.sync == "disk":
        return disk
    client = sampler if isinstance(sampler, SamplerClient) else None
    if engine.sync == "ipc":
        gpus = servers.gpus if servers else {}
        return IpcSync(disk, client, gpus, policy.device, engine.bucket_mb, on_event, make)
    if client is None:
        return BroadcastSync(None, None, disk, on_event)
    # Longer than the engines wait: their error, which names the engine, must come first.
    timeout_s = 1.1 * 60 * engine.update_minutes
    sender = WeightBroadcast(policy.device, sender_address(engine), engine.bucket_mb, timeout_s)
    return BroadcastSync(client, sender, disk, on_event, make)
