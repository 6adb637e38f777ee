"""Data card of a prepared dataset (card.json, README.md): sources, rows kept and dropped, reasons, digests.

``prepare`` counts rows in a ``Card``. ``as_json`` and ``as_markdown`` return the files' content, ``summary``
what is printed. A run reads from card.json for which reward the data was prepared (``problem_sets.py``).
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
from bapo_megatron.data.prepare.options import CARD_FILE, DATA_FILE, PrepareOptions
from bapo_megatron.data.prepare.problems import Problem
from bapo_megatron.reward.code_tests import forgeable_tests
from bapo_megatron.reward.math import is_operation

FORMAT = 1

EXAMPLES = 3
"""Number of dropped rows shown per reason."""

_SHOWN_CHARACTERS = 300
_NOT_ABOUT_THE_DATA = ("sources", "against", "output", "overwrite", "suites")


@dataclass(frozen=True)
class Dropped:
    """Dropped row, shown in the card as an example: number in its source, question, name of the filter that
    dropped it (``reason``), and the filter's explanation (``why``)."""

    reason: str
    source: str
    row: int
    why: str
    question: str


@dataclass
class Card:
    """Data card: sources with digests, options, counts of kept and dropped rows, examples, prompt lengths.
    ``keep`` and ``drop`` count a row. Has no date: equal data, options and version give an equal card."""

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
    forgeable: int = 0
    """Kept rows with forgeable tests (`reward.code_tests.forgeable_tests`)."""
    operations: int = 0
    """Kept rows whose ground truth is an unevaluated operation: unevaluated answers are then right."""
    lengths: Counter[int] = field(default_factory=Counter)
    """Histogram of kept prompts by tokens; empty without a tokenizer."""

    def keep(self, problem: Problem) -> None:
        self.kept += 1
        self.forgeable += forgeable_tests(problem.ground_truth) > 0
        is_math = not problem.own_reward and problem.ability == "math"
        self.operations += is_math and is_operation(problem.ground_truth)

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
        return {
            "format": FORMAT,
            "code_version": __version__,
            "data": {"file": DATA_FILE, "sha256": self.sha256, "rows": self.kept},
            "sources": self.sources,
            "against": self.against,
            "options": {
                name: json.loads(json.dumps(value, default=str))
                for name, value in vars(self.options).items()
                if name not in _NOT_ABOUT_THE_DATA
            },
            "dropped": dict(self.dropped),
            "invalid_rows": [{"source": row.source, "row": row.row, "why": row.why} for row in self.invalid],
            "examples": {name: [vars(row) for row in shown] for name, shown in self.examples.items()},
            "forgeable_rows": self.forgeable,
            "operation_rows": self.operations,
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
    head = f"# {card.options.output.name}\n\nPrepared by `bapo data prepare` {__version__}.\n\n"
    lines = "".join(f"- {line}\n" for line in _lines(card, DATA_FILE))
    return f"{head}{lines}\n{CARD_FILE} has sources, options, and examples of rows that were left out.\n"


def summary(card: Card) -> str:
    """Return the summary printed by ``bapo data prepare``."""
    output = card.options.output
    lines = [*_lines(card, str(output / DATA_FILE)), f"why, with examples: {output / CARD_FILE}"]
    return "\n".join(lines) + "\n"


def _lines(card: Card, file: str) -> list[str]:
    rows = sum(source["rows"] for source in card.sources)
    lines = [f"{card.kept} of {rows} rows are in {file} (SHA-256 {card.sha256[:12]}...)"]
    lines += [f"left out: {count} {reason}" for reason, count in card.dropped.items()]
    if card.forgeable:
        lines.append(f"rows with tests that a program can forge (docs/rewards.md#programs): {card.forgeable}")
    if card.operations:
        lines.append(f"rows whose answer is an operation (docs/rewards.md#mathematics): {card.operations}")
    return lines


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + " ..."
