"""The demos with a tool: a warm start, a worked example, and what their policies meet."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.commands.recipe_flags import check_names
from bapo_megatron.config import RunConfig, load_recipe
from bapo_megatron.environment import Environment, Reply, Task
from bapo_megatron.environment.adapters.endpoint import EndpointEnvironment
from bapo_megatron.environment.tools.calculator import Calculator
from tests.support.pages import ROOT, blocks
from tests.support.scripted_episodes import check_durable, play

DEMO = ROOT / "recipes/demo"


def sums(rows: list[dict[str, Any]]) -> set[str]:
    return {row["prompt"][0]["content"] for row in rows}


def test_the_warm_start_has_no_sum_of_the_run() -> None:
    """Its solutions are one call, answered, or a guess; the calls have both habits."""
    rows = runpy.run_path(str(DEMO / "make_tools.py"))["warm_start"]()
    for split in ("train", "eval"):
        lines = (DEMO / f"{split}.jsonl").read_text().splitlines()
        assert not sums(rows) & sums([json.loads(line) for line in lines])
    calls = [row["extra_info"]["solution"].partition("<|im_end|>") for row in rows]
    asked = [row for row, (_, answered, _) in zip(rows, calls, strict=True) if answered]
    right = [
        row for row in asked if row["extra_info"]["solution"].startswith(row["prompt"][0]["content"][:-1])
    ]
    assert 0.65 < len(asked) / len(rows) < 0.75
    assert 0.45 < len(right) / len(asked) < 0.55


def test_the_recipe_and_its_calculator() -> None:
    run = load_recipe(ROOT / "recipes/demo_tools_cpu.py", RunConfig)
    run.check()
    task = Task([{"role": "user", "content": "755+180="}], ground_truth="935")
    replies = play(Calculator, task, run.environment.settings, ["755+180", "\\boxed{935}"])
    assert [reply.observation for reply in replies] == ["935", None]
    assert isinstance(replies[-1], Reply)
    assert replies[-1].reward is None  # the box is judged by reward.function


# --- the demo with a real model -------------------------------------------------------------------


def test_problems_stand_behind_one_worked_example(tmp_path: Path) -> None:
    """All else of a row stays, and the example's own problem is left out."""
    make = runpy.run_path(str(DEMO / "make_worked.py"))
    example = make["EXAMPLE"][0][1]
    questions = {"train": ["12 + 345 =", example], "held_out": ["98 - 76 ="]}
    for split, texts in questions.items():
        rows = [
            {"prompt": [{"role": "user", "content": text}], "extra_info": {"entry": text}, "é": [1]}
            for text in texts
        ]
        (tmp_path / split).mkdir()
        (tmp_path / split / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    make["main"]([str(tmp_path)])
    for split, texts in questions.items():
        [row] = map(json.loads, (tmp_path / f"{split}.jsonl").read_text().splitlines())
        *before, last = row["prompt"]
        assert [message["role"] for message in before] == ["system", "user", "assistant", "tool", "assistant"]
        assert last == {"role": "user", "content": texts[0]}
        assert (row["extra_info"], row["é"]) == ({"entry": texts[0]}, [1])


def test_the_recipe_of_the_real_model_and_its_example() -> None:
    """The calculator answers the example's call as the example says; the answer ends its episode."""
    run = load_recipe(ROOT / "recipes/demo_real_tools.py", RunConfig)
    run.check()
    (_, question), (_, call), (_, value), (_, answer) = runpy.run_path(str(DEMO / "make_worked.py"))[
        "EXAMPLE"
    ]
    task = Task([{"role": "user", "content": question}])
    replies = play(Calculator, task, run.environment.settings, [call, answer])
    assert [reply.observation for reply in replies] == [value, None]
    assert call in question


def test_the_agent_program_of_its_recipe_is_a_calculator_too() -> None:
    run = load_recipe(ROOT / "recipes/demo_agent.py", RunConfig)
    run.check()
    make = runpy.run_path(str(DEMO / "make_worked.py"))
    (_, question), (_, call), (_, value), (_, answer) = make["EXAMPLE"]
    line = json.dumps({"prompt": [{"role": "user", "content": "98 - 76 ="}]})
    [row] = make["worked"]([line], "user")
    assert [one["role"] for one in row["prompt"]] == ["system", *["user", "assistant"] * 2, "user"]
    task = Task([{"role": "user", "content": question}])
    replies = play(EndpointEnvironment, task, run.environment.settings, [call, answer])
    assert replies == [Reply(value), Reply(None)]


@pytest.mark.parametrize("name", ["demo_real", "demo_real_tools", "demo_agent"])
@pytest.mark.parametrize("preset", ["paper", "balanced", "clip_higher", "published_code"])
def test_the_real_models_recipes_take_every_preset(name: str, preset: str, tmp_path: Path) -> None:
    """As a user edits them: one word of the recipe."""
    text = (ROOT / f"recipes/{name}.py").read_text()
    edited = tmp_path / "edited.py"
    edited.write_text(text.replace("import paper", f"import {preset} as paper"))
    run = load_recipe(edited, RunConfig)
    run.check()
    check_names(run)
    assert run.batch.hold_forwards is (preset in ("paper", "balanced"))


PAGE = ROOT / "docs/environments.md"


def test_the_environment_of_the_page() -> None:
    """It is at most thirty lines, and continues after a kill."""
    [code] = [block.text for block in blocks(PAGE) if "class Guess" in block.text]
    assert len(code.strip().splitlines()) <= 30
    space: dict[str, type[Environment]] = {}
    exec(compile(code, str(PAGE), "exec"), space)
    task = Task([{"role": "user", "content": "Game 7: guess my number, 1 to 100."}], ground_truth="37")
    turns = ["50", "<think>50 was too high.</think>25", "a third?", "37"]
    assert check_durable(space["Guess"], task, {"guesses": 5}, turns) == [
        Reply("lower", reward=0.0, metrics={"found": 0.0}),
        Reply("higher", reward=0.0, metrics={"found": 0.0}),
        Reply("Say a number.", reward=0.0, metrics={"found": 0.0}),
        Reply(None, reward=0.25, metrics={"found": 1.0}),
    ]
    lost = check_durable(space["Guess"], task, {"guesses": 2}, ["50", "25"])
    assert lost[-1] == Reply(None, reward=0.0, metrics={"found": 0.0})
