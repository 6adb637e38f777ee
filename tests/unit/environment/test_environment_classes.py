"""The class of an environment before a run: what it can do, and what is wrong with it or its settings."""

from __future__ import annotations

import sys
import venv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.config.sources import EnvironmentConfig
from bapo_megatron.environment import Environment
from bapo_megatron.environment import pool as pools
from bapo_megatron.environment import settings as own_settings
from bapo_megatron.environment.adapters.endpoint import EndpointEnvironment
from bapo_megatron.environment.pool import Traits, command_problem, read_traits, stop_ids
from bapo_megatron.environment.tools.calculator import Calculator
from bapo_megatron.errors import ConfigError
from bapo_megatron.rollout.sampler.turns import check_environment
from tests.support.chat_templates import demo_tokenizer

AGENT = f"{EndpointEnvironment.__module__}:EndpointEnvironment"


def test_the_traits_of_a_class() -> None:
    assert read_traits(EnvironmentConfig("tests.support.environments:Async")) == Traits(
        "tool", ("</call>",), "replay", False, True
    )
    assert read_traits(EnvironmentConfig("tests.support.environments:Restored")).resume == "restore"


@pytest.mark.parametrize(
    ("function", "text"),
    [
        ("tests.support.nowhere:Name", "importing tests.support.nowhere failed"),
        ("nowhere.py:Name", "there is no file .*/nowhere.py"),
        ("tests.support.environments:acted", "is not a subclass of bapo_megatron.environment.Environment"),
        ("tests.support.environments:Unnamed", r"tools=.* has .* without a name: write \{"),
        (
            "tests.support.environments:NoStep",
            r"it has no step\(self, turn\) of its own(?s:.)*role='ipython' is unknown: set it to 'tool' or "
            r"'user'(?s:.)*stops='</call>' must be a tuple of texts(?s:.)*resume='restore' needs a method "
            r"restore(?s:.)*define __init__\(self, task, settings\)",
        ),
    ],
)
def test_a_wrong_class_is_refused_in_words(function: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        read_traits(EnvironmentConfig(function))


@pytest.mark.parametrize(
    ("kind", "settings", "text"),
    [
        (
            "Calculator",
            {"format": 1},
            "format=1 must be one of tool_call, plain; environment.function=x:Y takes",
        ),
        (
            "Python",
            {"limit_s": -1},
            "limit_s=-1 must be above 0; .*Y takes limit_s: a number above 0, default 10.0",
        ),
        (
            "Agent",
            {},
            "command is missing: environment.function=x:Y takes command: a list, each item text of a len",
        ),
        (
            "Verifiers",
            {"taskset": {}, "envs": {}},
            "envs={}: .* no such setting; .*; env: a table, default {}$",
        ),
    ],
)
def test_settings_of_a_shipped_environment(kind: str, settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=rf"^environment\.settings\.{text}"):
        pools._check_settings(EnvironmentConfig("x:Y", settings), f"{own_settings.__name__}:{kind}Settings")


def test_the_program_of_an_agent_is_there_before_a_run() -> None:
    asked = EnvironmentConfig(AGENT, {"command": ["agnet", "x"]})
    told = r"^environment\.settings\.command=\['agnet', 'x'\]: agnet is not a program here: give one of PATH"
    with pytest.raises(ConfigError, match=told):
        check_environment(asked, Path("recipes/demo/policy"), demo_tokenizer())
    there = EnvironmentConfig(AGENT, {"command": [sys.executable, "agnet.py"]})  # it tells of its file itself
    assert command_problem(there, read_traits(there)) is None


def test_settings_are_refused_before_a_run(tmp_path: Path) -> None:
    """Also of a class in another interpreter, which has none of the packages that check them."""
    venv.create(tmp_path)
    function, python = f"{Calculator.__module__}:Calculator", tmp_path / "bin/python"
    asked = EnvironmentConfig(function, {"formt": "plain"}, python=python)
    with pytest.raises(
        ConfigError, match=r"^environment\.settings\.formt='plain': .* no such setting; its set"
    ):
        read_traits(asked)
    assert read_traits(replace(asked, settings={"format": "plain"})).resume == "restore"


@pytest.mark.parametrize(("kind", "own"), [(Calculator, "__init__"), (EndpointEnvironment, "run")])
def test_a_subclass_is_checked_as_its_base_is(kind: type[Environment], own: str) -> None:
    """But for one whose own method may read other settings."""
    mine = type("Mine", (kind,), {"word": 3, "close": lambda self: None})
    assert own_settings.settings_type(mine) is kind.settings_type is not None
    assert own_settings.settings_type(type("Own", (mine,), {own: getattr(kind, own)})) is None


def test_a_stop_is_one_token_or_refused() -> None:
    traits = Traits("tool", ("<|im_end|>",), "replay", False, True)
    assert stop_ids(traits, demo_tokenizer()) == (258,)
    with pytest.raises(ConfigError, match=r"stops has '</x>', which is 4 tokens"):
        stop_ids(replace(traits, stops=("</x>",)), demo_tokenizer())
