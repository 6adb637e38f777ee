"""docs/environments.md: its environment of thirty lines plays an episode, and what it names is there."""

from __future__ import annotations

import re

from bapo_megatron.environment import Environment, Reply, Task
from bapo_megatron.runtime.dotted_path import load_dotted_path
from tests.support.pages import ROOT, blocks
from tests.support.scripted_episodes import check_durable

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


def test_the_shipped_environments_that_the_page_names() -> None:
    """The adapters of packages that are not installed here are played in the slow tier."""
    text = PAGE.read_text()
    for path in re.findall(r"`(bapo_megatron\.environment\.tools\.\w+:\w+)`", text):
        assert issubclass(load_dotted_path("environment.function", path, "class"), Environment)
    adapters = {
        file.stem: file.read_text() for file in (ROOT / "bapo_megatron/environment/adapters").glob("*.py")
    }
    named = re.findall(r"\| `(\w+):(\w+)`", text)
    helpers = {"__init__", "agent_program", "agent_rows", "conversation", "verifiers_agents"}
    assert {module for module, _ in named} == set(adapters) - helpers
    for module, name in named:
        assert f"class {name}(" in adapters[module]
        assert module == "loop" or "    settings_type = " in adapters[module]  # checked before a run
        assert module == "loop" or len(adapters[module].splitlines()) <= 100
