"""Commands ``bapo eval CHECKPOINT`` and ``bapo eval compare A B``: parse the flags and print the results.

The CLI calls ``eval_command``. ``compare(a, b)`` reads two folders written by ``bapo eval``, pairs their
problems, and returns a ``Compared`` per suite in both; it raises ConfigError for incomparable ones. Shares
are printed as points: 0.5 is 50.0. ``--examples`` needs the suite's unchanged file.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import lcm
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bapo_megatron.config.flags import parse_options
from bapo_megatron.data.rows import messages_of, read_rows
from bapo_megatron.errors import ConfigError, printable
from bapo_megatron.evaluation.options import CompareOptions, EvalOptions
from bapo_megatron.evaluation.responses import (
    RESPONSES,
    SUMMARY,
    all_responses,
    flat_settings,
    read_responses,
    read_summary,
)
from bapo_megatron.evaluation.scoring import (
    Interval,
    bootstrap_intervals,
    detectable_difference,
    sign_flip_p_value,
    standard_deviation,
)
from bapo_megatron.runtime.files import sha256_of
from bapo_megatron.runtime.text_table import text_table
from bapo_megatron.types import Metrics

if TYPE_CHECKING:
    from bapo_megatron.evaluation.run import Results


@dataclass(frozen=True)
class Compared:
    """Comparison of evaluations A and B on one suite, paired by problem. The avg@n of A and of B (``a``,
    ``b``), ``difference`` (B - A), its ``interval`` and ``detectable`` are shares of 1."""

    suite: str
    problems: int
    samples: tuple[int, int]
    a: float
    b: float
    difference: float
    interval: Interval
    """95 % bootstrap interval over problems."""
    p_value: float
    """P-value of the exact paired sign-flip test over problems."""
    detectable: float | None
    """True difference that 4 of 5 comparisons would show; None if all problems have the same difference."""
    better: int
    """Number of problems that B solves more often than A."""
    worse: int
    other_settings: tuple[str, ...]
    """Differing settings besides the model."""
    left_out: int = 0
    """Number of problems excluded because a response in A or B could not be scored."""


def compare(a: Path, b: Path) -> list[Compared]:
    """Return a paired comparison of each suite that is finished in both evaluations. ``a``, ``b``: outputs of
    `bapo eval`, or folders of one suite. Raises ConfigError without one, or if problems or rewards differ."""
    return [compare_suite(name, *folders) for name, folders in suites_of_both(a, b).items()]


def suites_of_both(a: Path, b: Path) -> dict[str, tuple[Path, Path]]:
    """Return the folders of each suite in both evaluations, by name. Raises ConfigError if there is none."""
    folders_a, folders_b = _suites(a), _suites(b)
    both = {name: (folder, folders_b[name]) for name, folder in folders_a.items() if name in folders_b}
    if not both:
        raise ConfigError(
            f"{a} has {', '.join(folders_a)} and {b} has {', '.join(folders_b)}: no suite is in both"
        )
    return both


def _suites(path: Path) -> dict[str, Path]:
    if (path / SUMMARY).is_file():
        return {read_summary(path)["suite"]["name"]: path}
    suites = {folder.name: folder for folder in sorted(path.glob("*/")) if (folder / SUMMARY).is_file()}
    if not suites:
        raise ConfigError(f"{path} holds no finished evaluation ({SUMMARY}); give an output of `bapo eval`")
    return suites


def compare_suite(name: str, a: Path, b: Path) -> Compared:
    """Return the comparison of one suite. Raises ConfigError if its problems or rewards differ."""
    summary_a, summary_b = read_summary(a), read_summary(b)
    if summary_a["suite"]["sha256"] != summary_b["suite"]["sha256"]:
        raise ConfigError(f"suite {name}: {a} and {b} asked different problems (their files' SHA-256 differ)")
    if (reward_a := summary_a.get("reward")) != (reward_b := summary_b.get("reward")):
        names = [reward["function"] if reward else "math or code" for reward in (reward_a, reward_b)]
        raise ConfigError(f"suite {name}: {a} and {b} were scored by other rewards ({', '.join(names)})")
    samples_a, samples_b = int(summary_a["samples"]), int(summary_b["samples"])
    (correct_a, unjudged_a), (correct_b, unjudged_b) = _correct(a, samples_a), _correct(b, samples_b)
    left_out = unjudged_a | unjudged_b
    problems = [p for p in range(int(summary_a["suite"]["problems"])) if p not in left_out]
    if not problems:
        raise ConfigError(f"suite {name}: each problem has a response that {a} or {b} could not score")
    # Integers, so that equal sums are exactly equal.
    unit = lcm(samples_a, samples_b)
    steps = [correct_b[p] * (unit // samples_b) - correct_a[p] * (unit // samples_a) for p in problems]
    difference_P = np.array(steps) / unit
    return Compared(
        suite=name,
        problems=len(problems),
        samples=(samples_a, samples_b),
        a=sum(correct_a[p] for p in problems) / samples_a / len(problems),
        b=sum(correct_b[p] for p in problems) / samples_b / len(problems),
        difference=sum(steps) / unit / len(problems),
        interval=bootstrap_intervals(difference_P[:, None])[0],
        p_value=sign_flip_p_value(steps),
        detectable=detectable_difference(standard_deviation(difference_P), len(problems)),
        better=sum(step > 0 for step in steps),
        worse=sum(step < 0 for step in steps),
        other_settings=tuple(_differences(summary_a, summary_b)),
        left_out=len(left_out),
    )


def _correct(folder: Path, samples: int) -> tuple[Counter[int], set[int]]:
    responses = read_responses(folder / RESPONSES, samples)
    right = Counter(response.problem for response in responses if response.correct)
    return right, {response.problem for response in responses if response.failure is not None}


def _differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    ours, theirs = flat_settings({"sampling": a["sampling"]}), flat_settings({"sampling": b["sampling"]})
    return [
        f"{name}: {ours.get(name)!r}, {theirs.get(name)!r}"
        for name in {**ours, **theirs}  # only some have environment settings
        if ours.get(name) != theirs.get(name)
    ]


def examples_text(a: Path, b: Path, count: int) -> str:
    """Return the first ``count`` problems of every suite in both evaluations, with the first responses of A
    and B. Each text is on one line; the choice ignores outcomes. ``a``, ``b``: as in `compare`. Raises
    ConfigError if the suite's file has changed since A."""
    lines = []
    for suite, folders in suites_of_both(a, b).items():
        questions = _questions(suite, folders[0], count)
        answers = [
            {one.problem: (text, one) for one, text in rows if one.sample == 0}
            for rows in (all_responses(folder / RESPONSES) for folder in folders)
        ]
        for problem, question in enumerate(questions):
            lines.append(f"{suite}, problem {problem}: {_one_line(question)}\n")
            for name, responses in zip("AB", answers, strict=True):
                text, one = responses[problem]
                verdict = "right" if one.correct else "wrong" if one.failure is None else "unjudged"
                lines.append(f"  {name}, {verdict}: {_one_line(text)}\n")
    return "".join(lines)


def _questions(suite: str, folder: Path, count: int) -> list[str]:
    about = read_summary(folder)["suite"]
    path = Path(about["path"])
    if not path.is_file() or sha256_of(path) != about["sha256"]:
        raise ConfigError(
            f"suite {suite}: {path} is gone or has changed since {folder} was asked from it; bring it back"
        )
    return [messages_of(row)[-1]["content"] for row in read_rows(path)[:count]]


_LONGEST_EXAMPLE = 500  # maximum number of characters that an example shows of a question or response


def results_text(results: Results) -> str:
    """Return the results of an evaluation as text, one block per suite."""
    blocks = []
    for name, (folder, metrics) in results.items():
        lines = [f"{name}: {metrics['problems']} problems, {metrics['samples']} responses each"]
        shares = [_with_interval(key, metrics) for key in metrics if f"{key}_low" in metrics]
        lines += text_table(shares, right=(1,))
        lines += [*_responses(metrics), _certainty(metrics), str(folder / SUMMARY)]
        blocks.append("\n  ".join(lines))
    return "\n".join(blocks) + "\n"


def _points(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"


def _with_interval(key: str, metrics: Metrics) -> list[str]:
    low, high = metrics[f"{key}_low"], metrics[f"{key}_high"]
    return [key, _points(metrics[key]), f"({_points(low)} to {_points(high)})"]


def _responses(metrics: Metrics) -> list[str]:
    shares = [
        f"{_points(share)} % {name}"
        for name in ("truncated", "unanswered", "unjudged")
        if (share := metrics[name]) is not None
    ]
    length = "response tokens: " + ", ".join(
        f"{name.partition('/')[2]} {value:,.0f}"
        for name, value in metrics.items()
        if name.startswith("response_tokens/") and value is not None
    )
    return [", ".join(shares), length]


def _certainty(metrics: Metrics) -> str:
    if metrics[f"avg@{metrics['samples']}"] is None:
        return "no response could be judged"
    if (detectable := metrics["detectable_difference"]) is None:
        return f"all problems have the same avg@{metrics['samples']}: intervals have no width and say nothing"
    return (
        f"to show in 4 of 5 comparisons, another model must differ by "
        f"{_points(detectable)} points (`bapo eval compare` pairs problems, and mostly sees more)"
    )


def comparison_text(comparisons: Sequence[Compared], a: str, b: str) -> str:
    """Return the comparison of two evaluations as text, one block per suite."""
    lines = [f"A: {a}", f"B: {b}"]
    for row in comparisons:
        low, high = row.interval
        verdict = (
            "B differs from A"
            if row.p_value < 0.05
            else "no difference is shown; that does not show equality"
        )
        lines += [
            f"{row.suite}: {row.problems} problems, {row.samples[0]} and {row.samples[1]} responses each",
            f"  A {_points(row.a)}, B {_points(row.b)}, difference {100 * row.difference:+.1f} points "
            f"({100 * low:+.1f} to {100 * high:+.1f}); B is better on {row.better}, worse on {row.worse}",
            f"  p = {row.p_value:.3g} (sign flips over problems, exact): {verdict}",
            f"  detectable in 4 of 5 comparisons like this: {_points(row.detectable)} points",
            *(f"  not sampled alike: {text}" for text in row.other_settings),
            *([f"  left out: {row.left_out} problems with a response not judged"] if row.left_out else []),
        ]
    return "\n".join(lines) + "\n"


def _one_line(text: str) -> str:
    """Return untrusted text on one line, escaped and, if long, with its middle cut."""
    if len(text) > _LONGEST_EXAMPLE:
        text = f"{text[: _LONGEST_EXAMPLE // 2]} [...] {text[-_LONGEST_EXAMPLE // 2 :]}"
    return printable(text.strip()).replace("\n", " \u23ce ")


def eval_command(arguments: Sequence[str]) -> None:
    """Evaluate and print the results; with ``compare`` as first argument, compare two evaluations instead."""
    if arguments[:1] == ["compare"]:
        _compare(arguments[1:])
        return
    options = parse_options(EvalOptions, "bapo eval", arguments)

    from bapo_megatron.evaluation.run import evaluate  # after the flags: torch takes seconds to import

    print(results_text(evaluate(options)), end="")


def _compare(arguments: Sequence[str]) -> None:
    options = parse_options(CompareOptions, "bapo eval compare", arguments)
    options.check()
    comparisons = compare(options.a, options.b)
    given = [folder for folder in (options.a, options.b) if (folder / SUMMARY).is_file()]  # one suite
    alone = _suites(options.a).keys() ^ _suites(options.b).keys()
    if alone and not given:
        print(f"left out, since not finished in both: {', '.join(sorted(alone))}", file=sys.stderr)
    if options.json:
        print(json.dumps([asdict(suite) for suite in comparisons], indent=2))
        return
    shown = examples_text(options.a, options.b, options.examples) if options.examples else ""
    print(comparison_text(comparisons, str(options.a), str(options.b)) + shown, end="")
