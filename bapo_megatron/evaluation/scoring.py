"""Evaluation metrics (avg@n, pass@k, maj@n) of scored responses, with confidence intervals and tests.

``score(responses)`` returns a suite's metrics, ``evaluation_metrics(path)`` those of the response file of a
held-out evaluation during training. Shapes: ``_P`` problems, ``_M`` metrics. A problem has ``samples``
responses, of which ``correct`` are right. Problems are the random sample: intervals and tests are over
problems, never over responses. Deterministic: the bootstrap is seeded.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from bapo_megatron.data.prepare.normal_form import answer_text
from bapo_megatron.reward.answer_text import final_answer
from bapo_megatron.types import FinishReason, Metrics

RESAMPLES = 10_000

CONFIDENCE = 0.95
SIGNIFICANCE, POWER = 0.05, 0.8
"""Significance (two-sided) and power of the minimal detectable difference."""

_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class ScoredResponse:
    """A scored response, without its text: right, wrong or unjudged; answer, tokens, finish reason."""

    problem: int
    """Row of the suite."""
    sample: int
    correct: bool
    answer: str | None
    """The last box after the thinking part, in normal form (``vote_for``), or None."""
    tokens: int
    finish_reason: FinishReason
    failure: str | None = None
    """Scoring failure: the response is neither right nor wrong, and counts as unjudged. None on success."""


def vote_for(answer: str | None) -> str | None:
    """Return an answer's normal form as its vote for maj@n; None for an empty or missing answer."""
    return (answer_text(answer) or None) if answer is not None else None


def score(
    responses: Sequence[ScoredResponse],
    pass_at: Sequence[int] = (),
    resamples: int = RESAMPLES,
    seed: int = 0,
    boxed: bool = True,
) -> Metrics:
    """Return the metrics of a suite's responses; all problems must have the same number n.

    Means over problems: ``avg@n`` correctness; ``pass@k`` for each k in ``pass_at``; ``maj@n`` majority vote,
    None if no response has an answer (programs). They use only scored responses, exclude problems without any
    (``pass@k``: with fewer than k), and have a 95 % interval, ``_low`` and ``_high``. A metric without
    problems is None. Shares of all responses: ``truncated``, ``unanswered`` (no box; None unless ``boxed``),
    ``unjudged``. ``response_tokens/...``: mean, median, 95th percentile. ``detectable_difference``: see the
    function; it assumes another, independent model with equal variance over problems. Raises ValueError for
    missing or repeated samples.
    """
    by_problem = _by_problem(responses)
    samples = len(by_problem[0])
    judged = [
        judgements
        for group in by_problem
        if (judgements := [response for response in group if response.failure is None])
    ]
    counts = [(len(group), sum(response.correct for response in group)) for group in judged]
    columns: dict[str, list[float]] = {f"avg@{samples}": [right / count for count, right in counts]}
    columns |= {f"pass@{k}": [pass_at_k(n, right, k) for n, right in counts if n >= k] for k in pass_at}
    metrics: Metrics = {"problems": len(by_problem), "samples": samples}
    if any(response.answer is not None for group in judged for response in group):
        votes = [majority_vote([o.answer for o in g], [o.correct for o in g]) for g in judged]
        columns[f"maj@{samples}"] = votes
    metrics |= _means(columns, resamples, seed)
    metrics.setdefault(f"maj@{samples}", None)
    std = standard_deviation(columns[f"avg@{samples}"])
    metrics["detectable_difference"] = detectable_difference(std * 2**0.5, len(judged)) if judged else None
    about = _about_responses(responses)
    return metrics | (about if boxed else {**about, "unanswered": None})


def _means(columns: dict[str, list[float]], resamples: int, seed: int) -> Metrics:
    means: Metrics = {}
    for problems in dict.fromkeys(len(values) for values in columns.values()):
        names = [name for name, values in columns.items() if len(values) == problems]
        if not problems:
            means |= dict.fromkeys(names)
            continue
        values_PM = np.array([columns[name] for name in names]).T
        intervals = bootstrap_intervals(values_PM, resamples, seed)
        for name, value, interval in zip(names, values_PM.mean(axis=0), intervals, strict=True):
            means |= {name: float(value), f"{name}_low": interval.low, f"{name}_high": interval.high}
    return means


def evaluation_metrics(path: Path, boxed: bool = True) -> Metrics:
    """Return the metrics of a held-out evaluation during training: ``eval/SUITE/...`` and ``eval/mean``.
    ``path``: response file. ``boxed``: as in ``score``, false also for a suite whose rows say so.
    ``eval/mean`` averages avg@n over the suites with scored responses."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    metrics: Metrics = {}
    means = []
    for suite in dict.fromkeys(row["suite"] for row in rows):
        own = [row for row in rows if row["suite"] == suite]
        scored, in_boxes = [_scored(row) for row in own], boxed and own[0].get("boxed", True)
        values = score(scored, boxed=in_boxes)
        metrics |= {f"eval/{suite}/{name}": value for name, value in values.items()}
        if (average := values[f"avg@{values['samples']}"]) is not None:
            means.append(average)
    return {**metrics, "eval/mean": sum(means) / len(means) if means else None}


def _scored(row: dict[str, Any]) -> ScoredResponse:
    fields = {
        name: row[name] for name in ("problem", "sample", "correct", "tokens", "finish_reason", "failure")
    }
    # Rows of earlier versions lack the answer, and whether the prompt opened the thinking part.
    answer = row["answer"] if "answer" in row else final_answer(row["response"])
    return ScoredResponse(answer=vote_for(answer), **fields)


def _by_problem(responses: Sequence[ScoredResponse]) -> list[list[ScoredResponse]]:
    by_sample: defaultdict[int, dict[int, ScoredResponse]] = defaultdict(dict)
    for response in responses:
        by_sample[response.problem][response.sample] = response
    counts = {len(group) for group in by_sample.values()}
    if len(counts) != 1 or sum(len(group) for group in by_sample.values()) != len(responses):
        raise ValueError(f"problems must have equally many samples, each once; they have {sorted(counts)}")
    return [list(by_sample[problem].values()) for problem in sorted(by_sample)]


def _about_responses(responses: Sequence[ScoredResponse]) -> Metrics:
    tokens = np.array([response.tokens for response in responses])
    return {
        "truncated": float(np.mean([response.finish_reason == "length" for response in responses])),
        "unanswered": float(np.mean([response.answer is None for response in responses])),
        "unjudged": float(np.mean([response.failure is not None for response in responses])),
        "response_tokens/mean": float(tokens.mean()),
        "response_tokens/median": float(np.median(tokens)),
        "response_tokens/95%": float(np.quantile(tokens, 0.95)),
    }


# --- statistics ----------------------------------------------------------------------------------


class Interval(NamedTuple):
    """Confidence interval of a metric, 95 % by default."""

    low: float
    high: float


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """pass@k: ``1 - C(n - c, k) / C(n, k)`` (Chen et al. 2021, Eq. 1), with c of n samples correct: unbiased
    estimate of the probability that one of k is right."""
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def majority_vote(answers: Sequence[str | None], correct: Sequence[bool]) -> float:
    """maj@n: 1 if the most frequent answer is right, 0 if it is wrong or there is none; the share of right
    ones if several tie. None does not vote. Answers are compared as text. An answer is right if any response
    with it was scored as right."""
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    top = [answer for answer, count in votes.items() if count == most]
    right = {answer for answer, is_right in zip(answers, correct, strict=True) if is_right}
    return sum(answer in right for answer in top) / len(top)


def bootstrap_intervals(
    values_PM: np.ndarray, resamples: int = RESAMPLES, seed: int = 0, confidence: float = CONFIDENCE
) -> list[Interval]:
    """Bootstrap percentile interval of each column's mean over problems (Efron 1979): [M] from [P, M]. A
    constant column gets an interval of width 0."""
    values_PM = np.asarray(values_PM, float)
    problems = len(values_PM)
    generator = np.random.default_rng(seed)
    at_a_time = max(1, _ELEMENTS // problems)
    means = []
    for start in range(0, resamples, at_a_time):
        count = min(at_a_time, resamples - start)
        weights = generator.multinomial(problems, np.full(problems, 1 / problems), count)
        means.append(weights @ values_PM / problems)
    tail = (1 - confidence) / 2
    low_M, high_M = np.quantile(np.concatenate(means), [tail, 1 - tail], axis=0)
    return [Interval(float(low), float(high)) for low, high in zip(low_M, high_M, strict=True)]


def sign_flip_p_value(differences_P: Sequence[int]) -> float:
    """Exact two-sided p-value of the paired sign-flip (permutation) test on the sum of integer differences.

    If the two models were equal, each problem's difference could equally have the other sign. The p-value is
    the share of all 2^P sign choices whose sum is at least as far from 0 as the observed one. The
    distribution of the sum is computed exactly, problem by problem.
    """
    steps = [abs(int(difference)) for difference in differences_P if difference]
    observed, reach = abs(sum(differences_P)), sum(steps)
    share_of = np.zeros(2 * reach + 1)  # index: sum + reach
    share_of[reach] = 1.0
    for step in steps:
        up, down = np.zeros_like(share_of), np.zeros_like(share_of)
        up[step:], down[:-step] = share_of[:-step], share_of[step:]
        share_of = (up + down) / 2
    sums = np.arange(-reach, reach + 1)
    return min(1.0, float(share_of[np.abs(sums) >= observed].sum()))


def detectable_difference(difference_std: float, problems: int) -> float | None:
    """Minimal detectable difference of a paired test: ``(z(1 - SIGNIFICANCE / 2) + z(POWER)) std / sqrt(P)``.
    Equals 2.80 std / sqrt(P), with the standard deviation of the problems' differences and the normal
    quantile z. None for a standard deviation of 0, from which no sensitivity follows."""
    if not difference_std:
        return None
    normal = NormalDist()
    return (
        (normal.inv_cdf(1 - SIGNIFICANCE / 2) + normal.inv_cdf(POWER)) * difference_std / math.sqrt(problems)
    )


def standard_deviation(values_P: Sequence[float] | np.ndarray) -> float:
    """Return the sample standard deviation (divisor n - 1); 0 for a single value."""
    return float(np.std(values_P, ddof=1)) if len(values_P) > 1 else 0.0
