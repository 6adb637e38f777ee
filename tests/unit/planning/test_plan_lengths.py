"""Lengths of responses, the decode schedule, and responses that stay open: by hand, by simulation."""

from __future__ import annotations

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
from bapo_megatron.config import EnvironmentConfig, SglangConfig, SourceConfig
from bapo_megatron.planning.engines import engine_plan, environment_lines
from bapo_megatron.planning.job import Job, PlanOptions
from bapo_megatron.planning.lengths import (
    ResponseLengths,
    decode_steps,
    read_tokens,
)
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


TOOL, NONE = EnvironmentConfig("tool.py:Tool", max_turns=4), EnvironmentConfig()
HALF = SourceConfig(Path("a.jsonl"), 3.0), SourceConfig(Path("b.jsonl"), 3.0, environment=NONE)
COLOCATED = {"engine": "sglang", "sglang": SglangConfig(colocated=True)}


def told(environment: EnvironmentConfig = TOOL, sources: Any = (), **changes: Any) -> list[str]:
    """What the plan says of 512 groups of 8, responses of 14 tokens, and 64 engines of 64 places on which a
    turn of 3.5 tokens takes 10 s."""
    options = {name: changes.pop(name) for name in [*changes] if name.startswith("environment_")}
    small = job()
    rollout = replace(small.run.rollout, **{"prompts_per_step": 512, "group_size": 8, **changes})
    run = replace(small.run, environment=environment, rollout=rollout)
    if sources:
        run = replace(run, data=replace(run.data, path=None, sources=sources))
    large = Job(run, small.shape, PlanOptions(mean_response_tokens=14, **options))
    engines = replace(engine_plan(large), count=64, running=64.0, tokens_per_second=4096 * 3.5 / 10)
    return list(environment_lines(large, engines))


@pytest.mark.parametrize(
    ("changes", "seconds", "needed", "admitted", "longest"),
    [
        # 1.25 x 4,096 x (1 + 30 / 10) are needed, 1 x 512 x 8 admitted
        ({"max_staleness": 1}, 30.0, "20,480", "4,096", "0"),
        ({"max_staleness": 5}, 30.0, "20,480", "20,480", "30"),
        ({"max_staleness": 5}, 30.1, "20,531", "20,480", "30"),
        # (2 + 1) x 4,096 while the trainer waits
        ({"max_staleness": 2, "overlap": False}, 10.0, "10,240", "12,288", "14"),
        ({"max_staleness": 0}, 0.0, "5,120", "4,096", "0"),
        # colocated engines have no GPU while the policy trains
        ({"max_staleness": 1, **COLOCATED}, 1.0, "5,632", "8,192", "6"),
        # of the prompts half have an environment
        ({"max_staleness": 3, "sources": HALF}, 30.0, "12,800", "12,288", "28"),
        # half as many turns are twice as long
        ({"max_staleness": 5, "environment_turns": 2.0}, 60.0, "20,480", "20,480", "60"),
    ],
)
def test_the_inequality_by_hand(
    changes: dict[str, Any], seconds: float, needed: str, admitted: str, longest: str
) -> None:
    first, second, *warning = told(environment_seconds=seconds, **changes)
    turns = 20 if "environment_turns" in changes else 10
    ahead = changes["max_staleness"] and changes.get("overlap", True) and "sglang" not in changes
    assert first == (
        f"Environment: turns of {turns} s on 4,096 places of engines; {admitted} responses may be open"
        + (" while the policy trains" if ahead else "")
    )
    assert second == (
        f"  steps of {seconds:.3g} s need {needed}; the places stay filled if a step takes {longest} s or "
        "less in the mean"
    )
    holds = int(needed.replace(",", "")) <= int(admitted.replace(",", ""))
    assert warning == (
        [] if holds else ["  WARNING: engines sample less than that estimate; raise rollout.max_staleness"]
    )
    asked = told(**changes)[1]
    assert asked.endswith(f"takes {longest} s or less in the mean; give yours by --environment-seconds")


def test_turns_of_evaluations_do_not_count() -> None:
    """The run's own environment answers suites alone, as all sources have another."""
    suites = EnvironmentConfig("tool.py:Suite", max_turns=20)
    sources = (SourceConfig(Path("a.jsonl"), 1.0, environment=TOOL),)
    assert told(suites, sources=sources)[0].startswith("Environment: turns of 10 s on")


def test_a_run_without_an_environment_has_no_such_section() -> None:
    sources = tuple(replace(source, environment=NONE) for source in HALF)
    assert told(NONE, sources=sources) == told(NONE) == told(replay=Path("run")) == []


def test_the_command_takes_the_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    plan_command(["recipes/demo_tools_cpu.py", "--environment-seconds", "2", "--environment-turns", "2"])
    assert "\n  steps of 2 s need " in capsys.readouterr().out
