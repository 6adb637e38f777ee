"""Open responses of a run with environments: whether enough may be open to keep the engines full.

A response whose environment works holds no place at an engine. P places stay filled if

    1.25 P (1 + w t / s) <= A   t seconds of a step, s seconds of sampling of a turn,
                                w share of the prompts that have an environment

responses may be open. P (1 + w t / s) is Little's law; a quarter more, because complete responses wait for
their groups: measured, 97 to 98 % of the places are filled then, 82 to 94 % without
(benchmarks/results/sampler_scale.md). The sampler's admission (``rollout/sampler/admission.py``) allows

    A = S B G                   while the policy trains: max_staleness S of 1 or more, with overlap
    A = (S + 1) B G             without overlap, or with S = 0: then engines sample only while it waits

B prompts_per_step, G group_size. Used by ``json_summary.py`` and ``page.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from bapo_megatron.config import RunConfig
from bapo_megatron.planning.plan import JobPlan

SPARE = 1.25
"""Open responses over those that Little's law asks for: some of them wait for the rest of their group."""


@dataclass(frozen=True)
class OpenResponses:
    """Needed and admitted open responses of a run with environments: plain data, made by
    ``open_responses``."""

    places: float
    """P: responses that all engines decode at a time in the plan's estimate."""
    turn_seconds: float
    """s: a turn's share of the mean response, at full decode batches."""
    share: float
    """w: share of the prompts whose source has an environment, by the weights of the sources."""
    step_seconds: float | None
    """t: ``--environment-seconds``; None if it is not given."""
    admitted: int
    """A: responses that may be open."""
    round_responses: int
    """B G: responses of a step."""
    is_ahead: bool
    """Whether ``admitted`` is S B G: engines sample while the policy trains."""
    overlap: bool
    """``rollout.overlap``: whether a ``max_staleness`` of 1 or more would let them."""

    @property
    def needed(self) -> float | None:
        """1.25 P (1 + w t / s): open responses that fill the places; None without ``step_seconds``."""
        if self.step_seconds is None:
            return None
        return SPARE * self.places * (1 + self.share * self.step_seconds / self.turn_seconds)

    @property
    def filled(self) -> float | None:
        """Share of the places that are filled at least; 1 where the inequality holds."""
        return None if self.needed is None else min(1.0, self.admitted / self.needed)

    @property
    def longest_step_seconds(self) -> float:
        """The mean seconds of a step up to which the inequality holds; 0 if not even without steps."""
        return max(0.0, self.turn_seconds / self.share * (self.admitted / (SPARE * self.places) - 1))

    @property
    def needed_staleness(self) -> int | None:
        """The smallest ``rollout.max_staleness`` with which it holds; 0 and 1 admit as many with overlap."""
        if self.needed is None:
            return None
        steps = math.ceil(self.needed / self.round_responses - 1e-9)
        return steps if self.overlap and steps > 1 else steps - 1

    def values(self) -> dict[str, float | int | None]:
        """All of it for ``--json``."""
        return {
            **vars(self),
            "needed": self.needed,
            "filled": self.filled,
            "longest_step_seconds": self.longest_step_seconds,
            "needed_staleness": self.needed_staleness,
        }


def open_responses(plan: JobPlan) -> OpenResponses | None:
    """The open responses of a plan; None for a run without an environment, or whose engines cannot sample.

    s = mean_response / turns x P / (tokens per second of all engines). The mean response includes the tokens
    that were given, as ``--mean-response-tokens`` does.
    """
    run, engines, options = plan.job.run, plan.engines, plan.job.options
    share, places = _share(run), engines.count * engines.running
    if not share or not places or not engines.tokens_per_second:
        return None
    names = run.data.source_names or ("",)
    most = max(run.environments[name].max_turns for name in names if run.environments[name].function)
    turns = options.environment_turns or most
    rollout = run.rollout
    in_round = rollout.prompts_per_step * rollout.group_size
    is_ahead = plan.job.overlaps
    return OpenResponses(
        places=places,
        turn_seconds=plan.job.mean_response / turns * places / engines.tokens_per_second,
        share=share,
        step_seconds=options.environment_seconds,
        admitted=in_round * (rollout.max_staleness + (not is_ahead)),
        round_responses=in_round,
        is_ahead=is_ahead,
        overlap=rollout.overlap and not plan.job.colocated,
    )


def open_response_lines(plan: JobPlan) -> Iterator[str]:
    """Section of a plan's page; none for a run without an environment."""
    found = open_responses(plan)
    if found is None:
        return
    when = " while the policy trains" if found.is_ahead else ""
    yield (
        f"Environment: turns of {found.turn_seconds:,.3g} s on {found.places:,.0f} places of engines; "
        f"{found.admitted:,} responses may be open{when}"
    )
    longest = f"{found.longest_step_seconds:,.3g} s"
    if found.needed is None or found.filled is None:
        yield (
            f"  the places stay filled if a step takes {longest} or less in the mean; give yours by "
            "--environment-seconds"
        )
        return
    needs = f"steps of {found.step_seconds:,.3g} s need {found.needed:,.0f}"
    if found.filled == 1:
        yield f"  {needs}: the places are filled, up to steps of {longest}"
        return
    yield f"  WARNING: {needs}: {found.filled:.0%} of the places are filled, so engines sample less than that"
    shorter = f", as would steps of {longest}" if found.longest_step_seconds else ""
    yield f"  estimate. rollout.max_staleness={found.needed_staleness} would fill them{shorter}"


def _share(run: RunConfig) -> float:
    """The share of the training prompts that have an environment, by the weights of their sources."""
    if not run.data.sources:
        return float(run.environment.function is not None)
    weights = {source.name: source.weight for source in run.data.sources}
    within = [weight for name, weight in weights.items() if run.environments[name].function is not None]
    return sum(within) / sum(weights.values())
