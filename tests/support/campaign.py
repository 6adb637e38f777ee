"""A run that is killed many times, at random moments, against one that never was: the same bits at the end.

    python -m tests.support.campaign --kills 200 [--seed 0]

Two processes train the demo with the local engine. All of it, one rank, or the sampler is killed with -9, or
it is told to stop by a signal; then the same command is started again. At the end metrics, updates and
weights must be those of the run that was left alone, and an audit must find every token of the journal in one
place: trained on, dropped for a reason, or kept for a later step. Only the segments in flight are in none.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path

from bapo_megatron.runtime.jsonl_log import read_jsonl
from tests.support.accounts import check_run
from tests.support.forked_commands import ROOT, start_bapo
from tests.support.metrics import results
from tests.support.processes import ranks_of, sampler_of
from tests.support.raw_journal import keeping_logs
from tests.support.short_runs import SUMS

FLAGS = (
    *("--parallel.data=2", "--checkpoint.every=2", "--evaluation.every=0", "--reward.workers=1"),
    *("--rollout.prompts-per-step=4", "--rollout.group-size=4"),
    *("--algorithm.bounds.target=0.65", "--algorithm.reuse-epochs=2"),
    *(f"--model.hf-path={ROOT / 'recipes/demo/policy'}", "--rollout.max-response-tokens=64"),
    *("--optimizer.lr=2e-4", SUMS, "--reward.function=tests.support.reward_functions:boxed"),
)
STEPS_A_KILL = 1.5
"""Steps of the run for each kill: there must be something left to harm."""
WHILE_STARTING = 0.25
"""Share of the kills that come before a run has begun to sample."""
HARMS = {"kill all": 4, "kill rank 0": 2, "kill rank 1": 2, "kill the sampler": 2, "SIGUSR1": 1, "SIGTERM": 1}
INTERRUPTED = 85


@dataclass
class Outcome:
    """What was done to a run, and what it cost."""

    kills: Counter[str] = field(default_factory=Counter)
    """By what was done, while the run started or later."""
    repeated: int = 0
    """Steps that were made again."""
    starts: int = 0
    tokens: Counter[str] = field(default_factory=Counter)
    """Of the journal, by what became of them."""


class Life:
    """One process of the command."""

    def __init__(self, run_dir: Path, words: Sequence[str]) -> None:
        """``words``: the recipe and its flags."""
        self.began, self._run_dir = time.time(), run_dir
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        with run_dir.with_suffix(".log").open("ab") as log:
            self.process = start_bapo("train", *words, f"--run-dir={run_dir}", log=log.fileno())

    def first_steps(self) -> list[int]:
        """The step that it began with, if it came so far."""
        log = self._run_dir / "events.jsonl"
        rows = read_jsonl(log) if log.exists() else []
        begun = [row for row in rows if row["kind"] in ("start", "resume")]
        return [row["step"] for row in begun if _seconds(row["time"]) > self.began]

    def harm(self, kind: str) -> None:
        """Do it, and see it end, if it is to end."""
        pid = self.process.pid
        if kind == "kill all":
            os.killpg(pid, signal.SIGKILL)
        elif kind.startswith("kill rank"):
            ranks, number = ranks_of(pid), int(kind[-1])
            os.kill(ranks[number].pid if number < len(ranks) else pid, signal.SIGKILL)
        elif kind == "kill the sampler":
            if found := sampler_of(pid):
                found.kill()
            return
        else:
            os.kill(pid, getattr(signal, kind))
        code = self.process.wait(300)
        if kind.startswith("kill"):
            assert code != 0
        with suppress(ProcessLookupError):  # what is left, as Slurm clears a job before it starts it again
            os.killpg(pid, signal.SIGKILL)


def _seconds(stamp: str) -> float:
    return datetime.fromisoformat(stamp).timestamp()


def last_step(run_dir: Path, name: str) -> int:
    """The newest step in a log; 0 if there is none."""
    log = run_dir / name
    rows = read_jsonl(log) if log.exists() else []
    return int(rows[-1]["step"]) if rows else 0


def campaign(folder: Path, kills: int, seed: int, say: Callable[[str], None]) -> Outcome:
    """Harm a run ``kills`` times, let it end, and hold it to one that was left alone."""
    chance, steps = random.Random(seed), max(6, int(STEPS_A_KILL * kills))
    words = ("recipes/demo_cpu.py", *FLAGS, f"--steps={steps}")
    whole, harmed = folder / "whole", folder / "harmed"
    alone = Life(whole, words)
    assert alone.process.wait(3600) == 0, whole.with_suffix(".log").read_text()[-3000:]
    start_s = _seconds(read_jsonl(whole / "events.jsonl")[0]["time"]) - alone.began
    step_s = statistics.median(row["time/step_s"] for row in read_jsonl(whole / "metrics.jsonl"))
    outcome = Outcome()
    with keeping_logs(harmed / "journal", kept := harmed.with_suffix(".kept")):
        while (done := sum(outcome.kills.values())) < kills and last_step(harmed, "metrics.jsonl") < steps:
            _harmed_life(harmed, words, chance, outcome, (start_s, step_s))
            say(f"{done} of {kills} kills before step {last_step(harmed, 'metrics.jsonl')} of {steps}")
        assert done >= kills, "the run was done before it was harmed so often"
        while (code := Life(harmed, words).process.wait(3600)) != 0:
            assert code == INTERRUPTED, harmed.with_suffix(".log").read_text()[-3000:]
    outcome.starts += 1
    outcome.tokens = check_run(harmed, kept, cut_steps=True).totals()
    for name in ("metrics.jsonl", "updates.jsonl"):
        assert not (found := _difference(harmed, whole, name)), found
    ours, theirs = ((run / "export/model.safetensors").read_bytes() for run in (harmed, whole))
    assert ours == theirs, "the weights differ"
    return outcome


def _difference(harmed: Path, whole: Path, name: str) -> str:
    """The first row of a log that differs, and in what; empty if none does."""
    ours, theirs = results(harmed, name), results(whole, name)
    for mine, other in zip(ours, theirs, strict=False):
        fields = [key for key in {**mine, **other} if mine.get(key) != other.get(key)]
        if fields:
            shown = ", ".join(f"{key} {mine.get(key)} for {other.get(key)}" for key in fields[:20])
            return f"{name}: step {other['step']}: {len(fields)} fields: {shown}"
    return "" if len(ours) == len(theirs) else f"{name}: {len(ours)} rows for {len(theirs)}"


def _harmed_life(
    run_dir: Path, words: Sequence[str], chance: random.Random, outcome: Outcome, spans_s: tuple[float, float]
) -> None:
    """Start the run, harm it at a random moment, and note what it cost.

    That is while it starts, or within the time of a step after it has made none, one or two more. How far it
    has come is looked at, not reckoned from the time: machines are as busy as they are. ``spans_s``: of a
    start, and of a step.
    """
    before = last_step(run_dir, "metrics.jsonl")
    life, steps = Life(run_dir, words), int(words[-1].partition("=")[2])
    process = life.process
    outcome.starts += 1
    [kind] = chance.choices(list(HARMS), list(HARMS.values()))
    starting = chance.random() < WHILE_STARTING
    while not starting and process.poll() is None and not life.first_steps():
        time.sleep(0.05)
    target = min(before + chance.randrange(3), steps - 2)
    while not starting and process.poll() is None and last_step(run_dir, "metrics.jsonl") < target:
        time.sleep(0.05)
    end = time.monotonic() + chance.uniform(0, spans_s[0] if starting else spans_s[1])
    while time.monotonic() < end and process.poll() is None:
        time.sleep(0.05)
    if process.poll() is not None:
        assert process.returncode == 0, run_dir.with_suffix(".log").read_text()[-3000:]
        return  # it was done
    when = "later" if life.first_steps() else "while it starts"
    for harm in (kind, "kill all") if kind == "kill the sampler" else (kind,):
        if harm != kind:
            time.sleep(chance.uniform(0, spans_s[1]))
        life.harm(harm)
        outcome.kills[f"{harm}, {when}"] += 1
    outcome.repeated += sum(max(0, before - first_step + 1) for first_step in life.first_steps())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="an empty folder for the runs, which stay there")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        outcome = campaign(folder, given.kills, given.seed, partial(print, flush=True))
    print(dict(outcome.kills), f"{outcome.starts} starts, {outcome.repeated} steps made again", sep="\n")
    print(dict(outcome.tokens), "lost: 0. Results equal bit for bit.")


if __name__ == "__main__":
    main()
