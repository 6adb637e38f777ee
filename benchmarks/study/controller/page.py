"""Renderer of the second study's document: its design, which needs no run, then what the runs say.

Used in this folder.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bapo_megatron.config import RunConfig
from benchmarks.study.contrasts import MATTERS, contrast
from benchmarks.study.controller.arms import (
    CALIBRATION_SEEDS,
    RATE_SEEDS,
    RATES,
    RIVALS,
    STALE,
    START,
    TUNED,
    UPDATES,
    VARIANTS,
    WARM_STEPS,
    Variant,
    judged_cells,
    variant_of,
)
from benchmarks.study.controller.gates import CHANCE, GATES, MARGIN, Calibration, margin_of, results_of
from benchmarks.study.controller.options import ControllerOptions
from benchmarks.study.controller.verdicts import claims, rate_means, tuned_gates, verdicts
from benchmarks.study.gates import GateResult
from benchmarks.study.measures import ArmRecord
from benchmarks.study.methods import BAPO, BASELINE, SEARCH_TOKENS
from benchmarks.study.pages.document import COLUMNS
from benchmarks.study.pages.tables import OUTCOMES, mean_and_spread, outcomes, table
from benchmarks.study.paired import fisher
from benchmarks.study.runner import Failure

COMMAND = "bapo study controller --write benchmarks/results/controller_study.md"


@dataclass(frozen=True)
class Progress:
    """How far the study is: what the page is computed from. Made by ``command.py``."""

    records: list[ArmRecord]
    failures: tuple[Failure, ...]
    arms: int
    """Arms that are known so far."""
    calibration: Calibration
    chosen: dict[str, float] | None
    """The best rate of each claimed method; None until the rates' arms are done."""

    @property
    def own(self) -> list[ArmRecord]:
        """The arms of the study itself, without those that calibrate and choose."""
        return [one for one in self.records if one.seed < min(CALIBRATION_SEEDS)]


def page(options: ControllerOptions, base: RunConfig, progress: Progress) -> str:
    """The whole document."""
    own = progress.own
    results = options.results.name
    parts = [
        "# Does BAPO help where its controller acts?",
        f"Command: `{COMMAND}`",
        f"{len(progress.records)} of the {progress.arms} arms that are known are done. "
        + (f"All numbers are computed from [{results}]({results})." if progress.records else "None has run."),
        *("## The answer", *_answer(options, progress, own)),
        *("## The design", *_design(options, base)),
        *("## The calibration", *_calibration(progress)),
        *("## The rates", _rates(progress)),
    ]
    if own:
        parts += ["## The gates", gates_table(results_of(own))]
        if progress.chosen:
            parts += [
                "At the best rates of `grpo` and `paper`:",
                gates_table(tuned_gates(own, progress.chosen)),
            ]
        parts += ["## The contrasts", *_contrasts(progress, own)]
        parts += [f"## Against GRPO at staleness {STALE}", *_against_grpo(own, progress.chosen)]
        parts += ["## All arms"]
        if progress.chosen:
            parts += [f"![Each arm at staleness {STALE} minus GRPO](figures/{picture_of(options).name})"]
        parts += [_arms(own)]
    if progress.failures:
        named = "\n".join(f"- `{one.arm.name}`: {one.reason}" for one in progress.failures)
        parts += ["## Arms that failed", named]
    return "\n\n".join(parts) + "\n"


def picture_of(options: ControllerOptions) -> Path:
    """The picture, in figures/ beside the document."""
    return options.document.parent / "figures" / f"{options.document.stem}.png"


def _answer(options: ControllerOptions, progress: Progress, own: list[ArmRecord]) -> Iterator[str]:
    if options.quick:
        yield "Not judged: this is `--quick`, three arms that show that the study runs."
        return
    seeds = {one.seed for one in own}
    if progress.chosen is None or len(seeds) < options.seeds or _missing(progress, own, seeds):
        yield "Not judged: not all arms that this needs have run. The design was written before them."
        return
    gates, tuned = results_of(own), tuned_gates(own, progress.chosen)
    yield "All gates hold." if all(one.passed for one in gates) else "**Not judged.** Not all gates hold."
    yield "\n".join(f"- {line}" for line in verdicts(gates, tuned, claims(own, progress.chosen)))


def _missing(progress: Progress, own: list[ArmRecord], seeds: set[int]) -> bool:
    """Whether an arm that gates or claims need is missing."""
    have = {(one.method, one.passes, one.seed) for one in own}
    cells = judged_cells(progress.chosen or {})
    return not {(name, staleness, seed) for name, staleness in cells for seed in seeds} <= have


def _design(options: ControllerOptions, base: RunConfig) -> Iterator[str]:
    yield (
        "The first study ([study.md](../../docs/study.md)) asked where BAPO's search was idle, and its "
        "ranking may be one of step sizes. This one asks the same where the search acts, with the controls "
        "that were missing. It was written before it ran, computed from the constants of `benchmarks/study`."
    )
    yield _settings(options, base)
    yield (
        f"**Claims**, in mean reward over the run at staleness {STALE}, paired by seed, Student's t, Holm's "
        f"correction over all of them, a difference matters from {MATTERS:g} on. At the recipe's rate: "
        f"`paper` against {_names(RIVALS)}, and against `{START}`, where its search begins; and "
        "`paper_sequence` against `grpo_sequence`, which differ in the bounds alone (`paper` and "
        "`grpo_sequence` differ in the mean, too). Tuned, each at its best rate: the same pairs but for the "
        f"start; they are judged only if the gates at staleness {STALE} hold at the best rates of `grpo` and "
        "`paper`, too. Everything else is shown with intervals, and judges nothing."
    )
    yield (
        "**Gates.** If all hold, the contrasts are verdicts. If one fails, the page says what its failure "
        "says, and no contrast is called better or worse."
    )
    yield table(
        ["gate", "measured at", "must be", "the paper's", "if it fails"],
        [(one.text, f"`{one.method}`, {one.passes}", one.range, one.paper, one.says) for one in GATES],
    )
    yield (
        "**How it was set.** The demo's own task failed at the gates (seeds 100 to 104): its entropy "
        "falls to 0.27 of its start by learning alone, and 1.5 % of the tokens are clipped. Task, steps "
        "and limits of this one: by pilots with the seeds 300 to 303, which nothing else uses. The first "
        "limit was 0.8 in the first study; the pilots held 0.80, and the third gate compares at equal "
        "reward: so it is 0.7. The rate, of 1.6e-4, 1.7e-4 and 1.8e-4, and the estimate of the third gate"
        " (the coefficient of staleness in a linear fit of the entropy by reward and staleness, over all "
        "steps of two runs of a seed) were chosen on the calibration's seeds. That gate is the weakest: "
        "the difference is 0.010 of 0.26 nats, the plain one as large, and with other estimates the upper"
        " end lies between -0.006 and +0.007. The claims were revised, the lowest rate and "
        "`paper_sequence` added, after the first rates were read and before any reward of the study's own"
        " seeds was: the first version had judged tuned arms by gates that were measured at the recipe's "
        "rate."
    )
    yield (
        f"**Chance to be judged.** The gates are first measured on the seeds {_span(CALIBRATION_SEEDS)}, "
        f"which the study does not use. It begins only if each holds there by {MARGIN:g} standard errors, "
        f"and if at least {CHANCE:.0%} of bootstrap draws of {options.seeds} of these seeds hold all of them "
        "together. That takes the calibration's means for true, so it is a little too high."
    )


def _settings(options: ControllerOptions, base: RunConfig) -> str:
    """What all arms have in common, and which there are."""
    steps = options.steps or base.steps
    levels = ", ".join(f"{level} ({passes} x {parts})" for level, (passes, parts) in UPDATES.items())
    rows = [
        (
            "task",
            "sums that the policy works out, or fails at after five to eight attempts, so that positive "
            "tokens hold less than BAPO's target; problems and reward are the first study's",
        ),
        (
            "batch",
            f"{base.rollout.prompts_per_step} prompts of {base.rollout.group_size} responses; groups of "
            "equal rewards are dropped, in every arm",
        ),
        ("steps", f"{steps}, of which {WARM_STEPS} are warm-up, at every staleness"),
        ("staleness", f"updates of a batch, passes x mini-batches: {levels}. One count everywhere"),
        ("learning rate", f"{options.lr or base.optimizer.lr:g}; it is the calibration that decides it"),
        ("seeds", f"0 to {options.seeds - 1}"),
        (
            "arms",
            f"GRPO at 1 and 4; at {STALE} all {len(VARIANTS)} methods, GRPO at "
            f"{', '.join(f'{rate:g}' for rate in RATES[1:])} of the rate, and the tuned methods at "
            "their best rate. Those that gates and claims need run first, with all seeds",
        ),
        (
            "BAPO's search",
            f"in micro-batches of {SEARCH_TOKENS} tokens, about four responses here: some have one sign "
            "alone, and balance nothing. `balanced` makes one search an update",
        ),
        ("methods", ", ".join(f"`{name}`: {one.label}" for name, one in VARIANTS.items())),
        (
            "tuned",
            f"{_names(TUNED)}: also at the best of {', '.join(f'{rate:g}' for rate in RATES)} of the rate, "
            f"chosen on the seeds {_span(RATE_SEEDS)}",
        ),
    ]
    return table(["", ""], rows)


def _names(methods: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in methods)


def _span(seeds: range) -> str:
    return f"{seeds[0]} to {seeds[-1]}"


def _calibration(progress: Progress) -> Iterator[str]:
    found = progress.calibration
    if not any(one.seeds for one in found.gates):
        yield "Not run: `bapo study controller --calibrate`."
        return
    yield gates_table(list(found.gates))
    sound = "the study may begin" if found.is_sound else "the study does not begin"
    yield f"All gates hold together in {found.chance:.0%} of the draws: {sound}."


def _rates(progress: Progress) -> str:
    means = rate_means(progress.records)
    if not means:
        return "Not run."
    rows = [
        (f"`{method}`", *(f"{found[rate]:.3f}" if rate in found else "-" for rate in RATES))
        for method, found in means.items()
    ]
    shown = table(["mean reward at a share of the rate", *(f"{rate:g}" for rate in RATES)], rows)
    if progress.chosen is None:
        return f"{shown}\n\nNot chosen yet."
    edge = [method for method, rate in progress.chosen.items() if rate == min(RATES)]
    best = ", ".join(f"`{method}` {rate:g}" for method, rate in progress.chosen.items())
    below = f" Of {_names(edge)} the lowest is the best: a lower one may be better." if edge else ""
    return f"{shown}\n\nBest: {best}, of {len(RATE_SEEDS)} seeds.{below}"


def gates_table(gates: list[GateResult]) -> str:
    """Gates with their values and margins."""
    rows = [
        (
            one.gate.text,
            one.gate.range,
            one.shown,
            _margin(one),
            str(one.seeds),
            "holds" if one.passed else "**fails**",
        )
        for one in gates
    ]
    return table(["gate", "must be", "is", "margin, standard errors", "seeds", ""], rows)


def _margin(one: GateResult) -> str:
    margin = margin_of(one)
    return "-" if math.isnan(margin) else "no spread" if math.isinf(margin) else f"{margin:.1f}"


def _contrasts(progress: Progress, own: list[ArmRecord]) -> Iterator[str]:
    """Differences and p-values; the verdict, in words, stands in the answer alone."""
    yield (
        "Differences with 95 % intervals. The claims are those in mean reward, by Holm's p; p alone, "
        "held-out problems and the share of entropy kept judge nothing."
    )
    found = claims(own, progress.chosen or dict.fromkeys(TUNED, 1.0))
    rows = []
    for one in [*found.at_recipe_rate, *found.tuned]:
        alone = contrast(own, one.method, one.other, STALE)
        ps = ("-" if p is None else f"{p:.3g}" for p in (one.p, alone.p))
        reward, *others = outcomes(own, one.method, one.other, STALE)
        rows.append((f"`{one.method}` - `{one.other}`", reward, *ps, *others))
    reward, *others = OUTCOMES.values()
    yield table([f"at staleness {STALE}", reward, "Holm's p", "p alone", *others], rows)


def _against_grpo(own: list[ArmRecord], chosen: dict[str, float] | None) -> Iterator[str]:
    """Every other arm minus GRPO at the recipe's rate, and the tuned ones minus GRPO at its best."""
    yield "Not judged, and not corrected for their number: about one in twenty excludes 0 by luck alone."
    cells = dict.fromkeys((one.passes, one.method) for one in sorted(own, key=lambda one: one.passes))
    rows = [
        (
            f"`{name}`" + (f" at {staleness}" if staleness != STALE else ""),
            *outcomes(own, name, BASELINE, staleness, other_passes=STALE),
        )
        for staleness, name in cells
        if (staleness, name) != (STALE, BASELINE)
    ]
    yield table([f"minus `{BASELINE}`", *OUTCOMES.values()], rows)
    yield _collapses(own)
    if chosen:
        best = {method: Variant(method, rate).name for method, rate in chosen.items()}
        grpo = best.pop(BASELINE)
        tuned = [(f"`{name}`", *outcomes(own, name, grpo, STALE)) for name in best.values()]
        yield table([f"minus `{grpo}`", *OUTCOMES.values()], tuned)


def _collapses(own: list[ArmRecord]) -> str:
    """How many runs of BAPO and of GRPO collapsed at the recipe's rate, those of both means together."""
    bapo, grpo = (
        [
            one.figures["collapsed"]
            for one in own
            if one.passes == STALE and one.method in (name, f"{name}_sequence")
        ]
        for name in (BAPO, BASELINE)
    )
    if len(bapo) != len(grpo):
        return "Collapses are not compared: arms are missing."
    p = fisher(int(sum(bapo)), int(sum(grpo)), len(bapo))
    return (
        f"With both means together {sum(bapo):.0f} of BAPO's {len(bapo)} runs collapsed and {sum(grpo):.0f} "
        f"of GRPO's: Fisher's p {p:.2g}."
    )


def _arms(own: list[ArmRecord]) -> str:
    cells = dict.fromkeys((one.passes, one.method) for one in sorted(own, key=lambda one: one.passes))
    rows = []
    for staleness, name in cells:
        cell = [one for one in own if (one.method, one.passes) == (name, staleness)]
        collapses = f"{sum(one.figures['collapsed'] for one in cell):.0f} of {len(cell)}"
        figures = [
            mean_and_spread([one.figures[key] for one in cell], digits)
            for key, (_, digits) in COLUMNS.items()
        ]
        rows.append(
            (str(staleness), f"`{name}` ({VARIANTS[variant_of(name).method].label})", collapses, *figures)
        )
    return table(["staleness", "arm", "collapses", *(head for head, _ in COLUMNS.values())], rows)
