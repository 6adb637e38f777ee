"""Renderer of the GPU study's page: a row per arm, and held-out answers problem by problem."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import isfinite
from pathlib import Path

from bapo_megatron.runtime.jsonl_log import read_jsonl
from bapo_megatron.runtime.run_paths import RunPaths
from studies.gpu_study.arms import Arm, GpuStudyOptions
from studies.gpu_study.figures import COLUMNS, figures_of
from studies.paired import paired_effect

BASE = "grpo"
"""Baseline arm of the comparisons."""
_LIMITS = """\
One seed of each arm: the intervals are of the held-out problems, and not of runs, so a difference may be one
of seeds. Staleness is passes x mini-batches. *Bounds moved* is the share of the stale updates in which BAPO's
search moved a bound; where it is near 0, the arm is fixed (0.6, 1.2)."""


def page(options: GpuStudyOptions, arms: Sequence[Arm]) -> str:
    """Page of the finished arms."""
    done = [arm for arm in arms if arm.is_done()]
    rows = [_row(arm) for arm in done]
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


def _row(arm: Arm) -> list[str]:
    stats = figures_of(arm.run_dir, arm.steps)
    figures = [
        f"{stats[name]:.{digits}f}" if isfinite(stats[name]) else "-" for name, (_, digits) in COLUMNS.items()
    ]
    method, minutes = arm.method, _seconds(arm.run_dir) / 60
    return [f"{method.label} (`{arm.name}`)", str(method.staleness), f"{minutes:.1f}", *figures]


def _seconds(run_dir: Path) -> float:
    """Total seconds of a run's steps."""
    return sum(row.get("time/step_s") or 0.0 for row in read_jsonl(RunPaths(run_dir).metrics))


def _paired(done: Sequence[Arm]) -> str:
    """Table of the right answers minus those of ``BASE``, paired by problem, with 95 % intervals."""
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
    """Share of right responses to each held-out problem, with the last weights."""
    rows = read_jsonl(RunPaths(arm.run_dir).evaluation_responses(arm.steps))
    count, right = Counter[tuple[str, int]](), Counter[tuple[str, int]]()
    for row in rows:
        problem = (row["suite"], row["problem"])
        count[problem] += 1
        right[problem] += bool(row["correct"])
    return {problem: right[problem] / of for problem, of in count.items()}


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
