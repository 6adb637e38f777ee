"""Renderer of the third study's document: its design, its gate, then what the runs say.

Used in this folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean, mode

from benchmarks.study.contrasts import by_seed
from benchmarks.study.controller.arms import STALE, START, UPDATES, VARIANTS, WARM_STEPS
from benchmarks.study.controller.gates import CONTROLLER, ENTROPY, GATES, results_of
from benchmarks.study.controller.page import gates_table
from benchmarks.study.gates import gate_results
from benchmarks.study.measures import TARGET, ArmRecord
from benchmarks.study.methods import BAPO, BASELINE, SEARCH_TOKENS
from benchmarks.study.pages.document import COLUMNS
from benchmarks.study.pages.tables import OUTCOMES, mean_and_spread, outcomes, table
from benchmarks.study.plan import StudyPlan

COMMAND = "bapo study real-model --write benchmarks/results/real_model_study.md"


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
        parts += ["## Does the search act?", *_gate(records)]
        parts += ["## The second study's gates, here", *_foreign_gates(records)]
        parts += [
            "## The arms",
            f"± is the standard deviation over seeds. {_first_batches(records)}",
            _arms(records),
        ]
        parts += [f"## Against GRPO at staleness {STALE}", *_contrasts(records)]
    if failures:
        parts += ["## Arms that failed", "\n".join(f"- {one}" for one in failures)]
    return "\n\n".join(parts) + "\n"


def _design(plan: StudyPlan) -> Iterator[str]:
    base, (passes, parts) = plan.base, UPDATES[STALE]
    yield (
        "The question of [the second study](controller_study.md) on SmolLM2-135M-Instruct, a pretrained "
        "model: sums, differences and products of one digit (reasoning-gym) behind a prompt that asks for "
        "reasoning, chosen because it makes wrong responses the longer ones, so that positive tokens hold "
        "less than BAPO's target at first: they held 0.37 in a batch before the study."
    )
    yield (
        f"{plan.steps} steps of {base.rollout.prompts_per_step} prompts with {base.rollout.group_size} "
        f"responses of at most {base.rollout.max_response_tokens} tokens; groups of equal rewards are "
        f"dropped. Learning rate {plan.options.lr or base.optimizer.lr:g} in every arm, {WARM_STEPS} steps "
        f"of warm-up. Staleness 1, and {STALE}: {passes} passes of {parts} mini-batches. Seeds 0 to "
        f"{plan.options.seeds - 1}, shared by all arms. `{BAPO}` searches in groups of about {SEARCH_TOKENS} "
        "tokens, as in the second study."
    )
    yield (
        f"**What it may say.** How `paper` differs from `{START}`, where its search begins, only if a "
        f"bound moves in at least {CONTROLLER.low:g} of its stale updates. Differences are shown with 95 % "
        "intervals (Student's t, paired by seed), uncorrected: few seeds show large differences alone, and "
        "no method is called better or worse. It says nothing of larger models or longer responses."
    )


def _gate(records: Sequence[ArmRecord]) -> Iterator[str]:
    """Whether bounds move, and how much a search has to balance: of the stale updates."""
    [found] = gate_results(records, (CONTROLLER,))
    if not found.seeds:
        yield f"No arm of `{BAPO}` is done."
        return
    moved = f"a bound moved in {found.shown} of the stale updates of `{BAPO}`."
    yield f"Yes: {moved}" if found.passed else f"**No**: {moved} {CONTROLLER.says}"
    if not all("below_target" in one.figures for one in records):
        return  # lines of an older commit
    response, update = (
        fmean(by_seed(records, BAPO, STALE, key).values()) for key in ("response_tokens", "update_tokens")
    )
    yield (
        f"A group of {SEARCH_TOKENS} tokens is about {SEARCH_TOKENS / response:.0f} of its responses, which "
        f"have {response:.0f} tokens in the mean. An update has {update:.0f} tokens, "
        f"{update / SEARCH_TOKENS:.1f} times a group. {_share(records, BAPO, 'one_sign')} of the tokens were "
        "in groups of one sign, which balance nothing."
    )
    yield (
        f"Positive tokens held less than the target of {TARGET:g} in {_share(records, BAPO, 'below_target')} "
        f"of the stale updates of `{BAPO}`, as its searches left them, in "
        f"{_share(records, START, 'below_target')} of those of `{START}`, where they begin, and in "
        f"{_share(records, BASELINE, 'below_target')} of GRPO's. "
        "Here and in the gates ± is the standard error."
    )
    first = [one.curves["positive_share"][0] for one in records if (one.method, one.passes) == (BASELINE, 1)]
    if first:
        yield (
            f"In the first step, at the weights that all begin with, they held {fmean(first):.3f} of it "
            f"on-policy ({min(first):.3f} to {max(first):.3f} over the seeds)"
            + ("." if fmean(first) < TARGET else ", where the design expected less than the target.")
        )


def _share(records: Sequence[ArmRecord], method: str, figure: str) -> str:
    """A figure of a method at the high staleness with its standard error, in words."""
    [found] = gate_results(records, (replace(CONTROLLER, method=method, figure=figure),))
    return found.shown


def _foreign_gates(records: Sequence[ArmRecord]) -> Iterator[str]:
    asked = results_of(records, [gate for gate in GATES if gate is not ENTROPY])
    found = [one for one in asked if one.seeds]
    failed = sum(not one.passed for one in found)
    yield (
        "They were not this design's gates: it asks for the last one alone. Those that these arms measure "
        f"(GRPO has not run at staleness {ENTROPY.passes}) are shown to compare the two tasks: {failed} of "
        f"the {len(found)} would fail."
    )
    yield gates_table(found)


def _first_batches(records: Sequence[ArmRecord]) -> str:
    """Whether all arms of a seed begin with the same batch: those that do have the same reward there."""
    begins = {(one.seed, one.passes, one.method): float(one.curves["reward"][0]) for one in records}
    usual = {
        seed: mode(reward for (other, *_), reward in begins.items() if other == seed) for seed, *_ in begins
    }
    odd = [
        f"`{method}` at {staleness}, seed {seed}"
        for (seed, staleness, method), reward in sorted(begins.items())
        if reward != usual[seed]
    ]
    said = "All arms of a seed begin with the same batch"
    if not odd:
        return f"{said}."
    return (
        f"{said}, except {', '.join(odd)}, whose first rewards are others: other kernels of the "
        "processor round otherwise, and sample other tokens."
    )


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


def _contrasts(records: Sequence[ArmRecord]) -> Iterator[str]:
    names = sorted({one.method for one in records if one.passes == STALE} - {BASELINE})
    rows = [(f"`{name}`", *outcomes(records, name, BASELINE, STALE)) for name in names]
    yield table([f"minus `{BASELINE}`", *OUTCOMES.values()], rows)
    [acts] = gate_results(records, (CONTROLLER,))
    if acts.passed:
        search = outcomes(records, BAPO, START, STALE)
        yield table([f"minus `{START}`", *OUTCOMES.values()], [(f"`{BAPO}`", *search)])
    reuse = outcomes(records, BASELINE, BASELINE, STALE, other_passes=1)
    yield table([f"minus `{BASELINE}` at 1", *OUTCOMES.values()], [(f"`{BASELINE}` at {STALE}", *reuse)])
