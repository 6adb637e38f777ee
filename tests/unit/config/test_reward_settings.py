"""``reward.settings`` and ``reward.sandbox_url``: flags, checks, what a resumed run may change."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.checkpoint.run_directory import changed_settings, check_same_run, store_config
from bapo_megatron.commands.recipe_flags import check_names, parse_flags
from bapo_megatron.config import DataConfig, ModelConfig, RewardConfig, RunConfig
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
