"""Prompt dataset: reads a problem file, tokenizes its prompts, and orders them reproducibly.

``load_prompts`` returns a file's ``PromptSet``, all in memory. It drops and counts prompts that are too long,
without a message; for the first invalid row it raises ConfigError. A row has ``prompt`` (chat messages),
``reward_model.ground_truth``, ``data_source`` and ``extra_info``, as in Skywork-OR1-RL-Data. ``data_order``
returns the order of the prompts, a function of the seed: epochs of one file, or sources mixed by weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from bapo_megatron.data.chat_template import chat_template_of
from bapo_megatron.data.rows import (
    Row,
    RowError,
    extra_info_of,
    field_of,
    ground_truth_of,
    media_problem,
    messages_of,
    read_rows,
)
from bapo_megatron.environment import PROMPT_TOOLS
from bapo_megatron.errors import ConfigError
from bapo_megatron.reward.answer_text import THINKING
from bapo_megatron.types import Prompt

_END_TOKENS = 16
"""Number of final tokens that contain ``<think>`` and white space, even if it is several tokens."""

Tools = Sequence[Mapping[str, Any]] | None
"""Schemas of an environment's tools, which the chat template writes into prompts. None: the prompts' text
describes them, and those of rows do not count."""

CheckGroundTruth = Callable[[str], str | None]
CheckExtraInfo = Callable[[dict[str, Any]], str | None]
"""Validators of a row's ground truth and ``extra_info``: return its error, or None."""


@dataclass(frozen=True)
class MixedSource:
    """One training file of a mixture: name, weight, number of usable prompts, digest."""

    name: str
    prompts: int
    """Number of usable prompts; the run's dataset concatenates those of all sources."""
    weight: float
    sha256: str


@dataclass(frozen=True)
class PromptSet:
    """Usable prompts of a dataset, tokenized, all in memory; with counts of dropped prompts, and sources."""

    prompts: tuple[Prompt, ...]
    too_long: int
    """Number of prompts dropped because they are longer than the run allows."""
    found: int
    """Number of prompts before the difficulty filter, without the too long ones."""
    sources: tuple[MixedSource, ...] = ()
    """Sources of the prompts in order; empty for a single file."""
    tools_sha256: str = ""
    """Digest of the tools described in the prompts; empty without any."""


def load_prompts(
    path: Path,
    tokenizer: Any,
    max_prompt_tokens: int,
    check_ground_truth: CheckGroundTruth | None = None,
    check_extra_info: CheckExtraInfo | None = None,
    tools: Tools = (),
    begun: bool = False,
    field: str = "data.path",
) -> PromptSet:
    """Read a dataset file and tokenize its prompts; drop and count those above ``max_prompt_tokens``.

    ``tools``: the environment's. ``begun``: whether the run has steps: then prompts about images are
    accepted. ``field``: the setting that names the file. Raises ConfigError naming file, row (the first is
    0), field and fix; also if no prompt is left, or all are equal.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError("model.hf_path: its tokenizer has no chat_template; add a chat_template.jinja")
    prompts: list[Prompt] = []
    too_long: list[int] = []  # lengths in tokens
    several = check_ground_truth is None
    for number, row in enumerate(read_rows(path, field)):
        try:
            prompt = _prompt(number, row, tokenizer, several, tools)
            if check_ground_truth and (problem := check_ground_truth(prompt.ground_truth)):
                raise RowError(f"reward_model.ground_truth: {problem}")
            if check_extra_info and (problem := check_extra_info(prompt.extra_info)):
                raise RowError(problem)
            if not begun and (problem := media_problem(row, prompt.messages)):
                raise RowError(problem)
        except RowError as error:
            raise ConfigError(f"{field}={path}, row {number} (the first is 0): {error}") from error
        if len(prompt.token_ids_P) <= max_prompt_tokens:
            prompts.append(prompt)
        else:
            too_long.append(len(prompt.token_ids_P))
    if not prompts:
        raise ConfigError(
            f"{field}={path}: each of its {len(too_long)} prompts has more than "
            f"data.max_prompt_tokens={max_prompt_tokens} tokens; raise that: the shortest has "
            f"{min(too_long)}, the longest {max(too_long)}"
        )
    _check_different(prompts, f"{field}={path}")
    return PromptSet(tuple(prompts), len(too_long), len(prompts))


def _check_different(prompts: Sequence[Prompt], where: str) -> None:
    """Raise ConfigError if all of several prompts are equal, token by token."""
    first = prompts[0].token_ids_P
    if len(prompts) > 1 and all(np.array_equal(first, other.token_ids_P) for other in prompts[1:]):
        raise ConfigError(
            f"{where}: equal prompts throughout: all {len(prompts)} rows become the same {len(first)} "
            "tokens: the model's chat_template.jinja ignores the messages, or the rows ask the same: keep "
            "one, or write something of the row into each"
        )


def _prompt(number: int, row: Row, tokenizer: Any, several: bool, tools: Tools) -> Prompt:
    messages, extra_info = messages_of(row), extra_info_of(row)
    counts = tools is not None and PROMPT_TOOLS in extra_info
    own = field_of(extra_info, PROMPT_TOOLS, list, "a list") if counts else []
    token_ids_P = prompt_token_ids(messages, tokenizer, [*(tools or ()), *own])
    if own and np.array_equal(token_ids_P, prompt_token_ids(messages, tokenizer, tools)):
        raise RowError(
            f"extra_info.{PROMPT_TOOLS}: the chat template ignores them: if the prompt's text describes the "
            'tools, set `"tools_in_prompts": true` in environment.settings; else mend chat_template.jinja in '
            f"the model's folder, {tokenizer.name_or_path}"
        )
    return Prompt(
        prompt_id=number,
        token_ids_P=token_ids_P,
        ground_truth=ground_truth_of(row, several),
        data_source=field_of(row, "data_source", str, "text"),
        extra_info=extra_info,
        opens_thinking=ends_in_thinking(tokenizer, token_ids_P),
        messages=messages,
    )


def ends_in_thinking(tokenizer: Any, ids: np.ndarray) -> bool:
    """Whether the model's input ends with a thinking part opened by its chat template."""
    end: str = tokenizer.decode(ids[-_END_TOKENS:].tolist(), skip_special_tokens=False)
    return end.rstrip().endswith(THINKING)


def prompt_token_ids(messages: list[dict[str, Any]], tokenizer: Any, tools: Tools = ()) -> np.ndarray:
    """Return the messages' token ids in the chat template, int32, without control tokens from message texts.
    Raises RowError if the template refuses them."""
    try:
        ids = chat_template_of(tokenizer).token_ids(messages, tools or ())
    except Exception as error:  # templates raise anything
        raise RowError(f"prompt is refused by the tokenizer's chat template: {error}") from error
    return np.asarray(ids, np.int32)


class PromptOrder:
    """Data order of one file: endless epochs over the prompts, shuffled or in file order. ``take`` returns
    (epoch, prompt index) pairs.

    An epoch's order depends only on (seed, epoch, stream) and the number of prompts, so the count of prompts
    taken is the position to resume from. ``stream``: number of the source in a mixture.
    """

    def __init__(self, num_prompts: int, seed: int, shuffle: bool, stream: int = 0) -> None:
        self._num_prompts, self._shuffle = num_prompts, shuffle
        self._seed, self._stream = seed % 2**64, [stream] if stream else []
        self._epoch, self._order = -1, np.zeros(0, np.int64)

    def take(self, taken: int, count: int) -> list[tuple[int, int]]:
        """Return ``count`` pairs of (epoch, prompt index) after the first ``taken``."""
        return [self._place(number) for number in range(taken, taken + count)]

    def _place(self, number: int) -> tuple[int, int]:
        epoch, position = divmod(number, self._num_prompts)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, np.arange(self._num_prompts)
            if self._shuffle:
                generator = np.random.default_rng([self._seed, epoch, *self._stream])
                self._order = generator.permutation(self._num_prompts)
        return epoch, int(self._order[position])


def mixture_settings(sources: Sequence[MixedSource]) -> dict[str, Any]:
    """Return the settings, by name, that determine a mixture's order; a journal rejects other values."""
    if not sources:
        return {"data.sources": None}
    settings: dict[str, Any] = {"data.sources": [source.name for source in sources]}
    for source in sources:
        settings |= {
            f"data.sources[{source.name}].weight": float(source.weight),
            f"data.sources[{source.name}].sha256": source.sha256,
            f"data.sources[{source.name}].prompts": source.prompts,
        }
    return settings


class ProportionalInterleaving:
    """Proportional interleaving of sources, an endless sequence of indices: deterministic, by weight.

    Source i has a share w_i of the prompts (w_i = weight_i / sum of weights). For every n it has, of the
    first n prompts, n w_i to within 1 - 1 / (2 k - 2) of a prompt for k > 1 sources; in general no rule is
    better (R. Tijdeman, "The chairman assignment problem", Discrete Mathematics 32 (1980), 323-330). With x_i
    prompts taken from source i before the n-th, the n-th comes from the source which, among those with

        n w_i - x_i >= 1 / (2 k - 2),

    has the smallest (1 - 1 / (2 k - 2) - (n w_i - x_i)) / w_i: the earliest deadline. Computed exactly, in
    integers and fractions, without randomness. Weights count as the decimal numbers they print as, so 0.1 is
    a tenth. It remembers its last place, which makes access in order cheap and changes no result.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        exact = [Fraction(str(weight)) for weight in weights]
        scale = math.lcm(*(share.denominator for share in exact))
        whole = [int(share * scale) for share in exact]
        common = math.gcd(*whole)
        self._weights = [share // common for share in whole]
        self._total = sum(self._weights)
        self._taken, self._counts = 0, [0] * len(self._weights)

    def next_after(self, taken: int) -> tuple[int, int]:
        """Return the source after the first ``taken`` places, and how often it was chosen before."""
        if taken < self._taken or taken - self._taken >= self._total:
            periods = taken // self._total  # after each period all shares are exact
            self._taken, self._counts = periods * self._total, [periods * weight for weight in self._weights]
        while self._taken < taken:
            self._counts[self._choice()] += 1
            self._taken += 1
        choice = self._choice()
        return choice, self._counts[choice]

    def _choice(self) -> int:
        """Return the source of the next place. All inequalities are multiplied by ``total`` (2 k - 2)."""
        sources = len(self._weights)
        if sources == 1:
            return 0
        scale, total, place = 2 * sources - 2, self._total, self._taken + 1
        owed = [
            scale * (place * weight - total * count)
            for weight, count in zip(self._weights, self._counts, strict=True)
        ]
        due = (number for number in range(sources) if owed[number] >= total)
        return min(
            due, key=lambda number: Fraction(total * (scale - 1) - owed[number], self._weights[number])
        )


class Mixture:
    """Data order of several sources: each in its own endless epochs (optionally shuffled), mixed by weight.
    ``take`` returns (epoch, prompt index) pairs; the count of prompts taken is the position for a resume."""

    def __init__(self, sources: Sequence[MixedSource], seed: int, shuffle: bool) -> None:
        self._chairman = ProportionalInterleaving([source.weight for source in sources])
        self._orders = [
            PromptOrder(source.prompts, seed, shuffle, stream=number) for number, source in enumerate(sources)
        ]
        self._starts = [sum(source.prompts for source in sources[:number]) for number in range(len(sources))]

    def take(self, taken: int, count: int) -> list[tuple[int, int]]:
        """Return ``count`` pairs of (source's epoch, prompt index) after the first ``taken``."""
        return [self._place(number) for number in range(taken, taken + count)]

    def _place(self, number: int) -> tuple[int, int]:
        source, taken = self._chairman.next_after(number)
        [(epoch, index)] = self._orders[source].take(taken, 1)
        return epoch, self._starts[source] + index


def data_order(
    prompts: int, sources: Sequence[MixedSource], seed: int, shuffle: bool
) -> PromptOrder | Mixture:
    """Return a run's data order, of one file or several sources."""
    return Mixture(sources, seed, shuffle) if sources else PromptOrder(prompts, seed, shuffle)
