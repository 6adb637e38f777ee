"""Renderer of the P3O study's page: answer, design, gates, contrasts, all arms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

from studies.gpu_study.page import table
from studies.p3o_study.arms import LOW, METHODS, P3O, REAL, SEEDS, STALENESS, Line, published
from studies.paired import Effect, holm, p_value, paired_effect

PAIRS = (
    ("paper", "p3o"),
    ("paper_sequence", "p3o_sequence"),
    ("p3o", "grpo"),
    ("p3o", "grpo_sequence"),
    ("p3o_sequence", "grpo_sequence"),
)
"""The claims: at the rate of the second study, whose gates hold there."""
REAL_PAIRS = (
    ("paper", "p3o"),
    ("p3o", "grpo"),
    ("p3o", "grpo_sequence"),
)
"""What is measured on the real model: its study has no `paper_sequence`."""
FIGURES = ("mean_reward", "held_out", "entropy_kept")
LEVEL, MATTERS = 0.05, 0.05
GATES = (
    ("entropy kept on-policy", "grpo", 1, "entropy_kept", 0.7, math.inf),
    ("on-policy seeds that collapse", "grpo", 1, "collapsed", -math.inf, 0.0),
    ("clipped tokens", "grpo", 8, "clipped", 0.02, 0.06),
    ("positive share of the gradient", "grpo", 8, "positive_share", 0.2, 0.4),
    ("tokens with a ratio above 1.2", "grpo", 8, "raised_tokens", 0.01, math.inf),
    ("mean probability of those tokens when sampled", "grpo", 8, "raised_probability", -math.inf, 0.4),
    ("BAPO acts: updates whose bounds moved", "paper", 8, "moved", 0.5, math.inf),
    ("P3O acts: effective sample size of the stale updates", "p3o", 8, "ess", -math.inf, 0.99),
)
"""Gates: text, method, staleness, figure, range of its mean. All but the last are the second study's."""
_DESIGN = f"""\
**Question.** BAPO searches two bounds so that positive tokens hold a share of the gradient. P3O (arXiv
2605.12380) searches nothing: one statistic of the batch, the normalised effective sample size of its ratios,
caps the weight of a token and sets the pull towards the policy that sampled. Does either gain over the other,
or over GRPO?

**Task, steps, rates, seeds** are those of [the second study](controller_study.md): 20 steps, {STALENESS}
updates of each batch (2 passes of 4 mini-batches), learning rate 0.00017, seeds 0 to 11. `paper` is BAPO;
`_sequence` has the mean by response, the others the mean by token, which is P3O's paper's.

**Claims**: the five pairs of the first table, in mean reward over the run, paired by seed, Student's t,
Holm's correction over all five; a difference matters from {MATTERS:g} on. They are judged only with all
twelve seeds, and if all gates hold. At 0.35 of the rate two gates of the second study fail (its page), so
nothing is judged there: P3O's runs are measured against the second study's. Nor is anything on
[the real model](real_model_study.md), where four seeds show large differences alone: P3O runs as that
study's arms did (ten steps, learning rate 1.5e-05), against them; a pair has its seed and the order of the
problems in common, but not its first batch: the code between them changed what is sampled.

**Gates** are those of the second study (the entropy at equal reward is on its page, the on-policy ones are of
its runs), and one for P3O: with an effective sample size of its stale updates above 0.99 it is REINFORCE
with ratios up to 1.

**What was changed.** All this was written before the first run of P3O, but for one thing: `paper` and `grpo`
were to be the second study's runs, if two of them repeated to the last digit. They did not: from the fourth
step on, rounding differs, and with it what is sampled. So they run again, with the code of P3O's runs; that
was decided before any reward of P3O was read. The last table has both."""


def page(lines: Sequence[Line], arms: int) -> str:
    """Page of the finished arms."""
    old, then = published(), {}
    for line in old:
        then[line["method"], line["passes"], line["seed"]] = line["figures"]
    now = {(line["method"], STALENESS, line["seed"]): line["figures"] for line in lines}
    # The second study's runs, except those that run again.
    every = {cell: run for cell, run in then.items() if cell[0] not in METHODS or cell[1] != STALENESS} | now
    claims = _contrasts(every, PAIRS)
    low = _contrasts(every, tuple((one + LOW, other + LOW) for one, other in PAIRS))
    real = _contrasts(every, tuple((one + REAL, other + REAL) for one, other in REAL_PAIRS))
    gates = [_gate(every, *gate) for gate in GATES]
    parts = [
        "# BAPO, P3O and GRPO on stale data",
        f"{len(lines)} of {arms} arms are done. By `python -m studies.p3o_study`, from\n"
        "[p3o_study.jsonl](p3o_study.jsonl) and, at 0.35 of the rate and on-policy, the second study's\n"
        "[controller_study.jsonl](controller_study.jsonl).",
        "## The answer",
        "\n".join(f"- {line}" for line in _answer(claims, gates)),
        *("## The design", _DESIGN),
        "## The gates",
        table(["gate", "must be", "is", "seeds", ""], [gate.row for gate in gates]),
        "## The contrasts",
        "Differences with 95 % intervals. Only those in mean reward are claims.",
        _table(claims, f"at staleness {STALENESS}"),
        "At 0.35 of the rate, not judged:",
        _table(low, "at 0.35 of the rate"),
        "On the real model, not judged:",
        _table(real, "on the real model"),
        "## All arms",
        _means(every),
        "## The second study's methods, now minus then",
        _then_and_now(now, then),
    ]
    return "\n\n".join(parts) + "\n"


class _Gate:
    """A gate with its values over the seeds."""

    def __init__(self, text: str, low: float, high: float, values: list[float]) -> None:
        self.text, self.low, self.high, self.values = text, low, high, values

    @property
    def holds(self) -> bool:
        """Whether all seeds have run and their mean is in the range."""
        return len(self.values) == len(SEEDS) and self.low <= fmean(self.values) <= self.high

    @property
    def row(self) -> list[str]:
        """Row of the gate table."""
        low, high = self.low, self.high
        limits = f"at least {low:g}" if high == math.inf else f"at most {high:g}"
        limits = f"{low:g} to {high:g}" if math.isfinite(low) and math.isfinite(high) else limits
        count = len(self.values)
        known = _with_error(self.values) if count > 1 else "not measured"
        verdict = "holds" if self.holds else ("**fails**" if count == len(SEEDS) else "open")
        return [self.text, limits, known, str(count), verdict]


Every = dict[tuple[str, int, int], dict[str, float | None]]
"""Figures by method, staleness and seed."""


def _gate(
    every: Every, text: str, method: str, staleness: int, figure: str, low: float, high: float
) -> _Gate:
    values = [every.get((method, staleness, seed), {}).get(figure) for seed in SEEDS]
    return _Gate(text, low, high, [value for value in values if value is not None])


def _with_error(values: Sequence[float]) -> str:
    return f"{fmean(values):.3g} ± {stdev(values) / math.sqrt(len(values)):.2g}"


_Contrast = tuple[str, str, dict[str, Effect | None], float | None, float | None]
"""Two methods, effects by figure, p of the mean reward: unadjusted, and by Holm."""


def _contrasts(every: Every, pairs: Sequence[tuple[str, str]]) -> list[_Contrast]:
    contrasts = []
    for method, base in pairs:
        each = {figure: _paired(every, method, base, figure) for figure in FIGURES}
        effects = {figure: paired_effect(values) for figure, values in each.items()}
        contrasts.append((method, base, effects, p_value(each["mean_reward"])))
    adjusted = iter(holm([alone for *_, alone in contrasts if alone is not None]))
    return [(*rest, alone, None if alone is None else next(adjusted)) for *rest, alone in contrasts]  # type: ignore[misc]


def _paired(every: Every, method: str, base: str, figure: str) -> list[float]:
    pairs = [[every.get((arm, STALENESS, seed), {}).get(figure) for arm in (method, base)] for seed in SEEDS]
    return [mine - theirs for mine, theirs in pairs if mine is not None and theirs is not None]


def _table(contrasts: Sequence[_Contrast], head: str) -> str:
    rows = [
        [
            f"`{method}` - `{base}`",
            _words(effects["mean_reward"]),
            *("-" if p is None else f"{p:.3g}" for p in (by_holm, alone)),
            *(_words(effects[figure]) for figure in FIGURES[1:]),
        ]
        for method, base, effects, alone, by_holm in contrasts
    ]
    return table([head, "mean reward", "Holm's p", "p alone", "held-out", "entropy kept"], rows)


def _words(effect: Effect | None) -> str:
    if effect is None or effect.pairs == 1:
        return "too few seeds"
    return f"{effect.mean:+.3f} ({effect.low:+.3f} to {effect.high:+.3f}), {effect.pairs} seeds"


def _means(every: Every) -> str:
    """Table of means over seeds, a row per method of the study."""
    columns = ("mean_reward", "held_out", "entropy_kept", "clipped", "positive_share", "raised_tokens", "ess")
    names = dict.fromkeys(name + suffix for suffix in ("", LOW) for pair in PAIRS for name in pair)
    names |= dict.fromkeys(name + REAL for pair in REAL_PAIRS for name in pair)
    rows = []
    for name in names:
        row = [f"`{name}`"]
        for figure in columns:
            values = _gate(every, "", name, STALENESS, figure, 0, 0).values
            row.append(_with_error(values) if len(values) > 1 else "-")
        runs = sum((name, STALENESS, seed) in every for seed in SEEDS)
        rows.append([*row, str(runs)])
    heads = [
        "mean reward",
        "held-out",
        "entropy kept",
        "clipped",
        "positive share",
        "r > 1.2",
        "ESS",
        "seeds",
    ]
    return table(["method", *heads], rows)


def _then_and_now(now: Every, then: Every) -> str:
    """Table of the second study's methods: figures here minus figures there."""
    rows = []
    for name in (name for name in METHODS if name not in P3O):
        both = {f"{name}": now, f"{name} then": then}
        renamed = {
            (label, *cell[1:]): figures
            for label, runs in both.items()
            for cell, figures in runs.items()
            if cell[:2] == (name, STALENESS)
        }
        effects = [paired_effect(_paired(renamed, *both, figure)) for figure in FIGURES]
        rows.append([f"`{name}`", *(_words(effect) for effect in effects)])
    return table(["method", "mean reward now - then", "held-out now - then", "entropy now - then"], rows)


def _answer(claims: Sequence[_Contrast], gates: Sequence[_Gate]) -> list[str]:
    """Verdicts, or why there are none."""
    lacks = [
        f"{gate.text}: {gate.row[-1].strip('*')}, {gate.row[2]}, must be {gate.row[1]}"
        for gate in gates
        if len(gate.values) == len(SEEDS) and not gate.holds
    ]
    seeds = min(effects["mean_reward"].pairs if effects["mean_reward"] else 0 for _, _, effects, *_ in claims)
    if seeds < len(SEEDS):
        lacks.append(f"{seeds} of {len(SEEDS)} seeds have run")
    if lacks:
        return [f"**Not judged**: {'; '.join(lacks)}. What is below is measured."]
    return [
        f"`{method}` against `{base}`: {_verdict(effects['mean_reward'], p)}"
        for method, base, effects, _, p in claims
    ]


def _verdict(effect: Effect | None, p: float | None) -> str:
    assert effect is not None  # all seeds have run
    assert p is not None
    if p < LEVEL:
        size = "" if abs(effect.mean) >= MATTERS else f", by less than the {MATTERS:g} that matters"
        return f"{'better' if effect.mean > 0 else 'worse'}{size}"
    ruled = "" if effect.high < MATTERS else "not "
    return f"no difference shown; an advantage of {MATTERS:g} or more is {ruled}ruled out"
