"""Panels (plots) of a report as data, ``PANELS``: the metrics of each, its colours and its caption.

``episode_panels`` and ``expert_panels`` return those of runs with environments and experts, ``bands`` a
panel's shaded ranges; ``plots.py`` draws them. Blue marks positive advantages and good values, orange
negative advantages and bad values, near-black neutral ones; token ages and other sequences run from yellow to
black. The colours are distinct for the colour-blind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from bapo_megatron.algo.bins import BUCKETS
from bapo_megatron.commands.report.data import RunRecord

NEUTRAL = "#30343b"
POSITIVE = "#0072b2"
NEGATIVE = "#d55e00"
AGES = ("#f98e09", "#e05536", "#ca404a", "#b0315b", "#7c1d6d", "#000004")
"""Colours of the staleness buckets, darker with age."""
_REWARD_BY_TURN = "environment/reward_turn_"
"""Prefix of the rewards by turn."""


@dataclass(frozen=True)
class Curve:
    """Curve of a panel: metric, colour, label and style."""

    metric: str
    colour: str = NEUTRAL
    label: str | None = None
    dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """Panel (plot) of a report: file name, title, axis label and scale, curves, caption, the paper's figure,
    and which curves a comparison of runs draws."""

    file: str
    """PNG file name without suffix."""
    title: str
    y_label: str
    curves: tuple[Curve, ...]
    caption: str
    """What the plot shows, and what to look for."""
    paper: str
    """Figure or table of the paper that shows the same."""
    y_scale: Literal["auto", "from_zero", "percent", "ratio", "spikes"] = "from_zero"
    """``from_zero``: from 0, or the minimum if negative. ``ratio``: logarithmic. ``spikes``: logarithmic if a
    few values are far above the others."""
    compared: tuple[int, ...] | None = None
    """Indices of the curves in a comparison of runs; None: all; empty: a comparison has no such panel."""
    distribution: Literal["probability", "entropy", "prediction"] | None = None
    """What ``draw_distribution`` draws: a mean by importance ratio, or Eq. 6's prediction; None: curves."""


@dataclass(frozen=True)
class Band:
    """Band of a panel: a shaded range of the vertical axis, or a line if both ends are equal."""

    low: float
    high: float
    colour: str
    label: str


def _quadrants(what: str) -> tuple[Curve, ...]:
    """Return the curves of the four kinds of tokens; kinds that raise the entropy are dashed."""
    kinds = (
        ("positive_high", POSITIVE, "rewarded, likely", False),
        ("positive_low", POSITIVE, "rewarded, unlikely", True),
        ("negative_high", NEGATIVE, "punished, likely", True),
        ("negative_low", NEGATIVE, "punished, unlikely", False),
    )
    return tuple(
        Curve(f"quadrant/{kind}/{what}", colour, label, dashed) for kind, colour, label, dashed in kinds
    )


PANELS = (
    Panel(
        "reward",
        "Reward",
        "mean reward of a response",
        (
            Curve("sampled/reward/mean", label="all that were sampled"),
            Curve("reward/mean", NEUTRAL, "trained on", dashed=True),
        ),
        "Mean reward of the sampled responses: it should climb and then level off; a sudden fall is a "
        "collapse. Of those trained on it stays in the middle where groups with equal rewards are dropped.",
        "Fig. 9; Fig. 2 shows collapses",
        compared=(0,),
    ),
    Panel(
        "entropy",
        "Policy entropy",
        "entropy (nats per token)",
        (Curve("policy/entropy"),),
        "How undecided the policy is about its next token. A gentle decline is learning; a slide to 0 means "
        "that it has stopped exploring.",
        "Fig. 9; Fig. 2 shows the slide",
    ),
    Panel(
        "clip_bounds",
        "Clipping bounds",
        "importance ratio",
        (
            Curve("bapo/clip_high", POSITIVE, "upper (positive)"),
            Curve("bapo/clip_low", NEGATIVE, "lower (negative)"),
        ),
        "Where the ratio of new to old probability is clipped. BAPO searches both bounds for each update, "
        "inside its ranges. They should move; a bound that lies at its upper end has nothing left "
        "to give.",
        "Fig. 8",
        "ratio",
    ),
    Panel(
        "contribution",
        "Positive contribution",
        "contribution to the loss",
        (Curve("bapo/contribution", POSITIVE),),
        "How much of the loss comes from responses that are better than their group. The search raises it "
        "towards the target; far below it, the negatives have the upper hand.",
        "Figs. 4 and 9",
        "auto",
    ),
    Panel(
        "grad_norm",
        "Gradient norm",
        "L2 norm before clipping",
        (Curve("policy/grad_norm"),),
        "Size of the gradient of each update. It should stay level; growing spikes come before a collapse.",
        "Fig. 9; Fig. 2 shows spikes",
        "spikes",
    ),
    Panel(
        "response_length",
        "Response length",
        "tokens per response",
        (
            Curve("rollout/length_mean", NEUTRAL, "all"),
            Curve("rollout/length_positive_mean", POSITIVE, "right"),
            Curve("rollout/length_negative_mean", NEGATIVE, "wrong"),
        ),
        "Mean length of right responses, whose reward is nearer to reward.correct, and of wrong ones, in the "
        "groups trained on. Longer wrong ones hold more tokens and so more of the loss: one cause of the "
        "imbalance that BAPO corrects.",
        "Fig. 6",
    ),
    Panel(
        "clip_fraction",
        "Clipped tokens",
        "share of tokens",
        (
            Curve("bapo/clip_fraction_high", POSITIVE, "above upper"),
            Curve("bapo/clip_fraction_low", NEGATIVE, "below lower"),
        ),
        "Tokens whose gradient the bounds take away. A growing share means that the policy has moved far "
        "from the one that sampled the data.",
        "no figure; compare Fig. 2 on staleness",
        "percent",
    ),
    Panel(
        "kl",
        "KL divergence",
        "KL (nats per token)",
        (Curve("policy/kl"),),
        "Distance of the trained policy from the one that sampled the data. It should stay small and level; "
        "a rise says that the data is too old or the learning rate too high.",
        "no figure",
    ),
    Panel(
        "held_out",
        "Held-out problems",
        "share of right answers",
        (Curve("eval/mean", POSITIVE),),
        "Mean over the suites of avg@n, at the steps that were evaluated. Where it falls behind the reward, "
        "the policy learns the training problems and not the task.",
        "Table 1",
        "percent",
    ),
    Panel(
        "positive_tokens",
        "Proportion of positive tokens",
        "share of tokens",
        (Curve("bapo/positive_token_fraction", POSITIVE),),
        "Tokens of responses that are better than their group. Below a half the negatives are in the "
        "majority before any weight or clipping.",
        "Fig. 4",
        "percent",
    ),
    Panel(
        "quadrant_clipped",
        "Clipped tokens by kind",
        "share of the kind",
        _quadrants("clipped"),
        "Which tokens lose their gradient. Rewarded unlikely tokens and punished likely ones (dashed) raise "
        "the entropy: where they are clipped more than the others, clipping lowers it.",
        "Table 4; section 3 says it of Fig. 5",
        "percent",
        compared=(1,),
    ),
    Panel(
        "quadrant_contribution",
        "Gradient by kind of token",
        "share of the gradient's mass",
        _quadrants("contribution"),
        "Who moves the policy. Rewarded likely tokens and punished unlikely ones lower the entropy, the "
        "other two kinds (dashed) raise it.",
        "Table 4",
        "percent",
        compared=(1, 2),
    ),
    Panel(
        "entropy_effect",
        "First-order effect on the entropy",
        "nats for a step of size 1",
        (
            Curve("entropy_rule/effect", NEUTRAL, "sum"),
            Curve("polarity/expanding_effect", POSITIVE, "expanding"),
            Curve("polarity/contracting_effect", NEGATIVE, "contracting"),
        ),
        "The Entropy-Clip Rule, term by term: what the tokens with a gradient do to the entropy. Below 0 the "
        "update contracts it.",
        "Eq. 6",
        "auto",
        compared=(0,),
    ),
    Panel(
        "staleness",
        "Staleness",
        "updates",
        (Curve("staleness/mean", NEUTRAL, "mean"), Curve("staleness/max", AGES[0], "oldest token")),
        "How many updates lie between the policy that sampled a token and the one that trains on it.",
        "the setting of Figs. 2 and 11",
        compared=(0,),
    ),
    Panel(
        "staleness_clipped",
        "Clipped tokens by staleness",
        "share of the bucket",
        tuple(
            Curve(f"staleness/{bucket}/clipped", colour, bucket)
            for bucket, colour in zip(BUCKETS, AGES, strict=True)
        ),
        "Tokens that the bounds clip, by age in updates. The older a token, the farther its ratio from 1.",
        "section 3 says it of Fig. 2",
        "percent",
        compared=(),
    ),
)
EXPERT_PANELS = (
    Panel(
        "expert_load",
        "Load of the experts",
        "busiest expert over the mean",
        (
            Curve("experts/imbalance_mean", NEUTRAL, "mean of the layers"),
            Curve("experts/imbalance_max", NEGATIVE, "largest of the layers"),
        ),
        "Tokens of a layer's busiest expert over the mean of its experts: 1 where all are as busy. The rank "
        "of that expert makes the others wait; a rise says that the router sends all tokens to a few.",
        "no figure",
        "auto",
        compared=(0,),
    ),
    Panel(
        "router_entropy",
        "Router entropy",
        "entropy (nats per token and layer)",
        (Curve("experts/router_entropy"),),
        "How undecided the router is about a token's experts. It should stay level; a slide to 0 means that "
        "it always takes the same ones.",
        "no figure",
    ),
)
DISTRIBUTIONS = (
    Panel(
        "ratio_probability",
        "Probability against ratio",
        "mean probability of the token",
        (),
        "Mean probability of the tokens at each importance ratio, over the whole run. In the paper it falls "
        "on both sides of 1: what the bounds clip are unlikely tokens.",
        "Figs. 5 and 10",
        distribution="probability",
    ),
    Panel(
        "ratio_entropy",
        "Entropy against ratio",
        "mean entropy (nats)",
        (),
        "Mean entropy where the tokens of each ratio were chosen. In the paper it rises on both sides of 1: "
        "where the policy is undecided, ratios move most.",
        "Fig. 10",
        distribution="entropy",
    ),
    Panel(
        "entropy_prediction",
        "Entropy-Clip Rule",
        "measured change (nats)",
        (),
        "The change of the entropy that Eq. 6 predicts, and the one that came: from each pass over a batch "
        "to the next, or from each update to the next, which has other tokens, if batches are used once. The "
        "scale of the prediction means nothing.",
        "Eq. 6",
        distribution="prediction",
    ),
)
"""Panels for ``draw_distribution``, without curves by step."""

OVERVIEW = PANELS[:8]
"""Panels of the overview image."""


def expert_panels(runs: Sequence[RunRecord]) -> tuple[Panel, ...]:
    """Return the mixture-of-experts panels if any run has their metrics."""
    metric = EXPERT_PANELS[0].curves[0].metric
    return EXPERT_PANELS if any(metric in run.steps.names for run in runs) else ()


def bands(panel: Panel, run: RunRecord) -> list[Band]:
    """Return a panel's bands: a run's ranges of searched clipping bounds, or its target; else none."""
    ranges = [*_range(run, "high", POSITIVE), *_range(run, "low", NEGATIVE)]
    target = run.config.get("algorithm.bounds.target")
    if panel.file == "clip_bounds":
        return ranges
    if panel.file == "contribution" and target is not None and ranges:  # fixed bounds have no target
        return [Band(target, target, NEUTRAL, f"target {target:g}")]
    return []


def _range(run: RunRecord, bound: str, colour: str) -> list[Band]:
    start = run.config.get(f"algorithm.bounds.{bound}_start")
    end = run.config.get(f"algorithm.bounds.{bound}_end")
    if start is None or end is None or start == end:
        return []  # a fixed bound has no range
    return [Band(start, end, colour, "allowed range")]


def episode_panels(runs: Sequence[RunRecord]) -> list[Panel]:
    """Return the episode panels with the curves that any run has; none for runs without an environment."""
    names = {name for run in runs for name in run.steps.names}
    if "environment/turns_mean" not in names:
        return []
    numbers = (name.removeprefix(_REWARD_BY_TURN) for name in names if name.startswith(_REWARD_BY_TURN))
    turns = sorted(int(turn) for turn in numbers if turn.isdecimal())[: len(AGES)]
    panels = (
        Panel(
            "turns",
            "Turns of an episode",
            "mean of a response",
            (
                Curve("environment/turns_mean", NEUTRAL, "turns of the model"),
                Curve("episode/calls", POSITIVE, "calls of tools"),
                Curve("episode/call_errors", NEGATIVE, "calls with an error"),
            ),
            "How often the model speaks in a response, and asks a tool, where the environment counts that.",
            "no figure",
            compared=(0,),
        ),
        Panel(
            "episode_ends",
            "How episodes end",
            "share of responses",
            (
                Curve("environment/finish_stop", POSITIVE, "by the environment"),
                Curve("environment/finish_turns", NEUTRAL, "most turns"),
                Curve("environment/finish_length", AGES[0], "longest response"),
                Curve("environment/finish_failed", NEGATIVE, "failure", dashed=True),
            ),
            "An episode should end because it is over. One that is cut off has no answer, and a failure of "
            "the environment is not the model's fault: see the events.",
            "no figure",
            "percent",
            compared=(0,),
        ),
        Panel(
            "reward_by_turn",
            "Reward by answer",
            "mean reward of an answer",
            tuple(
                Curve(f"{_REWARD_BY_TURN}{turn}", AGES[place], f"{turn}") for place, turn in enumerate(turns)
            ),
            "Mean reward that the environment gave with its first answer, its second, and so on, over the "
            "responses that had one.",
            "no figure",
            "auto",
            compared=(),
        ),
    )
    known = [replace(panel, curves=tuple(c for c in panel.curves if c.metric in names)) for panel in panels]
    return [panel for panel in known if panel.curves]
