"""Lengths of responses, the decode schedule, and responses that stay open: by hand, by simulation."""

from __future__ import annotations

import json
from dataclasses import replace
from math import exp, log
from pathlib import Path
from random import Random
from statistics import NormalDist, fmean
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_megatron.commands.plan import plan_command
from bapo_megatron.config import EnvironmentConfig, EvaluationConfig, SglangConfig, SourceConfig
from bapo_megatron.planning.engines import OpenResponses, open_responses
from bapo_megatron.planning.job import Job, PlanOptions
from bapo_megatron.planning.lengths import (
    ResponseLengths,
    decode_steps,
    read_tokens,
)
from bapo_megatron.planning.page import plan_text
from bapo_megatron.planning.plan import JobPlan, make_plan
from tests.support.altered import altered
from tests.support.planned_jobs import job


@pytest.mark.parametrize(
    ("mean", "spread", "longest"), [(4585, 1.5, 8192), (2048, 1.0, 8192), (3206, 0.5, 4096)]
)
def test_the_distribution_against_random_draws(mean: float, spread: float, longest: float) -> None:
    """400,000 draws of a log-normal distribution, cut: its mean, what is cut, E[n^2] / E[n] / 2."""
    lengths = ResponseLengths(mean, spread, longest)
    share = (1 - lengths.cut_share) / 2
    middle = log(lengths.quantile(share)) - spread * NormalDist().inv_cdf(share)
    draw = Random(0)
    drawn = [min(longest, exp(draw.gauss(middle, spread))) for _ in range(400_000)]
    assert fmean(drawn) == pytest.approx(mean, rel=0.01)
    assert fmean(n == longest for n in drawn) == pytest.approx(lengths.cut_share, abs=0.005)
    running = fmean(n * n for n in drawn) / fmean(drawn) / 2
    assert lengths.running_mean == pytest.approx(running, rel=0.01)
    assert sorted(drawn)[100_000] == pytest.approx(lengths.quantile(0.25), rel=0.02)


def test_lengths_of_an_engine_keep_the_mean_and_have_the_longest() -> None:
    found = ResponseLengths(2048, 1.5, 8192).busiest_engine_lengths(128, 1024)
    assert max(found) == 8192
    few = ResponseLengths(2048, 0.5, 65536)
    assert max(few.busiest_engine_lengths(2, 1024)) == few.quantile(1 - 0.5 / 1024)
    for part in (found, found[:64], found[64:]):
        assert fmean(part) == pytest.approx(2048, rel=0.1 if len(part) == 64 else 0.01)


def token_by_token(lengths: list[int], slots: int, prompt: int, step: float, token: float) -> float:
    """A loop over decode steps: each reads the weights, and the tokens of all that run."""
    waiting, running, seconds = list(lengths), [], 0.0
    while waiting or running:
        while waiting and len(running) < slots:
            running.append([0, waiting.pop(0)])
        seconds += step + token * sum(prompt + done + 0.5 for done, _ in running)
        running = [[done + 1, length] for done, length in running if done + 1 < length]
    return seconds


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=20),
    st.integers(1, 24),
    st.integers(0, 9),
    st.floats(0.1, 9),
    st.floats(0.01, 1),
)
def test_the_closed_form_is_a_simulation(
    lengths: list[int], slots: int, prompt: int, step: float, token: float
) -> None:
    expected = token_by_token(lengths, slots, prompt, step, token)
    found = step * decode_steps(lengths, slots) + token * read_tokens(lengths, prompt)
    assert found == pytest.approx(expected)


TOOL = EnvironmentConfig("tool.py:Tool", max_turns=4)


def opened(plan: JobPlan) -> OpenResponses:
    found = open_responses(plan.job, plan.engines)
    assert found is not None
    return found


def planned(environment: EnvironmentConfig = TOOL, sources: Any = (), **changes: Any) -> JobPlan:
    """The small job: 2 prompts, groups of 4, responses of 14 tokens, one engine."""
    options = {name: changes.pop(name) for name in [*changes] if name.startswith("environment_")}
    small = job()
    run = replace(small.run, environment=environment, rollout=replace(small.run.rollout, **changes))
    if sources:
        run = replace(run, data=replace(run.data, path=None, sources=sources))
    return make_plan(Job(run, small.shape, PlanOptions(mean_response_tokens=14, **options)))


def of(step_seconds: float | None, admitted: int, share: float = 1.0, overlap: bool = True) -> OpenResponses:
    """64 engines of 64 places, turns of 10 s, steps of 512 groups of 8."""
    return OpenResponses(4096.0, 10.0, share, step_seconds, admitted, 4096, overlap, overlap)


def test_the_inequality_by_hand() -> None:
    """1.25 x 4,096 x (1 + 30 / 10) = 20,480 are needed, 1 x 512 x 8 admitted: a fifth; staleness 5."""
    short = of(30.0, 4096)
    assert (short.needed, short.filled, short.needed_staleness) == (20480.0, 0.2, 5)
    assert short.longest_step_seconds == 0.0
    enough = of(30.0, 5 * 4096)
    assert (enough.filled, enough.needed_staleness, enough.longest_step_seconds) == (1.0, 5, 30.0)
    half = of(30.0, 4096, share=0.5)
    assert (half.needed, half.filled, half.needed_staleness) == (12800.0, 0.32, 4)
    assert of(None, 3 * 4096, share=0.5).longest_step_seconds == pytest.approx(28.0)
    assert of(None, 4096).needed is of(None, 4096).filled is of(None, 4096).needed_staleness is None
    waits = of(10.0, 4096, overlap=False)
    assert (waits.needed, waits.needed_staleness) == (10240.0, 2), "(2 + 1) x 4,096 while the trainer waits"
    assert (of(0.0, 4096).needed_staleness, of(0.0, 4096, overlap=False).needed_staleness) == (2, 1)
    assert of(0.0, 5120).filled == 1.0


@pytest.mark.parametrize(
    ("rollout", "admitted", "is_ahead"),
    [
        ({"max_staleness": 0}, 8, False),
        ({"max_staleness": 1}, 8, True),
        ({"max_staleness": 3}, 24, True),
        ({"max_staleness": 3, "overlap": False}, 32, False),
        # colocated engines have no GPU while the policy trains
        ({"max_staleness": 1, "engine": "sglang", "sglang": SglangConfig(colocated=True)}, 16, False),
    ],
)
def test_what_admission_allows(rollout: dict[str, Any], admitted: int, is_ahead: bool) -> None:
    found = opened(planned(**rollout))
    assert (found.admitted, found.is_ahead, found.round_responses) == (admitted, is_ahead, 8)


def test_turns_of_evaluations_do_not_count() -> None:
    """The run's own environment answers suites alone, as all sources have another."""
    suites = EnvironmentConfig("tool.py:Suite", max_turns=20)
    plan = planned(suites, sources=(SourceConfig(Path("a.jsonl"), 1.0, environment=TOOL),), max_staleness=1)
    found = opened(make_plan(altered(plan.job, {"run.evaluation": EvaluationConfig(1, ("a.jsonl",))})))
    assert found.turn_seconds == pytest.approx(14 / 4 * 8 / plan.engines.tokens_per_second)


def test_a_turn_is_its_share_of_a_response() -> None:
    """All 8 responses are decoded at a time: in the seconds of a decode step each gets a token."""
    plan = planned(environment_turns=2.0, max_staleness=1)
    found = opened(plan)
    assert found.places == 8.0
    assert found.turn_seconds == pytest.approx(7 * 8 / plan.engines.tokens_per_second)
    most = opened(planned(max_staleness=1))
    assert most.turn_seconds == pytest.approx(found.turn_seconds / 2), "of max_turns, 4"


def test_sources_count_by_their_weights() -> None:
    none = EnvironmentConfig()
    two = SourceConfig(Path("a.jsonl"), 3.0), SourceConfig(Path("b.jsonl"), 1.0, environment=none)
    found = opened(planned(sources=two))
    assert found.share == 0.75
    for plan in (planned(none, sources=two), planned(none)):
        assert open_responses(plan.job, plan.engines) is None


def test_the_page_warns_where_it_does_not_hold() -> None:
    """The values that would hold are in it: with them it warns no more."""
    needed = opened(planned(environment_seconds=1.0, max_staleness=0)).needed_staleness
    assert needed
    for staleness in (0, needed - 1, needed):
        text = plan_text(planned(environment_seconds=1.0, max_staleness=staleness), [], [])
        assert (f"rollout.max_staleness={needed} would fill them" in text) == (staleness < needed)


def test_the_command_takes_the_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["recipes/demo_tools_cpu.py", "--environment-seconds", "2", "--environment-turns", "2", "--json"]
    plan_command(words)
    found = json.loads(capsys.readouterr().out)["environment"]
    assert found["step_seconds"] == 2.0
    assert found["needed"] == pytest.approx(1.25 * found["places"] * (1 + 2.0 / found["turn_seconds"]))
