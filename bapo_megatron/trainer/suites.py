"""Loader of a run's evaluation suites, for the preflight and, on rank 0, the sampler process.

Imports no megatron-core, so that a failing preflight is fast.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bapo_megatron.checkpoint.run_directory import known_suites
from bapo_megatron.config import RunConfig
from bapo_megatron.data.prepare.options import SUITES
from bapo_megatron.data.problem_sets import NO_TOOLS, Suite, load_suite
from bapo_megatron.data.prompts import Tools
from bapo_megatron.errors import ConfigError


def load_suites(
    config: RunConfig, tokenizer: Any, tools: Mapping[str, Tools] = NO_TOOLS
) -> tuple[Suite, ...]:
    """Return a run's tokenized evaluation suites; empty without evaluations. ``tools``: of the environments,
    by source. Raises ConfigError if a suite does not exist, `reward.function` cannot score it (except suites
    that the run's last start had), or two have the same name."""
    if not config.evaluation.every:
        return ()
    known, limit = known_suites(config.directory), config.data.max_prompt_tokens
    reward = config.reward.function, "--reward.function"
    tools_of_suite = lambda suite: tools.get(config.source_of_suite(suite), ())  # noqa: E731
    suites = [
        load_suite(name, tokenizer, limit, SUITES, *reward, tools_of_suite, name in known)
        for name in config.evaluation.suites
    ]
    names = [suite.name for suite in suites]
    if len(set(names)) < len(names):
        raise ConfigError(f"evaluation.suites: two of them have one name ({', '.join(names)})")
    return tuple(suites)
