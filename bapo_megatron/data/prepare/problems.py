r"""Schema adapters: ``problem_of`` converts a row of any known dataset schema into a ``Problem``.

Chat rows (Skywork-OR1-RL-Data, DAPO-Math-17k, this project's own) have ``prompt``, as messages or text, and
``reward_model.ground_truth``. Plain rows have a column with the question, as messages or text (``prompt``
without ``reward_model`` in slime, TRL, verifiers; ``problem`` or ``question`` in DeepScaleR, MATH-500, AIME),
and one with the answer (``answer``, in GSM8K after ``####``; the last box of a ``solution``;
``final_answer``, ``expected_answer``, ``label`` or ``tests``). Names may be capitalised.

Reward functions read an answer in ``\boxed{}``, or a program in a fenced block. A prompt that does not ask
for that form gets an instruction, and contradicting instructions are removed (DAPO's line "Answer:", ``####``
in verl's GSM8K), unless the reward reads neither (a user's, an endpoint's, a task's) or the options say
otherwise.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bapo_megatron.data.rows import (
    Message,
    Row,
    RowError,
    extra_info_of,
    field_of,
    ground_truth_of,
    messages_of,
)
from bapo_megatron.reward.answer_text import last_boxed
from bapo_megatron.reward.code_tests import is_tests

MATH_INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."
CODE_INSTRUCTION = "Write one Python program, and put it into a ```python block at the end of your answer."

_PLAIN_QUESTION, _ANSWER, _SOLUTION = ("problem", "question"), "answer", "solution"
_OTHER_ANSWERS = ("final_answer", "expected_answer", "label", "tests")
"""Other answer columns: of DeepMath, OpenMathReasoning, slime, DeepCoder."""
_OF_CHATS = ("prompt", "reward_model")
"""Columns that identify a chat row."""
_QUESTION = ("prompt", *_PLAIN_QUESTION)
_OF_THE_FORMAT = frozenset((*_OF_CHATS, "data_source", "ability", "extra_info"))
"""Columns of a prepared row; others go into ``extra_info``."""
_GSM8K = re.compile(r"\n####\s*(\S(?:[^\n]*\S)?)\s*\Z")
_ANSWER_LINE = re.compile(
    r"\s*solve the following math problem step by step\.[^\n]*\n(.*?)\nremember to put your answer on its "
    r"own line after \"answer:\"\.?\s*",
    re.IGNORECASE | re.DOTALL,
)
_LAST_LINE = re.compile(
    r"(?<!\s)\s*let'?s think step by step and output the final answer after \"?####\"?\.?\s*\Z", re.IGNORECASE
)
"""GSM8K's request in verl's files."""
_BOX_REQUEST = re.compile(
    r"(?<!\s)\s*\b(?:let'?s think|please|put|present|return|output|give|write|enclose|make sure|remember)\b"
    r"(?:(?!\n\s*\n).){0,200}?\\boxed\s*\{\s*\}[^\n]{0,80}\Z",
    re.IGNORECASE | re.DOTALL,
)


@dataclass(frozen=True)
class Problem:
    """Problem in the common format: chat messages, question, ground truth, data source, extra info."""

    messages: list[Message]
    question: str
    """Last message without the instruction about the answer's form."""
    ground_truth: str
    data_source: str
    extra_info: dict[str, Any]
    own_reward: bool = False
    """Whether its reward takes any ground truth: a user's or a task's."""
    named_ability: str = ""
    """Kind of problem stated in its row."""

    @property
    def ability(self) -> str:
        """Kind of problem: ``math`` or ``code``; for another reward the row's own, or ``other``."""
        if self.own_reward:
            return self.named_ability or "other"
        return "code" if is_tests(self.ground_truth) else "math"

    @property
    def dialogue(self) -> str:
        """Turns up to and including the question, without the system message, which differs between files;
        compared by decontamination."""
        return self._said(self.messages[int(self.messages[0]["role"] == "system") : -1])

    @property
    def conversation(self) -> str:
        """System message and dialogue; compared by deduplication."""
        return self._said(self.messages[:-1])

    def _said(self, before: Sequence[Message]) -> str:
        """Return messages as text, followed by the question; includes fields besides role and content."""
        texts = [
            f"{said['role']} {said['content']} {json.dumps(said, sort_keys=True) if len(said) > 2 else ''}"
            for said in before
        ]
        return "\n".join([*texts, self.question])

    def with_system(self, text: str | None) -> Problem:
        """Return the problem with ``text`` as its system message; unchanged for None."""
        if text is None:
            return self
        rest = [message for message in self.messages if message["role"] != "system"]
        return replace(self, messages=[{"role": "system", "content": text}, *rest])

    def row(self) -> Row:
        """Return the problem as a row of data.jsonl with sorted keys. Keys within messages keep their order:
        templates write a call's arguments in that order."""
        return {
            "ability": self.ability,
            "data_source": self.data_source,
            "extra_info": json.loads(json.dumps(self.extra_info, sort_keys=True)),
            "prompt": [dict(sorted(message.items())) for message in self.messages],
            "reward_model": {"ground_truth": self.ground_truth, "style": "rule"},
        }


def with_columns(row: Row, names: Mapping[str | None, str]) -> Row:
    """Return the row as a plain row: the user's columns, keys of ``names``, get a plain row's names.

    Drops ``reward_model``, and ``prompt`` if another column is the question. A None key is a column that the
    user did not name; unchanged if there are only such. Raises RowError for a missing column.
    """
    if not any(names):
        return row
    others = {*(name.lower() for name in row), *(name for column, name in names.items() if column)}
    dropped = _OF_CHATS if others & {*_PLAIN_QUESTION} else _OF_CHATS[1:]
    row = {name: value for name, value in row.items() if name in names or name.lower() not in dropped}
    for column, name in names.items():
        if column is None:
            continue
        if column not in row:
            raise _no_column(column, row)
        row = {other: value for other, value in row.items() if other.lower() != name or other == column}
        row[name] = row.pop(column)
    return row


def without_columns(row: Row, columns: Sequence[str]) -> Row:
    """Return the row without the user's ``columns``. Raises RowError for a missing one."""
    for column in columns:
        if column not in row:
            raise _no_column(column, row)
    return {name: value for name, value in row.items() if name not in columns}


def _no_column(column: str, row: Row) -> RowError:
    return RowError(f"it has no column {column}; its columns are {', '.join(sorted(row))}")


def with_source(row: Row, column: str | None) -> Row:
    """Return the row with the user's ``column`` as data source, unchanged for None. Raises RowError."""
    if column is None:
        return row
    value = row.get(column)
    if not isinstance(value, (str, int)) or not str(value).strip():
        raise RowError(f"--source-column {column} is {value!r}; its columns are {', '.join(sorted(row))}")
    return {**row, "data_source": str(value)}


def problem_of(
    row: Row, source: str, number: int, instruct: bool = True, own_reward: bool = False
) -> Problem:
    """Convert row ``number`` of ``source`` into a problem. Raises RowError for anything missing or wrong.

    Other columns and the number go into ``extra_info``. ``instruct``: add an instruction to prompts that do
    not ask for the form that the reward reads. ``own_reward``: as in ``Problem``.
    """
    named = {name.lower(): value for name, value in row.items()}
    truth = named.get("reward_model")  # may be None if other rows have it
    if truth is not None and ("prompt" in named or isinstance(truth, dict)):
        messages, known = _chat_messages(named), _OF_THE_FORMAT
        ground_truth = ground_truth_of(named, own_reward)
    elif any(name in named for name in _QUESTION):
        column = _answer_column(named)
        messages, known = _plain_messages(named), _OF_THE_FORMAT.union(_QUESTION, (column, _SOLUTION))
        ground_truth = _answer(named, column, own_reward)
    else:
        raise RowError(
            f"its columns are {', '.join(sorted(row))}; a row has prompt and reward_model, or problem "
            f"(question, prompt) and answer (solution): name yours by --question-column and --answer-column"
        )
    content, question = _asked(messages[-1]["content"], is_tests(ground_truth), instruct and not own_reward)
    return Problem(
        messages=[*messages[:-1], {**messages[-1], "content": content}],
        question=question,
        ground_truth=ground_truth,
        data_source=_source_of(named, source),
        extra_info=_numbered(extra_info_of(named, _other_columns(named, known)), number),
        own_reward=own_reward,
        named_ability=ability.strip() if isinstance(ability := named.get("ability"), str) else "",
    )


def _numbered(info: dict[str, Any], number: int) -> dict[str, Any]:
    """Return ``extra_info`` with the row's number; a different ``row`` becomes ``source_row``."""
    own = info.get("row")
    return {**({} if own in (None, number) else {"source_row": own}), **info, "row": number}


def _chat_messages(row: Row) -> list[Message]:
    if isinstance(row.get("prompt"), str):
        row = {**row, "prompt": [{"role": "user", "content": row["prompt"]}]}
    messages = messages_of(row)
    if messages[-1]["role"] != "user":
        raise RowError(f"prompt ends with a message of {messages[-1]['role']!r}; the last must be the user's")
    return messages


def _plain_messages(row: Row) -> list[Message]:
    column = _first(row, _QUESTION)
    question = row[column] if column else None
    if isinstance(question, str) and question.strip():
        question = question.strip()
    elif not isinstance(question, list):
        raise RowError(f"the problem is {question!r}; it must be text, not empty, or chat messages")
    return _chat_messages({**row, "prompt": question})


def _source_of(row: Row, source: str) -> str:
    named = row.get("data_source")
    return field_of(row, "data_source", str, "text") if isinstance(named, str) and named else source


def _other_columns(row: Row, known: Collection[str]) -> dict[str, Any]:
    others = {name: value for name, value in row.items() if name not in known and not _is_missing(value)}
    return {name: value for name, value in others.items() if _is_json(value)}


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _answer_column(row: Row) -> str:
    """Return a plain row's answer column: the first known one with a value."""
    names = (_ANSWER, _SOLUTION, *_OTHER_ANSWERS)
    column = _first(row, names)
    if column is None:
        raise RowError(
            f"it has no value of an answer or a solution; its columns are {', '.join(sorted(row))}: name "
            "that of the answer by --answer-column"
        )
    return column


def _first(row: Row, names: Sequence[str]) -> str | None:
    """Return the first column with a value; if there is none, the first that is not None."""
    there = [name for name in names if row.get(name) is not None]
    return next((name for name in there if not _is_missing(row[name])), there[0] if there else None)


def _is_missing(value: Any) -> bool:
    """Whether a value is None, blank, or NaN (pandas' missing value)."""
    return value is None or value != value or (isinstance(value, str) and not value.strip())


def _answer(row: Row, column: str, several: bool) -> str:
    """Return a plain row's answer: a text, a whole number, or a ``solution``'s last box."""
    answer = row[column]
    if column == _SOLUTION and isinstance(answer, str):
        answer = last_boxed(answer)
        if answer is None:
            raise RowError("it has no answer, and its solution has no \\boxed{}")
    if isinstance(answer, str) and (final := _GSM8K.search(f"\n{answer}")):
        answer = final[1]
    try:
        return ground_truth_of({"reward_model": {"ground_truth": answer}}, several)
    except RowError:
        raise RowError(
            f"its answer is {answer!r:.300}; it must be one text, not empty, a whole number, or tests of a "
            "program (docs/rewards.md#programs)"
        ) from None


def _asked(content: str, is_code: bool, instruct: bool) -> tuple[str, str]:
    """Return the last message's content with the instruction, and the question without any."""
    wrapped = _ANSWER_LINE.fullmatch(content)
    asked = wrapped[1].strip() if wrapped else _LAST_LINE.sub("", content) or content
    question = _BOX_REQUEST.sub("", asked).strip() or asked
    form, instruction = ("```", CODE_INSTRUCTION) if is_code else ("\\boxed", MATH_INSTRUCTION)
    if not instruct:  # the reward may read the prompt's own form
        return content, question
    return asked if form in asked else f"{asked}\n\n{instruction}", question
