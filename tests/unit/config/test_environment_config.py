"""The section ``environment``: flags, checks, what a resumed run may change, runs from before."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, get_args

import pytest

from bapo_megatron.checkpoint.run_directory import changed_settings, check_same_run, store_config
from bapo_megatron.commands.recipe_flags import parse_flags
from bapo_megatron.config import (
    DataConfig,
    EnvironmentConfig,
    EvaluationConfig,
    ModelConfig,
    RunConfig,
    SourceConfig,
)
from bapo_megatron.config.sources import Sources
from bapo_megatron.errors import ConfigError
from bapo_megatron.evaluation.options import EvalOptions

RUN = RunConfig("run", ModelConfig(Path("model")), DataConfig(Path("data.jsonl")))


def within(run: RunConfig = RUN, **fields: Any) -> RunConfig:
    return dataclasses.replace(run, environment=EnvironmentConfig(**{"function": "a.b:Name", **fields}))


def test_flags_name_the_class_and_its_limits() -> None:
    words = ["recipe.py", "--environment.function", "tool.py:Tool", "--environment.max-turns", "3"]
    words += ["--environment.settings", '{"digits": 5}', "--environment.python", "/opt/python"]
    found = parse_flags("train", Path("recipe.py"), RUN, words).environment
    settings = {"digits": 5}
    assert found == EnvironmentConfig("tool.py:Tool", settings, max_turns=3, python=Path("/opt/python"))
    assert RUN.environment == EnvironmentConfig()
    assert RUN.environment.function is None


@pytest.mark.parametrize("function", ["a:B", "package.module:Name", "tool.py:Tool", "/some dir/my_tool.py:T"])
def test_a_class_is_named_by_module_or_file(function: str) -> None:
    within(function=function).check()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"function": "Name"}, "environment.function='Name' names no class: give package.module:Name, or"),
        ({"function": "tool.py"}, "environment.function='tool.py' names no class"),
        ({"function": "tool.py:a b"}, "environment.function='tool.py:a b' names no class"),
        ({"function": None, "settings": {"a": 1}}, "environment.settings needs environment.function"),
        ({"step_limit_s": 601.0}, r"step_limit_s=601 is above environment.episode_limit_s=600"),
        ({"max_turns": 0}, "environment.max_turns=0 must be"),
        ({"history": "raw"}, "environment.history='raw'"),
    ],
)
def test_what_does_not_fit_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        within(**fields).check()


def test_a_resumed_run_may_have_other_limits_and_no_other_environment(tmp_path: Path) -> None:
    run = within(dataclasses.replace(RUN, run_dir=tmp_path))
    store_config(run)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    operated = {"step_limit_s": 5.0, "episode_limit_s": 50.0, "workers": 7, "memory_limit_mb": 999}
    check_same_run(within(run, **operated, python=Path("/opt/python")))
    for other in ({"function": "a:B"}, {"settings": {"a": 1}}, {"max_turns": 9}, {"history": "sampled"}):
        [name] = other
        with pytest.raises(ConfigError, match=f"(?s)environment.{name}: .*--allow-change environment.{name}"):
            check_same_run(within(run, **other))


def test_a_run_from_before_has_none(tmp_path: Path) -> None:
    run = dataclasses.replace(RUN, run_dir=tmp_path)
    store_config(run)
    stored = json.loads((tmp_path / "config.json").read_text())
    for name in [name for name in stored["config"] if name.startswith("environment.")]:
        del stored["config"][name]
    (tmp_path / "config.json").write_text(json.dumps(stored))
    assert changed_settings(run) == []


def test_an_evaluation_has_the_section_too() -> None:
    options = EvalOptions(Path("model"), "aime24", environment=within(max_turns=2).environment)
    options.check()
    assert options.run_config(Path("model"), Path("out"), 10).environment == options.environment
    assert options.sampling()["environment"] == {"function": "a.b:Name", "settings": {}, "max_turns": 2}
    assert "environment" not in EvalOptions(Path("model"), "aime24").sampling(), "as it was stored before"
    wrong = dataclasses.replace(options, environment=EnvironmentConfig("Name"))
    with pytest.raises(ConfigError, match="environment.function='Name' names no class"):
        wrong.check()


# --- environments of sources -----------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ("tool.py:Tool", 'the environment of a source is "tool.py:Tool": write an object such as'),
        (
            {"function": "a:B", "turns": 3},
            "environment of a source has no turns: its fields are function, se",
        ),
    ],
)
def test_what_is_no_environment_of_a_source_is_refused(
    environment: Any, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="^2$"):
        parsed({"path": "a.jsonl", "environment": environment})
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert message in said


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"function": "Name"}, r"^data.sources\[b\].environment.function='Name' names no class"),
        ({"settings": {"a": 1}}, r"^data.sources\[b\].environment.settings needs data.sources\[b\].env"),
        ({"step_limit_s": 601.0}, r"^data.sources\[b\].environment.step_limit_s=601 is above data.sources\["),
        ({"max_turns": 0}, r"^data.sources\[1\].environment.max_turns=0 must be at least 1"),
        ({"max_turns": "three"}, r"^data.sources\[1\].environment.max_turns='three' must be a whole number"),
    ],
)
def test_a_wrong_environment_of_a_source_is_refused(own: dict[str, Any], message: str) -> None:
    mixed(a=None, b=EnvironmentConfig("a:B")).check()
    with pytest.raises(ConfigError, match=message):
        mixed(a=None, b=EnvironmentConfig(**own)).check()


def test_a_source_without_one_has_the_runs() -> None:
    none, tool = EnvironmentConfig(), EnvironmentConfig("tool.py:Tool")
    run = mixed(within(), a=None, b=none, c=tool)
    assert run.environments == {"a": run.environment, "b": none, "c": tool}
    evaluated = dataclasses.replace(run, evaluation=EvaluationConfig(1, ("c", "d")))
    assert evaluated.environments == {"": run.environment, **run.environments}
    assert [run.source_of_suite(name) for name in ("c", "d")] == ["c", ""]
    assert within().environments == {"": within().environment}


def test_a_resumed_run_may_have_other_limits_of_a_source_and_no_other_environment(tmp_path: Path) -> None:
    tool = EnvironmentConfig("tool.py:Tool")
    run = mixed(dataclasses.replace(RUN, run_dir=tmp_path), a=None, b=tool)
    store_config(run)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    check_same_run(run)
    operated = dataclasses.replace(tool, workers=7, step_limit_s=5.0, python=Path("/opt/python"))
    check_same_run(mixed(run, a=None, b=operated))
    for own in (None, EnvironmentConfig(), dataclasses.replace(tool, max_turns=9)):
        with pytest.raises(ConfigError, match=r"(?s)data.sources: .*--allow-change data.sources"):
            check_same_run(mixed(run, a=None, b=own))
