"""The study's Markdown document. All its numbers and verdicts are computed from the runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

import numpy as np

from bapo_megatron.config import RunConfig
from bapo_megatron.evaluation.statistics import standard_deviation
from benchmarks.study.claims import SMALLEST, Claim, Finding, Side, best_preset, by_seed, find
from benchmarks.study.document_text import (
    AGAINST_GRPO,
    CANNOT_SHOW,
    DEFINITIONS,
    METHOD,
    UNMOVED_BOUNDS,
    VERDICTS,
)
from benchmarks.study.measures import ArmRecord
from benchmarks.study.methods import BASELINE, METHODS, SETTINGS, STALE
from benchmarks.study.plan import StudyPlan
from benchmarks.study.runner import Failure

COLUMNS: dict[str, str] = {
    "final_reward": "final reward",
    "held_out": "held-out",
    "drawdown": "deepest fall",
    "first_entropy": "entropy, start",
    "final_entropy": "entropy, end",
    "spikes": "spikes / 100 updates",
    "clipped": "clipped tokens",
    "contribution": "positive contribution",
    "moved": "bounds moved",
    "clip_low": "c_low",
    "clip_high": "c_high",
}
"""Figures of the table, with their headings."""

_DIGITS = {"spikes": 1, "clipped": 4, "moved": 2, "clip_low": 2, "clip_high": 2}


def document(
    plan: StudyPlan,
    records: Sequence[ArmRecord],
    found: Sequence[Finding],
    failures: Sequence[Failure],
    pictures: dict[str, str],
) -> str:
    """The whole document. ``pictures``: titles by the path of the file as seen from the document."""
    parts = [
        *("# Staleness at toy scale", _summary(plan, records, failures), METHOD),
        *(_settings(plan), "## Verdicts", VERDICTS, _luck(found), _verdicts(found), *_set_aside(found)),
        *_not_tried(found),
        *("## Results", _results(records), "## All stale settings together", _together(plan, records)),
        *("## Against GRPO, setting by setting", AGAINST_GRPO, _against_grpo(plan, records)),
        *_entropy_and_learning(records),
        *("## Curves", *(f"**{title}**\n\n![{title}]({file})" for file, title in pictures.items())),
        *("## What the words mean", DEFINITIONS, "## What this cannot show", CANNOT_SHOW),
    ]
    if failures:
        parts += ["## Arms that failed", _failed(failures)]
    return "\n\n".join(parts) + "\n"


def _summary(plan: StudyPlan, records: Sequence[ArmRecord], failures: Sequence[Failure]) -> str:
    """The count of arms that are done, missing and failed."""
    options = plan.options
    quick = " (`--quick`: it shows that the study works, and little else)" if options.quick else ""
    steps = f"{plan.steps} step{'s' if plan.steps > 1 else ''}"
    lines = [
        f"Written by `bapo study staleness`{quick}: {len(records)} of {len(plan.arms)} arms are done, "
        f"{options.seeds} seed{'s' if options.seeds > 1 else ''} of {steps} each."
    ]
    if missing := len(plan.arms) - len(records) - len(failures):
        lines.append(f"**Not run: {missing}.** What follows is from those that are done.")
    if failures:
        lines.append(
            f"**Failed: {len(failures)}**, named at the end. A run that breaks is a result, too, and is in "
            "no number below."
        )
    return "\n".join(lines)


def _settings(plan: StudyPlan) -> str:
    base = plan.base
    rows = [
        ("recipe", f"`{plan.options.recipe.name}`"),
        ("steps", str(plan.steps)),
        ("batch", f"{base.rollout.prompts_per_step} prompts of {base.rollout.group_size} responses"),
        ("responses of an update", ", ".join(f"`{name}` {count}" for name, count in _responses(plan))),
        ("learning rate", f"{plan.options.lr or base.optimizer.lr:g}, {base.optimizer.decay}"),
        ("warm-up", f"{base.optimizer.warmup_updates} updates, whatever the setting"),
        ("gradients clipped at", f"{base.optimizer.clip_grad:g}"),
        ("temperature", f"{base.rollout.temperature:g}"),
        ("longest response", f"{base.rollout.max_response_tokens} tokens"),
        ("held-out", _held_out(base)),
        ("methods", ", ".join(f"`{name}`: {METHODS[name].label}" for name in plan.options.methods)),
        ("settings", ", ".join(f"`{name}`: {SETTINGS[name].label}" for name in plan.options.settings)),
    ]
    return _table(["", ""], rows)


def _responses(plan: StudyPlan) -> Iterator[tuple[str, int]]:
    """Most responses of one update, by setting."""
    rollout = plan.base.rollout
    for name in plan.options.settings:
        setting = SETTINGS[name]
        yield name, rollout.prompts_per_step * rollout.group_size // (setting.split * setting.updates)


def _held_out(base: RunConfig) -> str:
    evaluation = base.evaluation
    suites = ", ".join(f"`{Path(suite).name}`" for suite in evaluation.suites) or "none"
    temperature = base.rollout.temperature if evaluation.temperature is None else evaluation.temperature
    return f"{suites}; responses to each problem: {evaluation.samples}, temperature {temperature:g}"


def _luck(found: Sequence[Finding]) -> str:
    tested = sum(finding.verdict not in ("not tried", "does not apply") for finding in found)
    return (
        f"{tested} claims are tested. At 95 %, luck alone lets about {tested / 20:.0f} of the intervals "
        "exclude 0, and not independently: nearly all compare with the same runs of GRPO and share their "
        "luck."
    )


def _set_aside(found: Sequence[Finding]) -> Iterator[str]:
    """The claims that need bounds that move, where they do not, and the other way round."""
    aside: dict[Side, list[Finding]] = {}
    for finding in found:
        if finding.verdict == "does not apply":
            aside.setdefault(finding.claim.side, []).append(finding)
    if not aside:
        return
    lines = []
    for side, findings in aside.items():
        claim, moved = findings[0].claim, findings[0].moved or 0.0
        lines.append(
            f"- {side.label}: {len(findings)}, which need {claim.needs}. Here {100 * moved:.1f} % of the "
            "updates moved theirs."
        )
    yield "Not tested, because they do not apply:\n\n" + "\n".join(lines) + "\n\n" + UNMOVED_BOUNDS


def _not_tried(found: Sequence[Finding]) -> Iterator[str]:
    """The claims whose arms the study leaves out, or has not run yet."""
    counts = Counter(_compared(finding.claim) for finding in found if finding.verdict == "not tried")
    if counts:
        lines = "\n".join(f"- {compared}: {count}" for compared, count in counts.items())
        yield f"Claims not tried, because no seed has both arms:\n\n{lines}"


def _verdicts(found: Sequence[Finding]) -> str:
    rows = []
    for finding in found:
        if finding.verdict in ("does not apply", "not tried"):
            continue
        claim = finding.claim
        compared = f"{claim.figure}: {_compared(claim)}"
        sign = "above" if claim.sign > 0 else "below"
        rows.append(
            (
                claim.text,
                claim.source,
                f"{compared}, {sign} 0 (matters from {SMALLEST[claim.figure]:g})",
                _effect(finding),
                f"**{finding.verdict}**",
            )
        )
    return _table(["claim", "source", "here", "difference (95 % interval), seeds", "verdict"], rows)


def _compared(claim: Claim) -> str:
    return f"{claim.side.label} - {claim.other.label if claim.other else '1/2'}"


def _effect(finding: Finding) -> str:
    effect = finding.effect
    if effect is None:
        return "-"
    if effect.pairs == 1:
        return f"{effect.mean:+.3f}, 1"
    return f"{effect.mean:+.3f} ({effect.low:+.3f} to {effect.high:+.3f}), {effect.pairs}"


def _results(records: Sequence[ArmRecord]) -> str:
    rows = []
    for setting in SETTINGS:
        for method in METHODS:
            cell = [one for one in records if (one.method, one.setting) == (method, setting)]
            if cell:
                rows.append((setting, method, str(len(cell)), *_cells(cell)))
    heads = [*COLUMNS.values(), "collapses", "entropy collapses"]
    return _table(["setting", "method", "seeds", *heads], rows)


def _cells(cell: Sequence[ArmRecord]) -> Iterator[str]:
    for name in COLUMNS:
        yield _mean_and_spread([one.figures[name] for one in cell], _DIGITS.get(name, 3))
    for name in ("collapsed", "entropy_collapsed"):
        yield f"{sum(one.figures[name] for one in cell):.0f} of {len(cell)}"


def _together(plan: StudyPlan, records: Sequence[ArmRecord]) -> str:
    """Methods over the stale settings by reuse, on the seeds that have all of them."""
    settings = tuple(name for name in STALE if name in plan.options.settings)
    if not settings:
        return "The study has none."
    rows = []
    for method in plan.options.methods:
        figures = {name: by_seed(records, Side(method, settings), name) for name in _TOGETHER}
        seeds = len(figures["final_reward"])
        values = (
            _mean_and_spread(list(of_seed.values()), _DIGITS.get(name, 3))
            for name, of_seed in figures.items()
        )
        rows.append((method, str(seeds), *values))
    table = _table(["method", "seeds", *_TOGETHER.values()], rows)
    return "\n\n".join(
        (f"Means over {', '.join(f'`{name}`' for name in settings)}.", table, *_best(plan, records))
    )


def _against_grpo(plan: StudyPlan, records: Sequence[ArmRecord]) -> str:
    """Differences in held-out problems, paired by seed."""
    settings = [name for name in (*STALE, "partial") if name in plan.options.settings]
    rows = []
    for method in plan.options.methods:
        if method == BASELINE:
            continue
        claims = [
            Claim("", "", "held_out", 1, Side(method, (name,)), Side(BASELINE, (name,))) for name in settings
        ]
        rows.append((method, *(_effect(find(records, claim)) for claim in claims)))
    return _table(["method", *settings], rows)


def _entropy_and_learning(records: Sequence[ArmRecord]) -> Iterator[str]:
    """The correlation of the entropy that an arm keeps with its held-out share."""
    figures = [
        (one.figures["entropy_kept"], one.figures["held_out"]) for one in records if one.setting in STALE
    ]
    known = np.array([pair for pair in figures if np.isfinite(pair).all()])
    if len(known) >= _LEAST_ARMS and (known.std(0) > 0).all():
        yield (
            f"Over the {len(known)} stale arms the entropy kept and the share of held-out problems "
            f"answered right correlate at {np.corrcoef(known.T)[0, 1]:+.2f}. Where a policy learns by giving "
            "up a habit, entropy falls because it learns: more entropy left is no success by itself."
        )


def _best(plan: StudyPlan, records: Sequence[ArmRecord]) -> Iterator[str]:
    """The best preset of BAPO, and its differences from the others."""
    compared = best_preset(records, plan.options.settings)
    if compared:
        best = " and ".join(
            [f"`{compared[0][0]}`", *(f"`{name}`" for one in compared if (name := _ties(one[1])))]
        )
        lines = [f"- {_against(finding)}" for _, finding in compared]
        yield (
            f"Of BAPO's presets, most held-out problems: {best}. (The best of several noisy means looks "
            "better than it is.)\n\n" + "\n".join(lines)
        )


def _ties(finding: Finding) -> str:
    """The other preset's name if it did as well in every seed."""
    effect = finding.effect
    tied = effect is not None and effect.low == effect.high == 0
    return finding.claim.other.method if tied and finding.claim.other else ""


def _against(finding: Finding) -> str:
    other = finding.claim.other.method if finding.claim.other else ""
    word = _WORDS.get(finding.verdict, finding.verdict)
    return f"against `{other}`: {_effect(finding)} seeds; **{word}**"


_WORDS = {"seen": "better", "not seen": "no advantage that matters"}
_LEAST_ARMS = 8

_TOGETHER = {
    "final_reward": "final reward",
    "held_out": "held-out",
    "mean_reward": "mean reward of the run",
    "drawdown": "deepest fall",
    "entropy_kept": "entropy, end / start",
    "spikes": "spikes / 100 updates",
}


def _failed(failures: Sequence[Failure]) -> str:
    return "\n".join(f"- `{failure.arm.name}`: {failure.reason}" for failure in failures)


def _mean_and_spread(values: Sequence[float], digits: int) -> str:
    """Mean and standard deviation over seeds, of those that exist."""
    known = [value for value in values if np.isfinite(value)]
    if not known:
        return "-"
    middle = f"{fmean(known):.{digits}f}"
    return f"{middle} ± {standard_deviation(known):.{digits}f}" if len(known) > 1 else middle


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
