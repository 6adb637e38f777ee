"""docs/environments.md: its environment of thirty lines plays an episode, and what it names is there."""

from __future__ import annotations

from bapo_megatron.environment import Environment, Reply, Task
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
