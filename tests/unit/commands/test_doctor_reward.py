"""``bapo doctor``: one call of the recipe's reward, which gives a score or a traceback."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from bapo_megatron.commands.doctor import doctor
from bapo_megatron.commands.doctor.recipe import check_recipe, try_reward
from bapo_megatron.config import RewardConfig, RunConfig
from bapo_megatron.config.recipe import load_recipe
from bapo_megatron.types import Prompt
from tests.support.judge_server import judge_server, judged, says

RECIPE = Path(__file__).parents[3] / "recipes/demo_cpu.py"
pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    ("function", "works", "says"),
    [
        ("math", True, r"score 1 for row 3 with its ground truth in a box as the response"),
        ("tests.support.reward_functions:with_more", True, "score 1 for row 3"),
        ("tests.support.reward_functions:score", False, r"no score for row 3 .*raised: KeyError\("),
        ("tests.support.reward_functions:one", False, "cannot be called with a prompt and a response"),
    ],
)
def test_a_reward_is_tried_on_a_row(function: str, works: bool, says: str) -> None:
    config = load_recipe(RECIPE, RunConfig)
    config = dataclasses.replace(config, reward=RewardConfig(function=function))
    row = try_reward(config, Prompt(3, np.zeros(1, np.int32), "34", "test"))
    assert re.search(says, row.found)
    assert (row.state, bool(row.fix)) == (("ok", False) if works else ("problem", True))
    if "no score" in row.found:
        assert "Traceback (most recent call last):" in row.found
        assert "return ACTIONS[word](prompt, rest)" in row.found


def test_a_recipe_that_ends_the_process_is_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of a report that continues."""
    for section in ("package_rows", "sglang_rows", "sandbox_rows"):
        monkeypatch.setattr(doctor, section, lambda *_: iter(()))
    path = tmp_path / "crash.py"
    path.write_text("import os, signal\nprint('noise')\nos.kill(os.getpid(), signal.SIGKILL)\n")
    assert doctor.run_doctor([str(path), "--json"]) == 1
    told = json.loads(capfd.readouterr().out)["rows"]
    [row] = [row for row in told if row["section"] == "recipe"]
    assert row["found"].startswith("ended by SIGKILL")
    assert "machine" in {row["section"] for row in told}


def test_the_doctor_calls_the_reward_of_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_rewards.py").write_text("def score(prompt, response):\n    return prompt.truth\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    base = shutil.copytree(RECIPE.parent / "demo/policy", tmp_path / "base")
    for name in ("config", "generation_config", "tokenizer_config"):  # as a base model has them
        file = base / f"{name}.json"
        written = file.read_text().replace("<|im_end|>", "<|endoftext|>")
        file.write_text(written.replace('"eos_token_id": 258', '"eos_token_id": 256'))
    flags = [f"--run-dir={tmp_path / 'run'}", f"--model.hf-path={base}"]
    rows, _ = check_recipe(RECIPE, [*flags, "--reward.function=broken_rewards:score"])
    [stops, row] = [row for row in rows if row.name in ("stop tokens", "reward")]
    assert (stops.state, row.state) == ("optional", "problem")
    assert "ends turns with <|im_end|>, and no response stops there" in stops.found
    assert "AttributeError: 'Prompt' object has no attribute 'truth'" in row.found


def test_a_judge_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bapo_megatron.commands.doctor.recipe.ENDPOINT_DEADLINE_S", 0.3)
    config = load_recipe(RECIPE, RunConfig)
    prompt = Prompt(3, np.zeros(1, np.int32), "34", "test", messages=[{"role": "user", "content": "17*2="}])

    def tried(url: str) -> tuple[bool, str]:
        reward = RewardConfig(function="llm_judge", settings={"url": url, "model": "m"})
        row = try_reward(dataclasses.replace(config, reward=reward), prompt)
        return row.state == "ok", row.found

    with judge_server(judged("Score: 1"), says({"error": "no such model"}, 404)) as server:
        assert tried(server.url) == (True, "score 1 for row 3 with its ground truth in a box as the response")
        works, found = tried(server.url)
        assert not works
        assert "no score for row 3" in found
        assert "endpoint: " in found
        assert "HTTP 404" in found
        port = server.port
    works, found = tried(f"http://127.0.0.1:{port}/v1")
    assert not works
    assert "no server took a connection for 0.3 s" in found
