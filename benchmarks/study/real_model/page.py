"""Renderer of the third study's document: its design, its gate, then what the runs say.

Used in this folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.study.contrasts import contrast
from benchmarks.study.controller.arms import STALE, START, VARIANTS, WARM_STEPS
from benchmarks.study.controller.gates import CONTROLLER
from benchmarks.study.gates import gate_results
from benchmarks.study.measures import ArmRecord
from benchmarks.study.methods import BASELINE
from benchmarks.study.pages.document import COLUMNS
from benchmarks.study.pages.tables import effect_text, mean_and_spread, table
from benchmarks.study.plan import StudyPlan

COMMAND = "bapo study real-model --write benchmarks/results/real_model_study.md"
_OUTCOMES = {"mean_reward": "mean reward", "held_out": "held out"}


def page(plan: StudyPlan, records: Sequence[ArmRecord], failures: Sequence[str]) -> str:
    """The whole document."""
    results = plan.options.results.name
    computed = f"All numbers are computed from [{results}]({results})." if records else "None has run."
    parts = [
        "# Stale data on a real model",
        f"Command: `{COMMAND}`",
        f"{len(records)} of {len(plan.arms)} arms are done. {computed}",
        *("## The design", *_design(plan)),
    ]
    if records:
        parts += ["## Does the search act?", _gate(records)]
        parts += ["## The arms", _arms(records)]
        parts += [f"## Against GRPO at staleness {STALE}", _contrasts(records)]
    if failures:
        parts += ["## Arms that failed", "\n".join(f"- {one}" for one in failures)]
    return "\n\n".join(parts) + "\n"


def _design(plan: StudyPlan) -> Iterator[str]:
    base = plan.base
    yield (
        "The question of [the second study](controller_study.md) on SmolLM2-135M-Instruct, a pretrained "
        "model: sums, differences and products of one digit (reasoning-gym) behind a prompt that asks for "
        "reasoning. Wrong responses are the longer ones, so positive tokens hold less than BAPO's target at "
        "first."
    )
    yield (
        f"{plan.steps} steps of {base.rollout.prompts_per_step} prompts with {base.rollout.group_size} "
        f"responses of at most {base.rollout.max_response_tokens} tokens; groups of equal rewards are "
        f"dropped. Learning rate {plan.options.lr or base.optimizer.lr:g} in every arm, {WARM_STEPS} steps "
        f"of warm-up. Staleness 1, and {STALE}: two passes of four mini-batches. Seeds 0 to "
        f"{plan.options.seeds - 1}, shared by all arms."
    )
    yield (
        f"**What it may say.** How `paper` differs from `{START}`, where its search begins, only if a "
        f"bound moves in at least {CONTROLLER.low:g} of its stale updates. Differences are shown with 95 % "
        "intervals (Student's t, paired by seed), uncorrected: few seeds show large differences alone, and "
        "no method is called better or worse. It says nothing of larger models or longer responses."
    )


def _gate(records: Sequence[ArmRecord]) -> str:
    [found] = gate_results(records, (CONTROLLER,))
    if not found.seeds:
        return "No arm of `paper` is done."
    if found.passed:
        return f"Yes: a bound moved in {found.shown} of the stale updates of `paper`."
    return f"**No**: a bound moved in {found.shown} of the stale updates of `paper`. {CONTROLLER.says}"


def _arms(records: Sequence[ArmRecord]) -> str:
    rows = []
    for staleness, name in sorted({(one.passes, one.method) for one in records}):
        cell = [one for one in records if (one.method, one.passes) == (name, staleness)]
        figures = [
            mean_and_spread([one.figures[key] for one in cell], digits)
            for key, (_, digits) in COLUMNS.items()
        ]
        rows.append((str(staleness), f"`{name}` ({VARIANTS[name].label})", str(len(cell)), *figures))
    return table(["staleness", "arm", "seeds", *(head for head, _ in COLUMNS.values())], rows)


def _contrasts(records: Sequence[ArmRecord]) -> str:
    names = sorted({one.method for one in records if one.passes == STALE} - {BASELINE})
    rows = [
        (f"`{name}`", *(effect_text(contrast(records, name, BASELINE, STALE, key)) for key in _OUTCOMES))
        for name in names
    ]
    shown = table(["minus `grpo`", *_OUTCOMES.values()], rows)
    [acts] = gate_results(records, (CONTROLLER,))
    if not acts.passed:
        return shown
    search = [effect_text(contrast(records, "paper", START, STALE, key)) for key in _OUTCOMES]
    return f"{shown}\n\n{table([f'minus `{START}`', *_OUTCOMES.values()], [('`paper`', *search)])}"
