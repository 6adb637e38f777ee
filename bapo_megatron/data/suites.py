"""Evaluation suites: problem sets that ``bapo data prepare`` wrote, loaded by name, or files, by path.

ConfigError for a suite that does not exist, or with a problem that cannot be asked or scored. Used in this
folder, ``commands/doctor/``, ``evaluation/``, ``rollout/sampler/`` and ``trainer/``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bapo_megatron.data.prepare.options import CARD_FILE, DATA_FILE, SUITES
from bapo_megatron.data.prompts import Tools, load_prompts
from bapo_megatron.errors import ConfigError
from bapo_megatron.reward.code_tests import is_tests
from bapo_megatron.reward.functions import extra_info_check, ground_truth_check, reads_boxes, runs_code
from bapo_megatron.runtime.files import sha256_of
from bapo_megatron.types import Prompt

REWARD_FUNCTION = "math_or_code"
"""Default reward function of `bapo eval`: math or code, by the form of each ground truth."""


@dataclass(frozen=True)
class Suite:
    """Evaluation suite: the tokenized problems of one benchmark, none of which is left out.

    Made by ``load_suite`` for `bapo eval` and for held-out evaluations during training.
    """

    name: str
    path: Path
    sha256: str
    """SHA-256 of the suite's file."""
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
    check_prepared_for(path, reward_function, reward_flag)
    try:
        checks = ground_truth_check(reward_function, begun), extra_info_check(reward_function)
        found = load_prompts(path, tokenizer, max_prompt_tokens, *checks, tools_of(name), begun)
    except ConfigError as error:  # its message names the fields of a run
        told = str(error).replace(f"data.path={path}", f"suite {text}, {path}")
        told = told.replace("data.max_prompt_tokens", "max_prompt_tokens")
        raise ConfigError(told.replace("reward.function=", f"{reward_flag.removeprefix('--')}=")) from error
    if found.too_long:
        raise ConfigError(
            f"suite {text}: {found.too_long} of its prompts have more than max_prompt_tokens="
            f"{max_prompt_tokens} tokens; raise that, because all problems must be asked"
        )
    return Suite(name, path, sha256_of(path), found.prompts)


def programs_of(suite: Suite, reward_function: str) -> frozenset[int]:
    """Numbers of the problems of a suite that ask for a program: a box in a response is no answer to them."""
    if not runs_code(reward_function):
        return frozenset()
    return frozenset(number for number, one in enumerate(suite.prompts) if is_tests(one.ground_truth))


def check_prepared_for(path: Path, reward_function: str, reward_flag: str) -> None:
    """Check of the data card: ConfigError if the file was prepared for a reward that reads no boxed answers.

    Its ground truths may be any text: the built-in ``reward_function`` would score every response as wrong.
    """
    card = path.with_name(CARD_FILE)
    if path.name != DATA_FILE or not card.is_file() or not reads_boxes(reward_function):
        return
    with suppress(ValueError, KeyError, TypeError):  # not a card of ours
        prepared_for = str(json.loads(card.read_text())["options"]["reward"])
        if not reads_boxes(prepared_for):
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
