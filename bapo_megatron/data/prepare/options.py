"""Options of ``bapo data prepare`` (``PrepareOptions``), and the names of the files that it writes.

``check`` raises one ConfigError with every invalid option.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from annotated_types import Ge, Gt, Le

from bapo_megatron.algo.settings import out_of_range
from bapo_megatron.config.sources import PREPARED
from bapo_megatron.config.validation import (
    BOXED_REWARDS,
    REWARD_ENDPOINTS,
    REWARD_FUNCTIONS,
    raise_problems,
)
from bapo_megatron.data.prepare.reasoning_gym import PREFIX

DATA_FILE, CARD_FILE, CARD_TEXT = PREPARED, "card.json", "README.md"
"""Files of a prepared folder: problems, data card as JSON and as text."""

SUITES = Path("data/suites")
"""Folder of evaluation suites by name."""


@dataclass(frozen=True)
class PrepareOptions:
    """Options of `bapo data prepare`: sources and how to read them, filters, and the output folder."""

    sources: tyro.conf.Positional[tuple[str, ...]]
    """Files (.jsonl, .json, .parquet), datasets of the hub as OWNER/NAME or OWNER/NAME:CONFIG, or, without a
    network, problems of reasoning-gym's tasks as reasoning-gym:TASK,TASK, and champ of champ-dataset."""
    output: Path
    """Folder that is written: data.jsonl, card.json, README.md."""
    split: str = "train"
    """Split of sources on the hub. Skywork-OR1-RL-Data has `math` and `code`."""
    revision: str | None = None
    """Commit of sources on the hub. None: the newest."""
    size: Annotated[int | None, Ge(1)] = None
    """Problems of a source reasoning-gym:TASK,TASK in all; its tasks have equal shares."""
    seed: int = 0
    """Seed of a source reasoning-gym:TASK,TASK: another one, other problems."""
    task_settings: str = "{}"
    """Settings of reasoning-gym's tasks, one JSON object: of all tasks, `{"max_terms": 2}`, or by task,
    `{"chain_sum": {"max_terms": 2}}`."""
    against: tuple[str, ...] = ()
    """Evaluation sets that must not be trained on: names of suites, or files of any known schema."""
    suites: Path = SUITES
    """Folder of the suites that `against` names."""
    ngram_words: Annotated[int, Ge(1)] = 8
    """Words of an n-gram, for `against`."""
    ngram_share: Annotated[float, Gt(0), Le(1)] = 0.3
    """A question that has this share of an evaluation problem's n-grams is left out."""
    reward: str | None = None
    """The run's reward.function. With one of your own, as module:function, `llm_judge` or `reward_model`,
    ground truths may be any text, and prompts stay as they are. None: reasoning_gym for its tasks, else
    math_or_code."""
    system_prompt: str | None = None
    """A system message in front of each prompt, in place of one that it has."""
    question_column: str | None = None
    """Column of the question. None: `problem` or `question`, or `prompt` in rows with `reward_model`."""
    answer_column: str | None = None
    """Column of the answer. None: `answer`, or the last box in `solution`."""
    source_column: str | None = None
    """Column of the source, by which a mixture is told apart: `data_source` in what is written. None: the
    column `data_source`, or the name of the file."""
    drop_columns: tuple[str, ...] = ()
    """Columns that are left out. All others go into `extra_info`, which a run holds in memory and writes into
    its journal: leave out long texts, such as the solutions of other models."""
    instruct: bool = True
    """Prompts that do not ask for a box, or a fenced block, get a sentence that does. Off, they stay as they
    are: for a base model."""
    tokenizer: Path | None = None
    """Hugging Face folder of the model, to count prompt tokens with its chat template."""
    max_prompt_tokens: Annotated[int, Ge(1)] = 2048
    """Longer prompts are left out, if there is a tokenizer."""
    difficulty: str | None = None
    """Dotted path of a difficulty in `extra_info`, e.g. `model_difficulty.DeepSeek-R1-Distill-Qwen-7B`
    (Skywork's data: how many of 16 answers of that model were wrong). Rows without it are left out."""
    min_difficulty: float = -1e9
    """Smallest difficulty that is kept. With 1 what the model always solves is left out."""
    max_difficulty: float = 1e9
    """Largest difficulty that is kept. With 15 what the model never solves is left out."""
    max_invalid: Annotated[float, Ge(0), Le(1)] = 0.05
    """Nothing is written if a larger share of the rows is invalid: the schema is probably another."""
    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Replace an earlier output."""

    def check(self) -> None:
        raise_problems(list(self._problems()))

    @property
    def reward_function(self) -> str:
        generated = bool(self.sources) and all(source.startswith(PREFIX) for source in self.sources)
        return self.reward or ("reasoning_gym" if generated else "math_or_code")

    @property
    def own_reward(self) -> bool:
        """Whether ground truths may be any text: for a reward by the user, an endpoint or a task."""
        return self.reward_function not in BOXED_REWARDS

    def _problems(self) -> Iterator[str]:
        if not self.sources:
            yield "sources: none is given; name a file or a dataset of the hub"
        yield from self._reward_problems()
        yield from self._generation_problems()
        yield from out_of_range(self)
        if self.min_difficulty > self.max_difficulty:
            yield f"min_difficulty={self.min_difficulty} is above max_difficulty={self.max_difficulty}"
        bounded = (self.min_difficulty, self.max_difficulty) != (-1e9, 1e9)
        if bounded and self.difficulty is None:
            yield "min_difficulty and max_difficulty need difficulty: say where in extra_info the number is"

    def _reward_problems(self) -> Iterator[str]:
        generated = [source.startswith(PREFIX) for source in self.sources]
        if self.reward is None and any(generated) and not all(generated):
            yield f"sources: {PREFIX}... has a reward of its own: prepare it apart, or give --reward"
        reward = self.reward_function
        names = REWARD_FUNCTIONS + REWARD_ENDPOINTS
        if reward not in names and ":" not in reward:
            yield f"reward={reward} must be one of {', '.join(names)}, or your own as module:function"

    def _generation_problems(self) -> Iterator[str]:
        try:
            is_object = isinstance(json.loads(self.task_settings), dict)
        except ValueError:
            is_object = False
        if not is_object:
            yield f'task_settings={self.task_settings} must be one JSON object, such as {{"max_terms": 2}}'
