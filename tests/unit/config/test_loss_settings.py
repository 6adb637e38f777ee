"""``algorithm.loss_settings``: in recipes and as a flag, stored with the run, checked before work starts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron import cli
from bapo_megatron.algo.bounds import grpo
from bapo_megatron.checkpoint.run_directory import changed_settings, check_same_run, store_config
from bapo_megatron.commands.recipe_flags import check_names, parse_flags
from bapo_megatron.config import AlgorithmConfig, BatchConfig, DataConfig, ModelConfig, RunConfig
from bapo_megatron.errors import ConfigError

RUN = RunConfig("run", ModelConfig(Path("model")), DataConfig(Path("data.jsonl")))
ROOT = Path(__file__).parents[3]


def with_settings(run: RunConfig, **settings: Any) -> RunConfig:
    return dataclasses.replace(run, algorithm=AlgorithmConfig(loss="sapo", loss_settings=settings))


def parsed(*flags: str, run: RunConfig = RUN) -> dict[str, Any]:
    return parse_flags("train", Path("recipe.py"), run, ["recipe.py", *flags]).algorithm.loss_settings


def test_a_flag_is_a_json_object_and_replaces_the_recipes() -> None:
    recipes = with_settings(RUN, temperature_positive=3.0)
    assert parsed() == {}
    assert parsed(run=recipes) == {"temperature_positive": 3.0}
    assert parsed("--algorithm.loss-settings", '{"b": 2, "c": null}', run=recipes) == {"b": 2, "c": None}
    assert parsed("--algorithm.loss-settings={}", run=recipes) == {}


@pytest.mark.parametrize("word", ["b=2", "[1]", '{"b": }', ""])
def test_a_flag_that_is_no_json_object_is_refused(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="^2$"):
        parsed("--algorithm.loss-settings", word)
    assert "--algorithm.loss-settings" in capsys.readouterr().err


def test_a_recipe_may_give_only_a_dict() -> None:
    wrong: Any = [("temperature_positive", 2.0)]
    with pytest.raises(ConfigError, match="algorithm.loss_settings="):
        dataclasses.replace(RUN, algorithm=AlgorithmConfig(loss_settings=wrong)).check()


def test_settings_are_stored_and_a_run_goes_on_with_its_own(tmp_path: Path) -> None:
    run = dataclasses.replace(with_settings(RUN, temperature_positive=2), run_dir=tmp_path)
    store_config(run)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    stored = json.loads((tmp_path / "config.json").read_text())["config"]
    assert stored["algorithm.loss_settings"] == {"temperature_positive": 2}
    check_same_run(run)
    check_same_run(with_settings(run, temperature_positive=2.0))
    other = with_settings(run, temperature_positive=3.0)
    with pytest.raises(ConfigError, match=r"algorithm.loss_settings: \{'temperature_positive': 2\} in the"):
        check_same_run(other)
    check_same_run(dataclasses.replace(other, allow_change=("algorithm.loss_settings",)))


def test_a_run_from_before_there_were_settings_has_none(tmp_path: Path) -> None:
    run = dataclasses.replace(RUN, run_dir=tmp_path)
    store_config(run)
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored["config"].pop("algorithm.loss_settings") == {}
    (tmp_path / "config.json").write_text(json.dumps(stored))
    assert changed_settings(run) == []


def test_planning_refuses_what_a_registered_loss_does_not_take(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="algorithm.loss=sapo has no such setting"):
        check_names(with_settings(RUN, temperature=2.0))
    fixed_held = dataclasses.replace(
        RUN, algorithm=AlgorithmConfig(grpo()), batch=BatchConfig(hold_forwards=True)
    )
    with pytest.raises(ConfigError, match="algorithm.loss=clip with fixed bounds makes none"):
        check_names(fixed_held)
    elsewhere = AlgorithmConfig(loss="lab.on_the_cluster:Loss", loss_settings={"width": 2.0})
    check_names(dataclasses.replace(RUN, algorithm=elsewhere))
    monkeypatch.chdir(ROOT)
    flags = ["--algorithm.loss=sapo", '--algorithm.loss-settings={"temperature_positive": 0}']
    assert cli.run(["plan", "recipes/demo_cpu.py", "--algorithm.bounds.target=0.4", *flags]) == 2
    assert "temperature_positive=0 must be above 0" in capsys.readouterr().err
