"""Problem sets, loaded for their reward: a run's training problems, and evaluation suites.

Training problems come from one file or from several sources (``data.sources``), suites by their names, from
folders that ``bapo data prepare`` wrote, or from files. All rows are tokenized. ConfigError for the first row
that is invalid, or cannot be scored.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bapo_megatron.config import DataConfig, SourceConfig
from bapo_megatron.config.validation import BOXED_REWARDS
from bapo_megatron.data.chat_template import spelled_control_token
from bapo_megatron.data.prepare.options import CARD_FILE, DATA_FILE, SUITES
from bapo_megatron.data.prompts import MixedSource, PromptSet, Tools, load_prompts
from bapo_megatron.data.rows import read_rows, within_difficulty
from bapo_megatron.errors import ConfigError
from bapo_megatron.reward.code_tests import is_tests
from bapo_megatron.reward.functions import extra_info_check, ground_truth_check, runs_code
from bapo_megatron.runtime.files import sha256_of
from bapo_megatron.types import Prompt

REWARD_FUNCTION = "math_or_code"
"""Default reward function of `bapo eval`: math or code, by the form of each ground truth."""

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

    def load(source: SourceConfig, flag: str, described: Tools) -> PromptSet:
        function, limit = source.reward or reward_function, data.max_prompt_tokens
        loaded = _load(source.file, function, flag, tokenizer, limit, described, begun)
        return replace(loaded, prompts=within_difficulty(loaded.prompts, data))

    digest = _tools_digest(tools)
    if not data.sources:
        loaded = load(data.files[0], "--reward.function", tools.get("", ()))
        return replace(loaded, tools_sha256=digest)
    sets = [_named(source, partial(load, described=tools.get(source.name, ()))) for source in data.sources]
    return PromptSet(
        tuple(prompt for prompts in sets for prompt in prompts.prompts),
        sum(prompts.too_long for prompts in sets),
        sum(prompts.found for prompts in sets),
        tuple(mixed(source, prompts) for source, prompts in zip(data.sources, sets, strict=True)),
        digest,
    )


def control_tokens_text(prompts: Sequence[Prompt], tokenizer: Any) -> str | None:
    """The text of a warning of prompts that spell a control token, as rendered ones do; None if none does."""
    spelled = [(one, spelled_control_token(one.messages, tokenizer)) for one in prompts]
    spelling = [(prompt, token) for prompt, token in spelled if token]
    if not spelling:
        return None
    prompt, token = spelling[0]
    of_source = f" of source {prompt.source}" if prompt.source else ""
    return (
        f"{len(spelling)} of {len(prompts)} prompts spell a control token, which the model gets as text "
        f"(first: row {prompt.prompt_id}{of_source}, {token!r}). If they were rendered by a chat template, "
        "give their messages (docs/data.md#which-fields-are-understood)"
    )


def missing_files(data: DataConfig) -> Iterator[str]:
    """Errors of the training data's files that do not exist, as ``load_problems`` raises them one by one."""
    for source in data.files:
        if not source.file.is_file():
            field = f"data.sources[{source.name}].path" if data.sources else "data.path"
            try:
                read_rows(source.file)
            except ConfigError as error:
                yield str(error).replace("data.path=", f"{field}=", 1)


def _tools_digest(tools: Mapping[str, Tools]) -> str:
    named = {name: list(schemas) for name, schemas in tools.items() if schemas}
    return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest() if named else ""


def mixed(source: SourceConfig, prompts: PromptSet) -> MixedSource:
    """Source of a mixture, from its configuration and its loaded prompts."""
    return MixedSource(source.name, len(prompts.prompts), source.weight, sha256_of(source.file))


def _named(source: SourceConfig, load: Callable[[SourceConfig, str], PromptSet]) -> PromptSet:
    """Prompts of one source of several, with its name, in messages, too."""
    flag = "--reward.function" if source.reward is None else f"data.sources[{source.name}].reward"
    try:
        loaded = load(source, flag)
    except ConfigError as error:  # its message names `data.path`
        field = f"data.sources[{source.name}].path"
        told = str(error).replace(f"data.path={source.file}", f"{field}={source.file}")
        named = source.name in told
        raise ConfigError(told if named else f"data.sources[{source.name}]: {told}") from error
    prompts = tuple(
        replace(prompt, source=source.name, reward=source.reward or "") for prompt in loaded.prompts
    )
    return replace(loaded, prompts=prompts)


def _load(
    path: Path, function: str, flag: str, tokenizer: Any, most_tokens: int, tools: Tools, begun: bool
) -> PromptSet:
    check_prepared_for(path, function, flag)
    checks = ground_truth_check(function, begun), extra_info_check(function)
    return load_prompts(path, tokenizer, most_tokens, *checks, tools, begun)


# --- suites --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Suite:
    """Evaluation suite: the tokenized problems of one benchmark, none of which is left out."""

    name: str
    path: Path
    sha256: str
    prompts: tuple[Prompt, ...]


def load_suite(
    text: str,
    tokenizer: Any,
    max_prompt_tokens: int,
    folder: Path = SUITES,
    reward_function: str = REWARD_FUNCTION,
    reward_flag: str = "--reward",
    tools_of: Callable[[str], Tools] = lambda _suite: (),
    begun: bool = False,
) -> Suite:
    """Load the evaluation suite of the name or at the path ``text``; names are folders in ``folder``.

    ConfigError if it does not exist, if a row is wrong for ``reward_function``, or if a prompt is too long:
    nothing is left out. ``reward_flag`` is the flag that names another reward. ``tools_of``: from the suite's
    name to the tools of its environment. ``begun``: for a run with steps, as in ``load_problems``.
    """
    path = suite_path(text, folder)
    name = path.parent.name if path.name == DATA_FILE else path.stem
    try:
        loaded = _load(
            path, reward_function, reward_flag, tokenizer, max_prompt_tokens, tools_of(name), begun
        )
    except ConfigError as error:  # its message names the fields of a run
        told = str(error).replace(f"data.path={path}", f"suite {text}, {path}")
        told = told.replace("data.max_prompt_tokens", "max_prompt_tokens")
        raise ConfigError(told.replace("reward.function=", f"{reward_flag.removeprefix('--')}=")) from error
    if loaded.too_long:
        raise ConfigError(
            f"suite {text}: {loaded.too_long} of its prompts have more than max_prompt_tokens="
            f"{max_prompt_tokens} tokens; raise that, because all problems must be asked"
        )
    return Suite(name, path, sha256_of(path), loaded.prompts)


def programs_of(suite: Suite, reward_function: str) -> frozenset[int]:
    """Numbers of the problems of a suite that ask for a program: a box in a response is not an answer to
    them."""
    if not runs_code(reward_function):
        return frozenset()
    return frozenset(number for number, prompt in enumerate(suite.prompts) if is_tests(prompt.ground_truth))


def check_prepared_for(path: Path, reward_function: str, reward_flag: str) -> None:
    """Check of the data card: ConfigError if the file was prepared for a reward that reads no boxed answers.

    Its ground truths may be any text: the built-in ``reward_function`` would score every response as wrong.
    """
    card = path.with_name(CARD_FILE)
    if path.name != DATA_FILE or not card.is_file() or reward_function not in BOXED_REWARDS:
        return
    with suppress(ValueError, KeyError, TypeError):  # not a card of `bapo data prepare`
        prepared_for = str(json.loads(card.read_text())["options"]["reward"])
        if prepared_for not in BOXED_REWARDS:
            field = reward_flag.removeprefix("--")
            raise ConfigError(
                f"{field}={reward_function}, but {path} was prepared for {prepared_for}: add "
                f"{reward_flag} {prepared_for}, or prepare it again without --reward"
            )


def suite_path(text: str, folder: Path) -> Path:
    """File of a suite. ConfigError, with the command that makes one, if there is none."""
    named = folder / text / DATA_FILE
    for path in (named, Path(text) / DATA_FILE, Path(text)):
        if path.is_file():
            return path
    raise ConfigError(
        f"suite {text}: there is neither {named} nor a file of that path; make it with "
        f"`bapo data prepare SOURCE --output {folder / text}` (docs/data.md names the sources)"
    )
