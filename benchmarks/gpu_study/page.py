"""Renderer of the GPU study's page: a row for each arm, and held-out answers problem by problem.

Used in this folder.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from bapo_megatron.runtime.jsonl_log import read_jsonl
from bapo_megatron.runtime.run_paths import RunPaths
from benchmarks.gpu_study.arms import ARMS, GpuStudyOptions
from benchmarks.study.measures import ArmRecord, read_arm
from benchmarks.study.pages.document import COLUMNS
from benchmarks.study.pages.tables import mean_and_spread, table
from benchmarks.study.paired import paired_effect
from benchmarks.study.plan import Arm

BASE = "grpo"
"""The arm that the others are compared with."""
_LIMITS = """\
One seed of each arm: the intervals are of the held-out problems, and not of runs, so a difference may be one
of seeds. Staleness is passes x mini-batches. *Bounds moved* is the share of the stale updates in which BAPO's
search moved a bound; where it is near 0, the arm is fixed (0.6, 1.2)."""


def page(options: GpuStudyOptions, arms: Sequence[Arm]) -> str:
    """The page of the arms that are done."""
    done = [arm for arm in arms if arm.is_done()]
    records = {arm.name: read_arm(arm) for arm in done}
    seconds = {arm.name: _seconds(arm.run_dir) for arm in done}
    rows = [_row(arm, records[arm.name], seconds[arm.name]) for arm in done]
    heads = ["arm", "staleness", "minutes", *(head for head, _ in COLUMNS.values())]
    small = "**Small, for a CPU: it shows that the program runs, and nothing else.**" if options.small else ""
    parts = [
        "# Stale data on one GPU",
        f"Model `{options.model.name}`, {len(done)} of {len(arms)} arms. {small}".strip(),
        table(heads, rows),
        "## Held-out problems, against GRPO at the same staleness",
        _paired(done),
        _LIMITS,
    ]
    return "\n\n".join(parts) + "\n"


def _row(arm: Arm, record: ArmRecord, seconds: float) -> list[str]:
    figures = [mean_and_spread([record.figures[name]], digits) for name, (_, digits) in COLUMNS.items()]
    return [f"{ARMS[arm.name].method.label} (`{arm.name}`)", str(arm.passes), f"{seconds / 60:.1f}", *figures]


def _seconds(run_dir: Path) -> float:
    """Seconds of all steps of a run."""
    return sum(row.get("time/step_s") or 0.0 for row in read_jsonl(RunPaths(run_dir).metrics))


def _paired(done: Sequence[Arm]) -> str:
    """Share of right answers minus that of ``BASE``, paired by problem, with 95 % intervals."""
    right = {arm.name: right_answers(arm) for arm in done}
    if BASE not in right:
        return f"`{BASE}` has not run."
    rows = []
    for name, answers in right.items():
        shared = sorted(answers.keys() & right[BASE].keys())
        effect = paired_effect([answers[problem] - right[BASE][problem] for problem in shared])
        if name != BASE and effect is not None:
            words = f"{effect.mean:+.3f} ({effect.low:+.3f} to {effect.high:+.3f})"
            rows.append((f"`{name}`", words, str(effect.pairs)))
    return table(["arm", "right answers minus GRPO's (95 % interval)", "problems"], rows)


def right_answers(arm: Arm) -> dict[tuple[str, int], float]:
    """Share of right responses to each held-out problem, of the last weights."""
    rows = read_jsonl(RunPaths(arm.run_dir).evaluation_responses(arm.steps))
    count, right = Counter[tuple[str, int]](), Counter[tuple[str, int]]()
    for row in rows:
        problem = (row["suite"], row["problem"])
        count[problem] += 1
        right[problem] += bool(row["correct"])
    return {problem: right[problem] / of for problem, of in count.items()}
