"""Sources of prompts with environments of their own, and without one, in one batch; and after a kill."""

from __future__ import annotations

import dataclasses
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bapo_megatron.config import DataConfig, EnvironmentConfig, EvaluationConfig, SourceConfig
from bapo_megatron.data.problem_sets import Suite
from bapo_megatron.data.prompts import MixedSource
from bapo_megatron.errors import ConfigError
from bapo_megatron.rollout.engines.requests import Dataset, identity
from bapo_megatron.rollout.sampler.held_out import HeldOut
from bapo_megatron.rollout.sampler.turns import check_environments, open_environments
from bapo_megatron.types import Prompt
from tests.support.chat_templates import demo_tokenizer
from tests.support.episodes import EpisodeWorld, HereSteps, check_cuts, run, step_of
from tests.support.responses import rows_of
from tests.support.sampling import EOS, Letters

CLASS = "tests.support.environments:Async"
SOURCES = ("long", "plain", "short")
OWN = {
    "long": EnvironmentConfig(CLASS),
    "plain": EnvironmentConfig(),
    "short": EnvironmentConfig("tests.support.environments:Restored", max_turns=1),
}
BANG = ord("!")


def say(prompt: int, sample: int, turn: int) -> str:
    """Prompts 0 to 2 are of `long`, 3 to 5 of `plain`, 6 to 8 of `short`; a second sample is shorter."""
    return "end" if prompt < 3 and turn == 2 - sample else f"y{turn}"


class MixedWorld(EpisodeWorld):
    """Three sources of three prompts: an environment, none, and another one of one turn."""

    def __init__(self, folder: Path, own: dict[str, EnvironmentConfig] = OWN) -> None:
        super().__init__(folder, say, prompts_per_step=6)
        named = tuple(SourceConfig(Path(f"{one}.jsonl"), environment=own[one]) for one in SOURCES)
        data = DataConfig(sources=named, shuffle=False)
        self.config = dataclasses.replace(self.config, data=data, environment=EnvironmentConfig())
        self.config.check()
        prompts = [
            Prompt(n, np.array([n], np.int32), "", "test", source=SOURCES[n // 3], reward="")
            for n in range(9)
        ]
        mixed = tuple(MixedSource(one, 3, 1.0, "0") for one in SOURCES)
        self.dataset = Dataset(prompts, Letters(), (EOS,), mixed)
        self.others = HereSteps()
        short = dataclasses.replace(self.stepping, steps=self.others, max_turns=1, stop_token_ids=(EOS, BANG))
        self.environments = {"long": self.stepping, "short": short}


def test_sources_with_and_without_an_environment_share_a_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = MixedWorld(tmp_path)
    batch = run(step_of(world), monkeypatch)
    expected = {
        "long": [("y0\x03[1:y0]y1\x03[2:y1]end\x03", "stop", 2.0), ("y0\x03[1:y0]end\x03", "stop", 1.5)],
        "plain": [("y0\x03", "stop", 1.0)] * 2,
        "short": [("y0\x03", "turns", 0.5)] * 2,
    }
    sources = [group.prompt.source for group in batch.groups]
    assert sorted(sources) == [*["long"] * 2, *["plain"] * 2, *["short"] * 2]
    for source, rows in zip(sources, rows_of(batch), strict=True):
        assert [row[:3] for row in rows] == expected[source]
    assert {turn for _, turn in world.steps.asked} == {"y0", "y1", "end"}
    assert {turn for _, turn in world.others.asked} == {"y0"}
    stops = {int(one.input_ids[0]) // 3: one.params.stop_token_ids for one in world.engines[0].asked}
    assert stops == {0: (EOS,), 1: (EOS,), 2: (EOS, BANG)}
    # By hand: 2.5 turns of `long` and 1 of `short`, as many of each; no episode of `plain`.
    metrics = batch.metrics
    assert metrics["environment/turns_mean"] == 1.75
    assert metrics["source/long/environment/turns_mean"] == 2.5
    assert metrics["source/short/environment/turns_mean"] == 1.0
    assert metrics["source/short/environment/finish_turns"] == 1.0
    assert metrics["environment/finish_turns"] == 0.5
    assert metrics["source/long/episode/turns"] == 2.5
    # [1:y0] and [2:y1] of the first response, [1:y0] of the second; sampled are 3 + 3 + 4 and 3 + 4.
    assert metrics["source/long/environment/given_share"] == pytest.approx(18 / (18 + 17))
    assert not [name for name in metrics if name.startswith(("source/plain/env", "source/plain/episode"))]
    assert metrics["source/plain/rollout/length_mean"] == 3.0
    assert not [name for name in metrics if "/time/" in name], "which would differ after a kill"


def test_the_journal_of_a_mixture_may_be_cut_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_cuts(MixedWorld, tmp_path, rows_of, monkeypatch)


def test_the_identity_is_as_before_where_all_sources_have_one_environment() -> None:
    def of(*own: EnvironmentConfig) -> dict[str, Any]:
        named = tuple(SourceConfig(Path(f"{n}.jsonl"), environment=one) for n, one in enumerate(own))
        world = EpisodeWorld(Path("unused"), say)
        return identity(dataclasses.replace(world.config, data=DataConfig(sources=named)), world.dataset)

    assert "environment.function" not in of(OWN["plain"], OWN["plain"])
    assert of(OWN["long"], OWN["long"])["environment.function"] == CLASS
    mixed = of(OWN["plain"], OWN["long"])
    assert mixed["environment.function"] == {"0": None, "1": CLASS}
    assert mixed["rollout.group_size"] == "2 episodes of an environment", "older programs refuse it in words"


async def test_a_suite_has_the_environment_of_the_source_of_its_name(tmp_path: Path) -> None:
    """Others have that of the run, which has none."""
    made = MixedWorld(tmp_path)
    made.config = dataclasses.replace(made.config, evaluation=EvaluationConfig(2, ("long",), 1))
    suites = tuple(
        Suite(name, Path(), "", (Prompt(n, np.array([n], np.int32), "", name),))
        for name, n in (("long", 1), ("plain", 2), ("short", 7), ("other", 0))
    )

    async with made.sampling(rounds=False):
        asked = HeldOut(made.config, suites, made.dataset, made.pool, made.scorer, made.environments)
        asked.expect(2, 0)
        asked.begin()
        path = await asked.responses(2, 60.0)
    assert path is not None
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["suite"], row["response"], row["finish_reason"]) for row in rows] == [
        ("long", "y0[1:y0]y1[2:y1]end", "stop"),
        ("plain", "y0", "stop"),
        ("short", "y0", "turns"),
        ("other", "y0", "stop"),
    ]


# --- real workers ---------------------------------------------------------------------------------


def config_of(**own: EnvironmentConfig | None) -> Any:
    world = EpisodeWorld(Path("unused"), say)
    named = tuple(SourceConfig(Path(f"{name}.jsonl"), environment=one) for name, one in own.items())
    model = dataclasses.replace(world.config.model, hf_path=Path("recipes/demo/policy"))
    plain = EnvironmentConfig("tests.support.environments:Plain", workers=1)
    return dataclasses.replace(world.config, data=DataConfig(sources=named), model=model, environment=plain)


async def test_equal_environments_share_their_workers() -> None:
    plain = EnvironmentConfig("tests.support.environments:Plain", workers=1)
    twice = dataclasses.replace(plain, max_turns=2)
    config = config_of(one=None, two=plain, three=EnvironmentConfig(), four=twice)
    async with AsyncExitStack() as opened:
        found = await open_environments(config, demo_tokenizer(), print, opened)
        assert list(found) == ["one", "two", "four"]
        assert found["one"] is found["two"]
        assert found["one"].steps is not found["four"].steps
        assert (found["one"].max_turns, found["four"].max_turns) == (8, 2)
        assert found["one"].tokenizing is found["four"].tokenizing, "a tokenizer is asked by one thread"


def test_a_wrong_environment_is_named_with_its_source() -> None:
    config = config_of(one=EnvironmentConfig(), two=EnvironmentConfig(CLASS))
    with pytest.raises(ConfigError, match=r"^source two: environment\.function: stops has '</call>'"):
        check_environments(config, demo_tokenizer())
