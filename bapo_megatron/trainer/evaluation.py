"""Held-out evaluation during training: the share of right answers (avg@n), at the weights of a step.

The loop calls ``evaluate_if_due`` between steps, on every rank, and waits; the sampler's engines sample the
answers to ``evaluation.suites``, and rank 0 computes and records the metrics. Used by ``train.py``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bapo_megatron.config.validation import BOXED_REWARDS
from bapo_megatron.evaluation.scoring import ScoredResponse, score, vote_for, vote_of
from bapo_megatron.trainer.build import Run
from bapo_megatron.trainer.flow_control import WAIT_S, give_gpus_to_engines, wait_for_sampler
from bapo_megatron.types import Metrics


def evaluate_if_due(run: Run, step: int) -> None:
    """Evaluate the weights after ``step`` if an evaluation is due; training waits. Collective.

    RunStopped or Preempted, after a checkpoint, as of ``wait_for_sampler``.
    """
    if not run.config.evaluates(step):
        return
    give_gpus_to_engines(run, step)
    path: Path = wait_for_sampler(run, step, lambda sampler: sampler.evaluated(step, WAIT_S))
    if run.recorder:
        metrics = evaluation_metrics(path, boxed=run.config.reward.function in BOXED_REWARDS)
        run.recorder.evaluation(step, metrics)
        run.checkpoints.record_score(step, metrics["eval/mean"] or 0.0)


def evaluation_metrics(path: Path, boxed: bool = True) -> Metrics:
    """Evaluation metrics of a file of responses: ``eval/SUITE/...``, and ``eval/mean``, the mean of avg@n.

    ``boxed``: whether an answer without a box counts as ``unanswered`` (``evaluation/scoring.py``), in suites
    whose rows do not say otherwise.
    """
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    metrics: Metrics = {}
    means = []
    for suite in dict.fromkeys(row["suite"] for row in rows):
        own = [row for row in rows if row["suite"] == suite]
        scored, in_boxes = [_scored(row) for row in own], boxed and own[0].get("boxed", True)
        metrics |= {f"eval/{suite}/{name}": value for name, value in score(scored, boxed=in_boxes).items()}
        means.append(sum(one.correct for one in scored) / len(scored))
    return {**metrics, "eval/mean": sum(means) / len(means)}


def _scored(row: dict[str, Any]) -> ScoredResponse:
    fields = {
        name: row[name] for name in ("problem", "sample", "correct", "tokens", "finish_reason", "failure")
    }
    # Rows of earlier versions have no answer; they do not say whether the prompt opened the thinking part.
    vote = vote_for(row["answer"]) if "answer" in row else vote_of(row["response"])
    return ScoredResponse(answer=vote, **fields)
