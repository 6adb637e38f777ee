"""Loader of a run's training problems, from its one file or from several sources (``data.sources``).

Preflight and the sampler call ``load_problems``; it tokenizes all rows. ConfigError for the first invalid
row. Used by ``trainer/preflight.py``, ``trainer/build.py`` and ``trainer/sft.py``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from bapo_megatron.config import DataConfig, SourceConfig
from bapo_megatron.data.prompts import MixedSource, PromptSet, Tools, load_prompts
from bapo_megatron.data.rows import within_difficulty
from bapo_megatron.data.suites import check_prepared_for
from bapo_megatron.errors import ConfigError
from bapo_megatron.reward.functions import extra_info_check, ground_truth_check
from bapo_megatron.runtime.files import sha256_of

NO_TOOLS: Mapping[str, Tools] = MappingProxyType({})
"""Of environments that describe none."""


def load_problems(
    data: DataConfig,
    reward_function: str,
    tokenizer: Any,
    tools: Mapping[str, Tools] = NO_TOOLS,
    begun: bool = False,
) -> PromptSet:
    """Load the training problems, tokenized; each ground truth is valid for its reward function.

    ``reward_function``: that of sources without one of their own. ``tools``: of the environments, by source
    (``RunConfig.environments``). ``begun``: whether the run has steps, as in ``ground_truth_check``.
    ConfigError as ``load_prompts``.
    """
    digest = _tools_digest(tools)
    if not data.sources:
        own = tools.get("", ())
        found = _load(data, data.files[0], reward_function, "--reward.function", tokenizer, own, begun)
        return replace(found, tools_sha256=digest)
    sets = [
        _load_source(data, source, reward_function, tokenizer, tools.get(source.name, ()), begun)
        for source in data.sources
    ]
    return PromptSet(
        tuple(prompt for one in sets for prompt in one.prompts),
        sum(one.too_long for one in sets),
        sum(one.found for one in sets),
        tuple(mixed(source, one) for source, one in zip(data.sources, sets, strict=True)),
        digest,
    )


def _tools_digest(tools: Mapping[str, Tools]) -> str:
    named = {name: list(schemas) for name, schemas in tools.items() if schemas}
    return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest() if named else ""


def mixed(source: SourceConfig, found: PromptSet) -> MixedSource:
    """Source of a mixture, from its configuration and its loaded prompts."""
    return MixedSource(source.name, len(found.prompts), source.weight, sha256_of(source.file))


def _load_source(
    data: DataConfig, source: SourceConfig, reward_function: str, tokenizer: Any, tools: Tools, begun: bool
) -> PromptSet:
    flag = "--reward.function" if source.reward is None else f"data.sources[{source.name}].reward"
    try:
        found = _load(data, source, source.reward or reward_function, flag, tokenizer, tools, begun)
    except ConfigError as error:  # its message names `data.path`
        field = f"data.sources[{source.name}].path"
        told = str(error).replace(f"data.path={source.file}", f"{field}={source.file}")
        named = source.name in told
        raise ConfigError(told if named else f"data.sources[{source.name}]: {told}") from error
    prompts = tuple(replace(one, source=source.name, reward=source.reward or "") for one in found.prompts)
    return replace(found, prompts=prompts)


def _load(
    data: DataConfig,
    source: SourceConfig,
    function: str,
    flag: str,
    tokenizer: Any,
    tools: Tools,
    begun: bool,
) -> PromptSet:
    check_prepared_for(source.file, function, flag)
    checks = ground_truth_check(function, begun), extra_info_check(function)
    found = load_prompts(source.file, tokenizer, data.max_prompt_tokens, *checks, tools, begun)
    return replace(found, prompts=within_difficulty(found.prompts, data), found=len(found.prompts))
