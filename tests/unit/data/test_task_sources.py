"""Sources without a network (reasoning-gym, champ); system messages."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from bapo_megatron.cli import run
from bapo_megatron.data.prepare import reasoning_gym
from bapo_megatron.data.prepare.command import prepare
from bapo_megatron.data.prepare.options import DATA_FILE, PrepareOptions
from bapo_megatron.data.prepare.reasoning_gym import generated_rows
from bapo_megatron.data.prepare.sources import open_source
from bapo_megatron.data.problem_sets import load_suite
from bapo_megatron.data.rows import read_rows
from bapo_megatron.errors import ConfigError
from bapo_megatron.hf.tokenizer import load_tokenizer
from bapo_megatron.reward.reasoning_gym import check_task, score, tasks
from tests.support.waiting import is_alive, until

MODEL = Path(__file__).parents[3] / "recipes/demo/policy"
THREE_TERMS = '{"min_terms": 3, "max_terms": 3}'


def made(folder: Path, tasks: str = "chain_sum,products", **options: Any) -> list[dict[str, Any]]:
    prepare(PrepareOptions((f"reasoning-gym:{tasks}",), folder, **options))
    return read_rows(folder / DATA_FILE)


def text_of(row: dict[str, Any]) -> str:
    return str(row["prompt"][-1]["content"])


@pytest.mark.integration
@pytest.mark.parametrize("cpu_s", [0, 3], ids=["at once", "at work"])
def test_problems_are_made_no_longer_than_their_asker_lives(cpu_s: float) -> None:
    asks = "generated_rows('reasoning-gym:chain_sum', 10**7, 0, {})"
    code = f"from {reasoning_gym.__name__} import *; {asks}"
    with subprocess.Popen([sys.executable, "-c", code]) as asker:
        own = psutil.Process(asker.pid)
        until(own.children)
        [made] = own.children()
        until(lambda: sum(made.cpu_times()[:2]) >= cpu_s)
        asker.kill()
    try:
        until(lambda: not is_alive(made.pid))
    finally:
        with suppress(psutil.NoSuchProcess):
            made.kill()


@pytest.mark.integration
def test_problems_of_tasks_in_equal_shares(tmp_path: Path) -> None:
    asked = {"size": 31, "task_settings": THREE_TERMS, "system_prompt": "Only the result."}
    rows = made(tmp_path / "a", seed=3, **asked)
    counts = Counter(row["data_source"] for row in rows)
    assert counts == {"reasoning_gym/chain_sum": 16, "reasoning_gym/products": 15}
    assert len({text_of(row) for row in rows}) == 31
    assert all(score(row["extra_info"], row["reward_model"]["ground_truth"]) == 1 for row in rows)
    assert rows[0]["prompt"][0] == {"role": "system", "content": "Only the result."}
    assert "boxed" not in text_of(rows[0])
    assert json.loads(rows[0]["extra_info"]["settings"]) == json.loads(THREE_TERMS)
    assert made(tmp_path / "b", seed=3, **asked) == rows, "the same seed, the same problems"
    other = made(tmp_path / "c", seed=4, **asked)
    assert not {text_of(row) for row in other} & {text_of(row) for row in rows}, "seeds are not neighbours"

    tokenizer = load_tokenizer(MODEL)
    path = str(tmp_path / "a")
    assert len(load_suite(path, tokenizer, 900, reward_function="reasoning_gym").prompts) == 31
    with pytest.raises(ConfigError, match="prepared for reasoning_gym: add --reward reasoning_gym"):
        load_suite(path, tokenizer, 900)
    (tmp_path / "plain.jsonl").write_text(json.dumps({**rows[0], "extra_info": {}}) + "\n")
    with pytest.raises(ConfigError, match=r"row 0 .*extra_info.task is missing"):
        load_suite(str(tmp_path / "plain.jsonl"), tokenizer, 900, reward_function="reasoning_gym")


@pytest.mark.integration
def test_problems_do_not_depend_on_the_order_of_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """This task draws from a set of texts, whose order follows the interpreter's hash seed."""
    found = []
    for seed in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        found.append(generated_rows("reasoning-gym:ransom_note", 3, 0, {}))
    assert found[0] == found[1]


@pytest.mark.integration
def test_a_task_that_does_not_exist_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--size", "3", "--output", str(tmp_path / "out")]
    assert run(["data", "prepare", "reasoning-gym:chain_sums", *flags]) == 2
    told = "error: source reasoning-gym:chain_sums: reasoning-gym has no task 'chain_sums'; it has ab, acre"
    assert capsys.readouterr().err.startswith(told)
    assert not (tmp_path / "out").exists()


@pytest.mark.integration
def test_settings_that_a_task_refuses() -> None:
    """In the library's words: one that it has not, and one that it asserts."""
    for settings, message in (({"digits": 1}, "'digits'"), ({"min_terms": 0}, "min_terms must be positive")):
        with pytest.raises(ConfigError, match=f"source reasoning-gym:chain_sum: .*{message}"):
            generated_rows("reasoning-gym:chain_sum", 1, 0, settings)


def test_a_task_with_too_few_questions_says_how_many() -> None:
    one_digit = {"min_digits": 1, "max_digits": 1}
    assert len(reasoning_gym._made("products", 100, 0, one_digit)) == 100
    with pytest.raises(ConfigError, match="products has no more than 100 different questions .* and 101"):
        reasoning_gym._made("products", 101, 0, one_digit)


def test_packages_that_are_absent_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks()
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="the task zebra_puzzles needs pycosat, which is compiled"):
        check_task("zebra_puzzles", generates=True)
    with pytest.raises(ConfigError, match=r"source champ: run pip install --no-deps champ-dataset==1\.0\.0"):
        open_source("champ", "train", None)


@pytest.mark.parametrize(
    ("sources", "options", "message"),
    [
        ("reasoning-gym:chain_sum a.jsonl", {"size": 3}, "prepare it apart, or give --reward"),
        ("reasoning-gym:chain_sum", {"size": 0}, "size=0 must be at least 1"),
        ("reasoning-gym:chain_sum", {"task_settings": "{"}, "must be one JSON object"),
        ("reasoning-gym:chain_sum", {}, "how many problems"),
        ("reasoning-gym:chain_sum,products", {"size": 1}, "--size 1 is less than one problem for each of 2"),
    ],
)
def test_options_that_do_not_go_together(
    sources: str, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare(PrepareOptions(tuple(sources.split()), tmp_path / "out", **options))


@pytest.mark.integration
@pytest.mark.parametrize(
    ("settings", "of_tasks"),
    [
        ({"max_digits": 2}, [{"max_digits": 2}, {"max_digits": 2}]),
        ({"products": {"max_terms": 2}}, [{}, {"max_terms": 2}]),
    ],
)
def test_settings_of_one_task_or_of_all(settings: dict[str, Any], of_tasks: list[Any]) -> None:
    rows = generated_rows("reasoning-gym:chain_sum, products", 3, 0, settings)
    assert [row["data_source"].rpartition("/")[2] for row in rows] == ["chain_sum", "products", "chain_sum"]
    assert [json.loads(row["extra_info"]["settings"]) for row in rows[:2]] == of_tasks


@pytest.mark.integration
def test_champ_is_a_suite_for_the_maths_reward(tmp_path: Path) -> None:
    card = prepare(PrepareOptions(("champ",), tmp_path, max_invalid=0, overwrite=True))
    first = read_rows(tmp_path / DATA_FILE)[0]
    assert card.kept == 102  # of 270: those with a number, perhaps behind "or equivalently"
    assert first["data_source"] == "champ"
    assert first["extra_info"]["category"] == "Combinatorics"
    assert first["reward_model"]["ground_truth"] == "239"


def test_a_system_message_takes_the_place_of_one(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Old."}, {"role": "user", "content": "2 + 2?"}]
    rows = [{"prompt": chat, "reward_model": {"ground_truth": "4"}}, {"problem": "1 + 2?", "answer": "3"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for text, systems in (("New.", ["New.", "New."]), (None, ["Old.", None])):
        options = {"system_prompt": text, "overwrite": True, "instruct": False}
        prepare(PrepareOptions((str(tmp_path / "rows.jsonl"),), tmp_path / "out", **options))
        found = [one["prompt"] for one in read_rows(tmp_path / "out" / DATA_FILE)]
        assert [one[0]["content"] if len(one) == 2 else None for one in found] == systems
        assert [one[-1]["content"] for one in found] == ["2 + 2?", "1 + 2?"]
