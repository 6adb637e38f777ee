"""One suite of an evaluation as a task: the responses still to sample, and those to rescore.

``open_task`` locks the suite's output folder, raises ConfigError if responses there have other settings, and
returns a ``SuiteTask``. Responses whose scoring failed are rescored; with an environment, sampled again.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bapo_megatron import __version__
from bapo_megatron.config.validation import settings_of_scores
from bapo_megatron.data.problem_sets import Suite
from bapo_megatron.evaluation.options import EvalOptions
from bapo_megatron.evaluation.responses import FORMAT, Responses, open_folder, read_responses
from bapo_megatron.evaluation.unjudged import StoredResponse, unjudged_responses
from bapo_megatron.runtime.jsonl_log import Row


@dataclass(frozen=True)
class SuiteTask:
    """One suite of an evaluation: its output folder (locked), and the responses to sample or rescore."""

    suite: Suite
    folder: Path
    settings: Row
    log: Responses
    places: list[tuple[int, int]]
    """(problem, sample) of each response to sample."""
    unjudged: list[StoredResponse]


def open_task(opened: ExitStack, suite: Suite, options: EvalOptions, model: Row, output: Path) -> SuiteTask:
    """Open a suite's folder until ``opened`` exits, find the responses to sample and to rescore, and print
    their numbers. ``model``: checkpoint and digest. Raises ConfigError as ``open_folder`` does."""
    reward: dict[str, Any] = {}  # absent in older evaluations
    if options.reward is not None:
        asked = settings_of_scores(options.reward, options.reward_settings)
        about = {"function": options.reward, "correct": options.reward_correct}
        reward = {"reward": {**about, **({"settings": asked} if asked else {})}}
    settings = {
        "format": FORMAT,
        "suite": {
            "name": suite.name,
            "path": str(suite.path.resolve()),
            "sha256": suite.sha256,
            "problems": len(suite.prompts),
        },
        "model": model,
        "sampling": options.sampling(),
        **reward,
        "samples": options.samples,
        "code_version": __version__,
    }
    folder = output / suite.name
    log = opened.enter_context(open_folder(folder, settings))
    by_text = options.environment.function is None
    there = {
        (response.problem, response.sample)
        for response in read_responses(log.path, options.samples)
        if by_text or response.failure is None
    }
    unjudged = unjudged_responses(log.path, options.samples)
    every = [(problem, sample) for sample in range(options.samples) for problem in range(len(suite.prompts))]
    places = [place for place in every if place not in there]
    if there:
        print(f"{suite.name}: {len(there)} of {len(every)} responses are there", flush=True)
    if unjudged:
        what = "scored" if by_text else "sampled"
        print(
            f"{suite.name}: {len(unjudged)} responses could not be scored, and are {what} again", flush=True
        )
    return SuiteTask(suite, folder, settings, log, places, unjudged if by_text else [])


class Progress:
    """Callback for a suite's sampled responses: stores the rows, and prints a line at every 5 % of them."""

    def __init__(self, task: SuiteTask) -> None:
        self._task, self._done, self._right, self._judged, self._shown = task, 0, 0, 0, 0

    def __call__(self, rows: Sequence[Row]) -> None:
        self._task.log.append_all(rows)
        self._done += len(rows)
        self._right += sum(row["correct"] for row in rows)
        self._judged += sum(row["failure"] is None for row in rows)
        total = len(self._task.places)
        if self._done == total or self._done - self._shown >= max(1, total // 20):
            self._shown = self._done
            right = self._right / max(1, self._judged)
            print(
                f"{self._task.suite.name}: {self._done} of {total} responses, {right:.1%} right", flush=True
            )
