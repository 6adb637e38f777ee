"""Problem sets, loaded and checked for their reward: a run's training problems, and evaluation suites.

``load_problems`` returns the tokenized training problems of one file or several sources (``data.sources``),
without those that are too long or outside the range of difficulties, which it counts. ``load_suite`` returns
all problems of a suite, a folder of `bapo data prepare` or a file; a prompt that is too long is an error.
Both raise ConfigError for the first row that is invalid or that the reward cannot score.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bapo_megatron.config import DataConfig, SourceConfig
from bapo_megatron.config.validation import BOXED_REWARDS
from bapo_megatron.data.chat_template import spelled_control_token
from bapo_megatron.data.prepare.options import CARD_FILE, DATA_FILE, SUITES
from bapo_megatron.data.prompts import MixedSource, PromptSet, Tools, load_prompts
from bapo_megatron.data.rows import within_difficulty
from bapo_megatron.errors import ConfigError
from bapo_megatron.reward.code_tests import is_tests
from bapo_megatron.reward.functions import extra_info_check, ground_truth_check, runs_code
from bapo_megatron.runtime.files import sha256_of
from bapo_megatron.types import Prompt

REWARD_FUNCTION = "math_or_code"
"""Default reward of `bapo eval`: math or code, by each ground truth's form."""

NO_TOOLS: Mapping[str, Tools] = MappingProxyType({})
"""Tools of environments that describe none."""


def load_problems(
    data: DataConfig,
    reward_function: str,
    tokenizer: Any,
    tools: Mapping[str, Tools] = NO_TOOLS,
    begun: bool = False,
) -> PromptSet:
    """Load the training problems, tokenized, with valid ground truths; drop by length and difficulty.

    ``reward_function``: that of sources without their own. ``tools``: environments' tools by source
    (``RunConfig.environments``). ``begun``: whether the run has steps, as in ``ground_truth_check``. Raises
    ConfigError as ``load_prompts``, ``within_difficulty`` and ``check_prepared_for`` do.
    """

    def load(source: SourceConfig, name: str = "", field: str = "data.path") -> PromptSet:
        function, limit = source.reward or reward_function, data.max_prompt_tokens
        flag = "--reward.function" if source.reward is None else f"{field.removesuffix('.path')}.reward"
        described = tools.get(name, ())
        loaded = _load(source.file, function, flag, tokenizer, limit, described, begun, field)
        prompts = within_difficulty(loaded.prompts, data)
        if name:
            prompts = tuple(replace(one, source=name, reward=source.reward or "") for one in prompts)
        return replace(loaded, prompts=prompts)

    digest = _tools_digest(tools)
    if not data.sources:
        return replace(load(data.files[0]), tools_sha256=digest)
    sets = [load(source, source.name, f"data.sources[{source.name}].path") for source in data.sources]
    return PromptSet(
        tuple(prompt for prompts in sets for prompt in prompts.prompts),
        sum(prompts.too_long for prompts in sets),
        sum(prompts.found for prompts in sets),
        tuple(mixed(source, prompts) for source, prompts in zip(data.sources, sets, strict=True)),
        digest,
    )


def control_tokens_text(prompts: Sequence[Prompt], tokenizer: Any) -> str | None:
    """Return a warning about prompts whose text contains control tokens, as rendered ones do, or None."""
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
    """Yield an error for each missing training file; ``load_problems`` raises only the first."""
    for source in data.files:
        if not source.file.is_file():
            field = f"data.sources[{source.name}].path" if data.sources else "data.path"
            yield f"{field}={source.file}: no such file"


def _tools_digest(tools: Mapping[str, Tools]) -> str:
    named = {name: list(schemas) for name, schemas in tools.items() if schemas}
    return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest() if named else ""


def mixed(source: SourceConfig, prompts: PromptSet) -> MixedSource:
    """Return a source for ``Mixture`` from its configuration and loaded prompts; hashes its file."""
    return MixedSource(source.name, len(prompts.prompts), source.weight, sha256_of(source.file))


def _load(
    path: Path, function: str, flag: str, tokenizer: Any, limit: int, tools: Tools, begun: bool, field: str
) -> PromptSet:
    check_prepared_for(path, function, flag)
    checks = ground_truth_check(function, begun), extra_info_check(function)
    return load_prompts(path, tokenizer, limit, *checks, tools, begun, field)


# --- suites --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Suite:
    """Evaluation suite: name, file, digest, and all tokenized problems of one benchmark."""

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
    """Load the evaluation suite named ``text``, a folder in ``folder``, or at that path.

    Raises ConfigError if it does not exist, if a row is invalid for ``reward_function``, or if a prompt is
    too long: nothing is dropped. ``reward_flag``: flag that names another reward. ``tools_of``: maps the
    suite's name to its environment's tools. ``begun``: for a run with steps, as in ``load_problems``.
    """
    path = suite_path(text, folder)
    name = path.parent.name if path.name == DATA_FILE else path.stem
    limit, tools = max_prompt_tokens, tools_of(name)
    loaded = _load(path, reward_function, reward_flag, tokenizer, limit, tools, begun, f"suite {text}")
    if loaded.too_long:
        raise ConfigError(
            f"suite {text}: {loaded.too_long} of its prompts have more than max_prompt_tokens="
            f"{max_prompt_tokens} tokens; raise that, because all problems must be asked"
        )
    return Suite(name, path, sha256_of(path), loaded.prompts)


def programs_of(suite: Suite, reward_function: str) -> frozenset[int]:
    """Return indices of a suite's problems whose answer is a program; empty if the reward runs no code."""
    if not runs_code(reward_function):
        return frozenset()
    return frozenset(number for number, prompt in enumerate(suite.prompts) if is_tests(prompt.ground_truth))


def check_prepared_for(path: Path, reward_function: str, reward_flag: str) -> None:
    """Raise ConfigError if the data card says that the file was prepared for a reward without boxed answers.

    Its ground truths may be any text, so the built-in ``reward_function`` would score every response as
    wrong.
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
    """Return a suite's file. Raises ConfigError, with the command that makes one, if there is none."""
    named = folder / text / DATA_FILE
    for path in (named, Path(text) / DATA_FILE, Path(text)):
        if path.is_file():
            return path
    raise ConfigError(
        f"suite {text}: there is neither {named} nor a file of that path; make it with "
        f"`bapo data prepare SOURCE --output {folder / text}` (docs/data.md names the sources)"
    )
