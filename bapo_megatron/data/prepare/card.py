"""Data card of a prepared dataset (card.json, README.md): sources, rows kept and dropped, reasons, digests.

A ``Card`` counts rows; ``as_json`` and ``as_markdown`` return the content of the files. A run reads from it
the reward for which the data was prepared (``data/problem_sets.py``).
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from bapo_megatron import __version__
from bapo_megatron.data.prepare.filters import INVALID
from bapo_megatron.data.prepare.options import CARD_TEXT, DATA_FILE, PrepareOptions
from bapo_megatron.data.prepare.problems import Problem
from bapo_megatron.reward.code_tests import forgeable_tests
from bapo_megatron.reward.math import is_operation

FORMAT = 1

EXAMPLES = 3
"""Number of example dropped rows per reason."""

_LONG_CHARACTERS = 4000
"""Mean characters per row above which an ``extra_info`` column is reported."""
_SHOWN_CHARACTERS = 300
_NOT_ABOUT_THE_DATA = ("sources", "against", "output", "overwrite", "suites")
_NEEDS = {
    "max_prompt_tokens": "tokenizer",
    **dict.fromkeys(("ngram_words", "ngram_share"), "against"),
    **dict.fromkeys(("min_difficulty", "max_difficulty"), "difficulty"),
    **dict.fromkeys(("seed", "task_settings"), "size"),
}
"""Options that matter only if another one is given."""


@dataclass(frozen=True)
class Dropped:
    """Dropped row, for the card's examples: the filter's name, source, row number, reason and question."""

    reason: str
    source: str
    row: int
    why: str
    question: str


@dataclass
class Card:
    """Data card: sources and options with digests, counts of kept and dropped rows, examples, prompt lengths.
    ``keep`` and ``drop`` add a row. Contains no time: equal data, options and code version give an equal
    card."""

    sources: list[dict[str, Any]]
    """Name, SHA-256 and number of rows of each source."""
    options: PrepareOptions
    against: list[dict[str, Any]] = field(default_factory=list)
    """Name, SHA-256 and number of rows of each evaluation set."""
    sha256: str = ""
    """SHA-256 of data.jsonl."""
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[Dropped]] = field(default_factory=dict)
    invalid: list[Dropped] = field(default_factory=list)
    by_data_source: Counter[str] = field(default_factory=Counter)
    by_ability: Counter[str] = field(default_factory=Counter)
    forgeable: int = 0
    """Kept rows with forgeable tests (`reward.code_tests.forgeable_tests`)."""
    operations: int = 0
    """Kept rows whose ground truth is an unevaluated operation, which makes such answers right."""
    control_tokens: int = 0
    """Kept rows whose prompt spells a control token, which the model sees as text."""
    texts: Counter[str] = field(default_factory=Counter)
    """Characters of ``extra_info`` by column."""
    too_long: Counter[int] = field(default_factory=Counter)
    """Histogram of too long prompts by tokens."""
    lengths: Counter[int] = field(default_factory=Counter)
    """Histogram of kept prompts by tokens; empty without a tokenizer."""

    def keep(self, problem: Problem) -> None:
        self.kept += 1
        self.by_data_source[problem.data_source] += 1
        self.forgeable += forgeable_tests(problem.ground_truth) > 0
        self.by_ability[problem.ability] += 1
        self.operations += problem.is_math and is_operation(problem.ground_truth)
        for name, value in problem.extra_info.items():
            self.texts[name] += len(value if isinstance(value, str) else json.dumps(value))

    def drop(self, row: Dropped) -> None:
        """Count a dropped row; the first rows per reason become examples."""
        self.dropped[row.reason] += 1
        short = dataclasses.replace(row, why=_short(row.why), question=_short(row.question))
        if row.reason == INVALID:
            self.invalid.append(short)
        shown = self.examples.setdefault(row.reason, [])
        if len(shown) < EXAMPLES:
            shown.append(short)

    def as_json(self) -> dict[str, Any]:
        options = dataclasses.asdict(self.options)
        return {
            "format": FORMAT,
            "code_version": __version__,
            "data": {"file": DATA_FILE, "sha256": self.sha256, "rows": self.kept},
            "sources": self.sources,
            "against": self.against,
            "options": {
                name: json.loads(json.dumps(value, default=str))
                for name, value in options.items()
                if name not in _NOT_ABOUT_THE_DATA and (name not in _NEEDS or options[_NEEDS[name]])
            },
            "dropped": dict(self.dropped),
            "invalid_rows": [{"source": row.source, "row": row.row, "why": row.why} for row in self.invalid],
            "examples": {name: [vars(row) for row in shown] for name, shown in self.examples.items()},
            "by_data_source": dict(self.by_data_source.most_common()),
            "by_ability": dict(self.by_ability.most_common()),
            "forgeable_rows": self.forgeable,
            "operation_rows": self.operations,
            "control_token_rows": self.control_tokens,
            "prompt_tokens": self._prompt_tokens(),
        }

    def _prompt_tokens(self) -> dict[str, int] | None:
        if not self.lengths:
            return None
        ordered = sorted(self.lengths.elements())
        ranks = {"smallest": 0.0, "median": 0.5, "95%": 0.95, "largest": 1.0}
        return {name: ordered[max(1, math.ceil(share * len(ordered))) - 1] for name, share in ranks.items()}


def as_markdown(card: Card) -> str:
    """Return the content of README.md."""
    data = card.as_json()
    rows = sum(source["rows"] for source in card.sources)
    lines = [
        f"# {card.options.output.name}",
        "",
        f"{card.kept} problems of {rows} rows, prepared by `bapo data prepare` {__version__}.",
        f"SHA-256 of `{DATA_FILE}`: `{card.sha256}`.",
        *_table("Sources", ("source", "rows", "SHA-256"), [_source(one) for one in card.sources]),
        *_table(
            "Kept apart from", ("evaluation set", "rows", "SHA-256"), [_source(one) for one in card.against]
        ),
        *_card_lines(card),
        *_table("Left out", ("reason", "rows"), [*card.dropped.items()]),
        *_table("Kept", ("data source", "rows"), card.by_data_source.most_common()),
        *_table("Prompt tokens", ("", "tokens"), [*(data["prompt_tokens"] or {}).items()]),
        *_table(
            "Options", ("option", "value"), [(k, f"`{json.dumps(v)}`") for k, v in data["options"].items()]
        ),
    ]
    for reason, shown in card.examples.items():
        lines += ["", f"## Examples: {reason}", ""]
        for one in shown:
            lines.append(f"- {one.source}, row {one.row}: {_cell(one.why)}")
            if one.question:
                lines.append(f"  > {_cell(one.question)}")
    return "\n".join(lines) + "\n"


def summary(card: Card) -> str:
    """Return the summary printed by ``bapo data prepare``."""
    rows = sum(source["rows"] for source in card.sources)
    output = card.options.output
    lines = [f"{card.kept} of {rows} rows are in {output / DATA_FILE} (SHA-256 {card.sha256[:12]}...)"]
    lines += [f"left out: {count} {reason}" for reason, count in card.dropped.items()]
    lines += _card_lines(card)
    return "\n".join([*lines, f"why, with examples: {output / CARD_TEXT}"]) + "\n"


def _card_lines(card: Card) -> list[str]:
    forgeable = f"rows with tests that a program can forge (docs/rewards.md#programs): {card.forgeable}"
    operations = f"rows whose answer is an operation (docs/rewards.md#mathematics): {card.operations}"
    control = (
        "rows whose prompt spells a control token such as <|im_end|>, which a model gets as text: give "
        "messages in place of rendered prompts "
        f"(docs/data.md#which-fields-are-understood): {card.control_tokens}"
    )
    lengths = {name: total // card.kept for name, total in card.texts.most_common()}
    long = [f"{name} ({n:,} characters a row)" for name, n in lengths.items() if n >= _LONG_CHARACTERS]
    columns = f"long columns, which a run holds in memory: {', '.join(long)}: --drop-columns leaves them out"
    told = (
        (forgeable, card.forgeable),
        (operations, card.operations),
        (control, card.control_tokens),
        (columns, long),
    )
    return [line for line, is_told in told if is_told]


def _source(source: dict[str, Any]) -> tuple[str, int, str]:
    return source["name"], source["rows"], f"`{source['sha256']}`"


def _table(title: str, head: tuple[str, ...], rows: list[Any]) -> list[str]:
    if not rows:
        return []
    cells = [head, ("---",) * len(head), *rows]
    return ["", f"## {title}", "", *("| " + " | ".join(_cell(str(c)) for c in row) + " |" for row in cells)]


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|")


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + " ..."
