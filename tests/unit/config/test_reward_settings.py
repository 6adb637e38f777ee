"""Settings of a reward and of a loss, in recipes and as flags: stored, checked first, and when resumed."""

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
from bapo_megatron.config import (
    AlgorithmConfig,
    BatchConfig,
    DataConfig,
    ModelConfig,
    RewardConfig,
    RunConfig,
)
from bapo_megatron.data.problem_sets import check_prepared_for
from bapo_megatron.errors import ConfigError
from bapo_megatron.evaluation.options import EvalOptions
from bapo_megatron.reward.functions import check_function, load_function

RUN = RunConfig("run", ModelConfig(Path("model")), DataConfig(Path("data.jsonl")))
JUDGE = {"url": "http://judge:8000/v1", "model": "m"}


def judged(run: RunConfig = RUN, function: str = "llm_judge", **settings: Any) -> RunConfig:
    return dataclasses.replace(run, reward=RewardConfig(function=function, settings={**JUDGE, **settings}))


def test_a_flag_is_a_json_object() -> None:
    words = ["recipe.py", "--reward.function", "llm_judge", "--reward.settings", json.dumps(JUDGE)]
    found = parse_flags("train", Path("recipe.py"), RUN, words).reward
    assert (found.function, found.settings) == ("llm_judge", JUDGE)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ({"function": "math", "settings": {"a": 1}}, "reward.settings: reward.function=math takes none"),
        (
            {"function": "llm_judg"},
            "reward.function='llm_judg' is unknown: give math, .*llm_judge",
        ),
        (
            {"function": "llm_judge", "settings": JUDGE, "format_pattern": "a"},
            "reward.format_pattern is matched in a reward worker, and reward.function=llm_judge has none",
        ),
        ({"function": "code", "sandbox_url": "sandbox:80"}, "reward.sandbox_url is no address"),
    ],
)
def test_what_does_not_fit_is_refused(reward: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(RUN, reward=RewardConfig(**reward)).check()


def test_planning_checks_the_settings_but_not_this_machine() -> None:
    check_names(judged(api_key_env="NOT_THERE_7"))
    with pytest.raises(ConfigError, match="reward.settings.modle=1: .*no such setting, is it model"):
        check_names(judged(modle=1))


def test_a_resumed_run_may_reach_its_judge_elsewhere_and_ask_nothing_else(tmp_path: Path) -> None:
    run = judged(dataclasses.replace(RUN, run_dir=tmp_path), template="{response}")
    store_config(run)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    reached = {"url": "http://other/v1", "api_key_env": "KEY", "concurrency": 1, "timeout_s": 2.0}
    check_same_run(judged(run, template="{response}", **reached, give_up_s=3.0, cache=0))
    for other in ({"template": "{prompt}{response}"}, {"template": "{response}", "model": "other"}):
        with pytest.raises(ConfigError, match="(?s)reward.settings: {.*--allow-change reward.settings"):
            check_same_run(judged(run, **other))
    own = dataclasses.replace(run, reward=RewardConfig(function="mine:score", settings={"url": "a"}))
    store_config(own)
    with pytest.raises(ConfigError, match="reward.settings: {'url': 'a'} in the run, {'url': 'b'} now"):
        check_same_run(
            dataclasses.replace(own, reward=RewardConfig(function="mine:score", settings={"url": "b"}))
        )


def test_a_run_from_before_has_neither(tmp_path: Path) -> None:
    run = dataclasses.replace(RUN, run_dir=tmp_path)
    store_config(run)
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored["config"].pop("reward.settings") == {}
    assert stored["config"].pop("reward.sandbox_url") is None
    (tmp_path / "config.json").write_text(json.dumps(stored))
    assert changed_settings(run) == []


def test_settings_of_a_function_of_ones_own_are_its_keyword_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rewards_with_settings.py").write_text(
        "def score(prompt, response, *, weight):\n    return weight * len(response)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    path = "rewards_with_settings:score"
    loaded: Any = load_function(path, {"weight": 2.0})
    assert loaded(None, "abc") == 6.0
    with pytest.raises(ConfigError, match=r"cannot be called with a prompt and a response .*'weight'"):
        load_function(path)
    with pytest.raises(ConfigError, match=r"with a prompt, a response and reward.settings .*'x'"):
        check_function(RewardConfig(function=path, settings={"weight": 1, "x": 2}))


def test_data_for_a_judge_are_refused_by_a_reward_with_a_form(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").touch()
    (tmp_path / "card.json").write_text(json.dumps({"options": {"reward": "llm_judge"}}))
    for function in ("llm_judge", "reward_model", "mine:score"):
        check_prepared_for(tmp_path / "data.jsonl", function, "--reward.function")
    with pytest.raises(ConfigError, match="was prepared for llm_judge: add --reward.function llm_judge"):
        check_prepared_for(tmp_path / "data.jsonl", "math", "--reward.function")


def test_an_evaluation_has_the_same_settings() -> None:
    options = EvalOptions(Path("model"), "aime24", reward="llm_judge", reward_settings=JUDGE)
    options.check()
    assert options.run_config(Path("model"), Path("out"), 10).reward.settings == JUDGE
    with pytest.raises(ConfigError, match="reward_settings needs reward"):
        dataclasses.replace(options, reward=None).check()
    with pytest.raises(
        ConfigError, match="reward=judge must be package.module:function or one of reasoning_gym, llm_j"
    ):
        dataclasses.replace(options, reward="judge").check()
    with pytest.raises(ConfigError, match="sandbox_url is no address"):
        dataclasses.replace(options, sandbox_url="host").check()


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
