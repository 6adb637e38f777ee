"""Settings of environments, rewards and losses: flags, checks, what a resumed run may change."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest

from bapo_megatron.checkpoint.run_directory import check_same_run, store_config
from bapo_megatron.commands.recipe_flags import check_names, parse_flags
from bapo_megatron.config import (
    AlgorithmConfig,
    DataConfig,
    EnvironmentConfig,
    EvaluationConfig,
    ModelConfig,
    RewardConfig,
    RunConfig,
    SourceConfig,
)
from bapo_megatron.config.sources import Sources
from bapo_megatron.errors import ConfigError
from bapo_megatron.evaluation.options import EvalOptions
from tests.support.altered import altered

RUN = RunConfig("run", ModelConfig(Path("model")), DataConfig(Path("data.jsonl")))


def within(run: RunConfig = RUN, **fields: Any) -> RunConfig:
    return dataclasses.replace(run, environment=EnvironmentConfig(**{"function": "a.b:Name", **fields}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"function": "Name"}, "{0}.function='Name' names no class"),
        ({"function": "tool.py:a b"}, "{0}.function='tool.py:a b' names no class"),
        ({"function": None, "settings": {"a": 1}}, "{0}.settings needs {0}.function"),
        ({"max_turns": 0}, "{1}.max_turns=0 must be"),
        ({"history": "raw"}, "{1}.history='raw'"),
    ],
)
def test_an_environment_that_does_not_fit_is_refused(fields: dict[str, Any], message: str) -> None:
    """Of the run, or of a source."""
    for function in ("a:B", "package.module:Name", "tool.py:Tool", "/some dir/my_tool.py:T"):
        within(function=function).check()
    with pytest.raises(ConfigError, match=re.escape(message.format("environment", "environment"))):
        within(**fields).check()
    mixed(a=None, b=EnvironmentConfig("a:B")).check()
    told = re.escape(message.format("data.sources[b].environment", "data.sources[1].environment"))
    with pytest.raises(ConfigError, match=told):
        mixed(a=None, b=EnvironmentConfig(**{"function": "a.b:Name", **fields})).check()


def mixed(run: RunConfig = RUN, **own: EnvironmentConfig | None) -> RunConfig:
    sources = tuple(SourceConfig(Path(f"{name}.jsonl"), environment=one) for name, one in own.items())
    return dataclasses.replace(run, data=DataConfig(sources=sources))


def parsed(*sources: dict[str, Any]) -> RunConfig:
    return parse_flags("train", Path("recipe.py"), RUN, ["recipe.py", "--data.sources", json.dumps(sources)])


def test_a_source_names_its_environment_by_a_flag() -> None:
    tool = {"function": "tool.py:Tool", "settings": {"a": 1}, "max_turns": 3, "python": "/opt/python"}
    found = parsed({"path": "a.jsonl", "environment": tool}, {"path": "b.jsonl"}).data.sources
    expected = EnvironmentConfig("tool.py:Tool", {"a": 1}, max_turns=3, python=Path("/opt/python"))
    assert [one.environment for one in found] == [expected, None]
    _, form = get_args(Sources)
    assert form.instance_from_str(form.str_from_instance(found)) == found, "what --help shows can be given"


def test_a_source_without_one_has_the_runs() -> None:
    none, tool = EnvironmentConfig(), EnvironmentConfig("tool.py:Tool")
    run = mixed(within(), a=None, b=none, c=tool)
    assert run.environments == {"a": run.environment, "b": none, "c": tool}
    evaluated = dataclasses.replace(run, evaluation=EvaluationConfig(1, ("c", "d")))
    assert evaluated.environments == {"": run.environment, **run.environments}
    assert [run.source_of_suite(name) for name in ("c", "d")] == ["c", ""]
    assert within().environments == {"": within().environment}


JUDGE = {"url": "http://judge:8000/v1", "model": "m"}


def judged(run: RunConfig = RUN, function: str = "llm_judge", **settings: Any) -> RunConfig:
    return dataclasses.replace(run, reward=RewardConfig(function=function, settings={**JUDGE, **settings}))


def test_planning_checks_the_settings_but_not_this_machine() -> None:
    check_names(judged(api_key_env="NOT_THERE_7"))
    with pytest.raises(ConfigError, match="reward.settings.modle=1: .*no such setting; its settings: "):
        check_names(judged(modle=1))


def test_an_evaluation_has_the_same_settings() -> None:
    tool = within(max_turns=2).environment
    judge: dict[str, Any] = {"reward": "llm_judge", "reward_settings": JUDGE}
    options = EvalOptions(Path("model"), "aime24", **judge, environment=tool)
    options.check()
    run = options.run_config(Path("model"), Path("out"), 10)
    assert (run.reward.settings, run.environment) == (JUDGE, tool)
    assert options.sampling()["environment"] == {"function": "a.b:Name", "settings": {}, "max_turns": 2}
    assert "environment" not in EvalOptions(Path("model"), "aime24").sampling(), "as it was stored before"
    for change, message in (
        ({"environment": EnvironmentConfig("Name")}, "environment.function='Name' names no class"),
        ({"reward": None}, "reward_settings needs reward"),
        ({"reward": "judge"}, "reward=judge must be package.module:function or .* llm_judge"),
        ({"sandbox_url": "host"}, "sandbox_url is not an address"),
    ):
        with pytest.raises(ConfigError, match=message):
            altered(options, change).check()


def with_settings(run: RunConfig, **settings: Any) -> RunConfig:
    return dataclasses.replace(run, algorithm=AlgorithmConfig(loss="sapo", loss_settings=settings))


OPERATED = {"step_limit_s": 5.0, "workers": 7, "memory_limit_mb": 999, "python": Path("/opt/python")}
TOOL = EnvironmentConfig("tool.py:Tool")
REACHED = {"url": "http://other/v1", "api_key_env": "KEY", "concurrency": 1, "timeout_s": 2.0, "cache": 0}


def scored(**settings: Any) -> RunConfig:
    return dataclasses.replace(RUN, reward=RewardConfig("mine:score", settings=settings))


@pytest.mark.parametrize(
    ("run", "same", "others", "field"),
    [
        (
            within(),
            within(**OPERATED, episode_limit_s=50.0),
            [within(**{name: value}) for name, value in (("settings", {"a": 1}), ("max_turns", 9))]
            + [within(function="a:B"), within(history="sampled")],
            "environment",
        ),
        (
            mixed(a=None, b=TOOL),
            mixed(a=None, b=dataclasses.replace(TOOL, **OPERATED)),
            [mixed(a=None, b=b) for b in (None, EnvironmentConfig(), dataclasses.replace(TOOL, max_turns=9))],
            "data.sources",
        ),
        (
            judged(),
            judged(**REACHED),
            [judged(template="x"), judged(model="y")],
            "reward.settings",
        ),
        (scored(url="a"), scored(url="a"), [scored(url="b")], "reward.settings"),
        (
            with_settings(RUN, temperature_positive=2),
            with_settings(RUN, temperature_positive=2.0),
            [with_settings(RUN, temperature_positive=3.0), with_settings(RUN)],
            "algorithm.loss_settings",
        ),
    ],
)
def test_what_a_resumed_run_may_change(
    run: RunConfig, same: RunConfig, others: list[RunConfig], field: str, tmp_path: Path
) -> None:
    """How its parts are reached and limited; anything else by its name."""
    store_config(dataclasses.replace(run, run_dir=tmp_path))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    check_same_run(dataclasses.replace(same, run_dir=tmp_path))
    for other in others:
        changed = dataclasses.replace(other, run_dir=tmp_path)
        with pytest.raises(ConfigError, match=rf"(?s){field}[.\w]*: .*--allow-change {field}") as refused:
            check_same_run(changed)
        [name] = re.findall(r"--allow-change (\S+)", str(refused.value))
        check_same_run(dataclasses.replace(changed, allow_change=(name,)))
