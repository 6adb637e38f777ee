"""The demos with a tool: their recipes, the worked example, and what their policies meet."""

from __future__ import annotations

import json
import runpy

from bapo_megatron.config import RunConfig, load_recipe
from bapo_megatron.environment import Environment, Reply, Task
from bapo_megatron.environment.adapters.endpoint import EndpointEnvironment
from bapo_megatron.environment.tools.calculator import Calculator
from tests.support.pages import ROOT, blocks
from tests.support.scripted_episodes import check_durable, play

DEMO = ROOT / "recipes/demo"


def test_the_recipes_of_the_real_model_and_their_example() -> None:
    """The calculator answers the example's call as the example says, and so does the agent program."""
    make = runpy.run_path(str(DEMO / "make_worked.py"))
    (_, question), (_, call), (_, value), (_, answer) = make["EXAMPLE"]
    assert call in question
    for name, kind in (("demo_real_tools", Calculator), ("demo_agent", EndpointEnvironment)):
        run = load_recipe(ROOT / f"recipes/{name}.py", RunConfig)
        run.check()
        task = Task([{"role": "user", "content": question}])
        replies = play(kind, task, run.environment.settings, [call, answer])
        assert [reply.observation for reply in replies] == [value, None]
    line = json.dumps({"prompt": [{"role": "user", "content": "98 - 76 ="}]})
    [row] = make["worked"]([line], "user")
    assert [one["role"] for one in row["prompt"]] == ["system", *["user", "assistant"] * 2, "user"]


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
