"""Evaluation metrics (avg@n, pass@k, maj@n) of scored responses: pure functions, without files.

For ``bapo eval``, and for held-out evaluations during training. Used in this folder and ``trainer/``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bapo_megatron.data.prepare.normal_form import answer_text
from bapo_megatron.evaluation.statistics import (
    RESAMPLES,
    bootstrap_intervals,
    detectable_difference,
    majority_vote,
    pass_at_k,
    rerun_std,
    standard_deviation,
)
from bapo_megatron.reward.answer_text import final_answer
from bapo_megatron.types import FinishReason, Metrics


@dataclass(frozen=True)
class ScoredResponse:
    """Scored response to a problem, without its text; the stored form of one response.

    Made by ``SuiteSampler`` and by ``trainer/evaluation.py``; ``score`` makes metrics of them.
    """

    problem: int
    """Row of the suite."""
    sample: int
    correct: bool
    answer: str | None
    """Answer as `vote_of` extracts it; None if there is none."""
    tokens: int
    finish_reason: FinishReason
    failure: str | None = None
    """Failure to score it; it counts as wrong. None on success."""


def vote_of(response: str, opens_thinking: bool = False) -> str | None:
    """Vote of a response for maj@n: its last box after the thinking part, in normal form.

    ``opens_thinking``: the chat template has opened that part in the prompt, as the reward knows it.
    """
    return vote_for(final_answer(response, opens_thinking))


def vote_for(answer: str | None) -> str | None:
    """Vote for an answer: its normal form; None if there is none, or nothing in it."""
    return (answer_text(answer) or None) if answer is not None else None


def score(
    responses: Sequence[ScoredResponse],
    pass_at: Sequence[int] = (),
    resamples: int = RESAMPLES,
    seed: int = 0,
    boxed: bool = True,
) -> Metrics:
    """Metrics of a suite's responses; each problem must have the same number n.

    All are shares: ``avg@n`` mean correctness; ``pass@k`` for each k of ``pass_at`` (up to n); ``maj@n``
    majority vote, None if no response has an answer (programs); each with ``_low`` and ``_high``, its 95 %
    interval over problems. ``maj@n_tied``: of problems, with a tie at the top. Of responses: ``truncated``,
    ``unanswered`` (no box; None unless ``boxed``: programs need none, a reward of the user's may not),
    ``unjudged``.
    ``response_tokens/...``: mean, median, 95th percentile, means of right and of wrong ones.
    ``rerun_std``, ``detectable_difference`` (None where all problems have the same avg@n): see `statistics`;
    the latter for another model that is as uneven
    over the problems and independent of this one. ValueError for missing or repeated samples.
    """
    by_problem = _by_problem(responses)
    samples = len(by_problem[0])
    correct_P = [sum(one.correct for one in group) for group in by_problem]
    votes = [majority_vote([o.answer for o in g], [o.correct for o in g]) for g in by_problem]
    columns: dict[str, list[float]] = {f"avg@{samples}": [count / samples for count in correct_P]}
    columns |= {f"pass@{k}": [pass_at_k(samples, count, k) for count in correct_P] for k in pass_at}
    has_answers = any(one.answer is not None for one in responses)
    if has_answers:
        columns[f"maj@{samples}"] = [vote.value for vote in votes]
    metrics: Metrics = {"problems": len(by_problem), "samples": samples}
    values_PM = np.array(list(columns.values())).T
    intervals = bootstrap_intervals(values_PM, resamples, seed)
    for name, value, interval in zip(columns, values_PM.mean(axis=0), intervals, strict=True):
        metrics |= {name: float(value), f"{name}_low": interval.low, f"{name}_high": interval.high}
    if has_answers:
        metrics[f"maj@{samples}_tied"] = float(np.mean([vote.tied for vote in votes]))
    else:
        metrics[f"maj@{samples}"] = None
    std = standard_deviation(columns[f"avg@{samples}"])
    metrics["rerun_std"] = rerun_std(samples, correct_P)
    metrics["detectable_difference"] = detectable_difference(std * 2**0.5, len(by_problem))
    about = _about_responses(responses)
    return metrics | (about if boxed else {**about, "unanswered": None})


def _by_problem(responses: Sequence[ScoredResponse]) -> list[list[ScoredResponse]]:
    found: defaultdict[int, dict[int, ScoredResponse]] = defaultdict(dict)
    for one in responses:
        found[one.problem][one.sample] = one
    counts = {len(group) for group in found.values()}
    if len(counts) != 1 or sum(len(group) for group in found.values()) != len(responses):
        raise ValueError(f"problems must have equally many samples, each once; they have {sorted(counts)}")
    return [list(found[problem].values()) for problem in sorted(found)]


def _about_responses(responses: Sequence[ScoredResponse]) -> Metrics:
    tokens = np.array([one.tokens for one in responses])
    correct = np.array([one.correct for one in responses])

    def mean(which: np.ndarray) -> float | None:
        return float(tokens[which].mean()) if which.any() else None

    return {
        "truncated": float(np.mean([one.finish_reason == "length" for one in responses])),
        "unanswered": float(np.mean([one.answer is None for one in responses])),
        "unjudged": float(np.mean([one.failure is not None for one in responses])),
        "response_tokens/mean": float(tokens.mean()),
        "response_tokens/median": float(np.median(tokens)),
        "response_tokens/95%": float(np.quantile(tokens, 0.95)),
        "response_tokens/right": mean(correct),
        "response_tokens/wrong": mean(~correct),
    }
