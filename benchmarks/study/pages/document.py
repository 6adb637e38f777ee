"""Renderer of the study's Markdown document. All numbers and verdicts are computed from the runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

import numpy as np

from bapo_megatron.config import RunConfig
from benchmarks.study.contrasts import (
    OUTCOME,
    Contrast,
    by_seed,
    contrast,
    entropy_at_equal_reward,
    out_of_sample,
    primary,
)
from benchmarks.study.gates import GateResult, gate_results
from benchmarks.study.measures import ArmRecord
from benchmarks.study.methods import BASELINE, COMPARED, METHODS, PASSES, PRIMARY
from benchmarks.study.pages import text
from benchmarks.study.pages.figures import name_of
from benchmarks.study.pages.paper_figures import READ
from benchmarks.study.pages.tables import effect_text, mean_and_spread, table
from benchmarks.study.plan import SAMPLES, StudyPlan
from benchmarks.study.runner import Failure

COLUMNS: dict[str, tuple[str, int]] = {
    "mean_reward": ("mean reward", 3),
    "best_reward": ("best", 3),
    "final_reward": ("end", 3),
    "held_out": ("held-out", 3),
    "entropy_kept": ("entropy kept", 2),
    "spikes": ("spikes / 100 updates", 1),
    "clipped": ("clipped", 4),
    "positive_share": ("positive share", 3),
    "raised_tokens": ("tokens with r > 1.2", 4),
    "raised_probability": ("sampled with", 2),
    "moved": ("bounds moved", 2),
    "clip_low": ("c_low", 3),
    "clip_high": ("c_high", 2),
}
"""Figures of the table: heading and digits."""
_UNPLANNED = (
    ("paper", 4, "fixed_0.6_1.2", 4),
    ("paper", PRIMARY, "fixed_0.6_1.2", PRIMARY),
    ("balanced", PRIMARY, "fixed_0.6_1.2", PRIMARY),
    ("gspo", PRIMARY, BASELINE, 2),
)
"""Methods and passes of the contrasts that no one had planned."""
_SECONDARY = {"mean_reward": "mean reward", "held_out": "held-out", "spikes": "spikes / 100 updates"}


def document(
    plan: StudyPlan, records: Sequence[ArmRecord], failures: Sequence[Failure], pictures: dict[str, str]
) -> str:
    """The whole document. ``pictures``: titles by the path of the file as seen from the document."""
    gates = gate_results(records)
    drawn = [f"**{title}**\n\n![{title}]({file})" for file, title in pictures.items()]
    unjudged = plan.options.quick or plan.options.calibrate or bool(_failed_gates(gates))
    parts = [
        *("# Stale data, and what helps: a study at toy scale", _summary(plan, records, failures)),
        *(text.LATER, *_banner(plan)),
        *("## The answer", *_answer(plan, records, gates), "## What was run", text.METHOD, _settings(plan)),
        *("## The gates", text.GATES, _gates(gates)),
        *("## The primary contrasts", text.PRIMARY, _primary(records, unjudged)),
        *("## All methods", _results(records), "## Against GRPO", text.SECONDARY, *_against_grpo(records)),
        *("## Other differences", text.UNPLANNED, *_unplanned(records)),
        *("## The paper's figures, here", _read(), *drawn),
        *("## What this says about 32B", text.SCOPE, "## What the words mean", text.DEFINITIONS),
    ]
    if failures:
        parts += ["## Arms that failed", _failures(failures)]
    return "\n\n".join(parts) + "\n"


def _summary(plan: StudyPlan, records: Sequence[ArmRecord], failures: Sequence[Failure]) -> str:
    """The count of arms that are done, missing and failed."""
    seeds, steps = plan.options.seeds, plan.steps
    results = plan.options.results.name
    lines = [
        f"Written by `bapo study staleness`: {len(records)} of {len(plan.arms)} arms are done, "
        f"{seeds} seed{'s' if seeds > 1 else ''} of {steps} step{'s' if steps > 1 else ''} each. "
        f"All numbers and pictures are computed from [{results}]({results}), one line for each arm."
    ]
    if missing := len(plan.arms) - len(records) - len(failures):
        lines.append(f"**Not run: {missing}.** What follows is from those that are done.")
    if failures:
        lines.append(f"**Failed: {len(failures)}**, named at the end, and in no number below.")
    return "\n".join(lines)


def _banner(plan: StudyPlan) -> Iterator[str]:
    if plan.options.quick:
        yield text.QUICK
    if plan.options.calibrate:
        yield text.CALIBRATION


def _failed_gates(gates: Sequence[GateResult]) -> list[GateResult]:
    return [one for one in gates if not one.passed]


def _answer(plan: StudyPlan, records: Sequence[ArmRecord], gates: Sequence[GateResult]) -> Iterator[str]:
    """The verdicts in words, or why there are none."""
    if plan.options.quick or plan.options.calibrate:
        yield "Not judged: see above."
        return
    if failed := _failed_gates(gates):
        yield "**Not judged.** A condition that was fixed before the study failed:"
        yield "\n".join(f"- Not judged: {one.failure}" for one in failed)
        yield text.UNJUDGED
        return
    yield "All gates hold. At 8 passes over each batch, by the mean reward of the run:"
    yield "\n".join(f"- {_sentence(one)}" for one in primary(records))
    yield text.REPAIR
    chosen = out_of_sample(records)
    if chosen is None:
        yield "Not judged: no half of the seeds has both a repair and fixed bounds."
    else:
        yield (
            f"Seeds {_seeds(chosen.repair.seeds)} chose `{chosen.repair.method}` "
            f"({chosen.repair.mean:.3f}) and `{chosen.fixed.method}` ({chosen.fixed.mean:.3f}). "
            f"On the others: {_sentence(chosen.contrast)}"
        )


def _seeds(seeds: Sequence[int]) -> str:
    return ", ".join(map(str, seeds))


def _sentence(one: Contrast) -> str:
    """`paper` against `grpo`: better. +0.068 (0.024 to 0.112), p = 0.01, 12 seeds."""
    p = "" if one.p is None else f", p = {one.p:.2g}"
    return f"`{one.method}` against `{one.other}`: **{one.words}**. {effect_text(one)}{p}"


def _settings(plan: StudyPlan) -> str:
    base = plan.base
    rows = [
        ("recipe", f"`{plan.options.recipe.name}`"),
        ("batch", f"{base.rollout.prompts_per_step} prompts of {base.rollout.group_size} responses"),
        ("learning rate", f"{plan.options.lr or base.optimizer.lr:g}, {base.optimizer.decay}"),
        ("warm-up", f"{base.optimizer.warmup_updates} updates"),
        ("gradients clipped at", f"{base.optimizer.clip_grad:g}"),
        ("temperature", f"{base.rollout.temperature:g}"),
        ("longest response", f"{base.rollout.max_response_tokens} tokens"),
        ("held-out", _held_out(base)),
        ("seeds", f"{plan.options.seed_numbers[0]} to {plan.options.seed_numbers[-1]}"),
        ("methods", ", ".join(f"`{name}`: {METHODS[name].label}" for name in plan.options.methods)),
        ("passes", ", ".join(map(name_of, plan.options.passes))),
    ]
    return table(["", ""], rows)


def _held_out(base: RunConfig) -> str:
    suites = ", ".join(f"`{Path(suite).name}`" for suite in base.evaluation.suites) or "none"
    return f"{suites}; responses to each problem: {max(base.evaluation.samples, SAMPLES)}"


def _gates(gates: Sequence[GateResult]) -> str:
    rows = [
        (
            one.gate.text,
            f"GRPO, {name_of(one.gate.passes)}",
            one.gate.range,
            one.shown,
            str(one.seeds),
            "holds" if one.passed else "**fails**",
            one.gate.paper,
        )
        for one in gates
    ]
    return table(["gate", "measured at", "must be", "is", "seeds", "", "the paper's"], rows)


def _primary(records: Sequence[ArmRecord], unjudged: bool) -> str:
    rows = []
    for one in primary(records):
        p = "-" if one.p is None else f"{one.p:.3g}"
        verdict = "not judged" if unjudged else f"**{one.words}**"
        rows.append((f"`{one.method}` - `{one.other}`", effect_text(one), p, verdict))
    return table(["contrast at 8x", "difference (95 % interval), seeds", "Holm's p", "verdict"], rows)


def _results(records: Sequence[ArmRecord]) -> str:
    rows = []
    for passes in PASSES:
        for method in METHODS:
            cell = [one for one in records if (one.method, one.passes) == (method, passes)]
            if cell:
                rows.append((name_of(passes), f"`{method}`", *_cells(cell)))
    return table(["passes", "method", "collapses", *(head for head, _ in COLUMNS.values())], rows)


def _cells(cell: Sequence[ArmRecord]) -> Iterator[str]:
    yield f"{sum(one.figures['collapsed'] for one in cell):.0f} of {len(cell)}"
    for name, (_, digits) in COLUMNS.items():
        yield mean_and_spread([one.figures[name] for one in cell], digits)


def _against_grpo(records: Sequence[ArmRecord]) -> Iterator[str]:
    """A table for each staleness at which all methods run."""
    for passes in COMPARED:
        rows = []
        for method in METHODS:
            if method == BASELINE or not any((one.method, one.passes) == (method, passes) for one in records):
                continue
            effects = [effect_text(contrast(records, method, BASELINE, passes, name)) for name in _SECONDARY]
            entropy = effect_text(entropy_at_equal_reward(records, method, BASELINE, passes))
            rows.append((f"`{method}`", *effects, entropy))
        if rows:
            heads = ["method", *_SECONDARY.values(), "entropy at equal reward, nats"]
            yield f"At {passes} passes:\n\n{table(heads, rows)}"


def _unplanned(records: Sequence[ArmRecord]) -> Iterator[str]:
    """Contrasts beside the planned ones, and how the methods' rewards go with the steps of their ratios."""
    rows = []
    for method, passes, other, other_passes in _UNPLANNED:
        found = contrast(records, method, other, passes, other_passes=other_passes)
        pair = f"`{method}`, {name_of(passes)} - `{other}`, {name_of(other_passes)}"
        rows.append((pair, effect_text(found)))
    yield table(["", "difference (95 % interval), seeds"], rows)
    means = [
        [fmean(runs.values()) for name in METHODS if (runs := by_seed(records, name, PRIMARY, figure))]
        for figure in (OUTCOME, "raised_tokens")
    ]
    if len(means[0]) == len(means[1]) > 1:
        correlation = np.corrcoef(*np.argsort(np.argsort(means)))[0][1]
        yield (
            f"Over the {len(means[0])} methods at {name_of(PRIMARY)} Spearman's correlation of the mean "
            f"reward with the share of tokens whose ratio is above 1.2 is {correlation:.2f}."
        )


def _read() -> str:
    rows = [(one.figure, one.read, one.limits) for one in READ]
    return table(["figure", "read from the paper's graphics", "not read, or not comparable"], rows)


def _failures(failures: Sequence[Failure]) -> str:
    return "\n".join(f"- `{failure.arm.name}`: {failure.reason}" for failure in failures)
