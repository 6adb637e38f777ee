"""What the pages say of a first try of an environment, and of what a continued run says, is so."""

from __future__ import annotations

import json
import re

from bapo_megatron.config import RunConfig
from bapo_megatron.config.recipe import load_recipe
from bapo_megatron.runtime.event_kinds import EVENT_KINDS
from tests.support.pages import ROOT, blocks

PAGE = ROOT / "docs/environments.md"


def test_the_first_try_fits_the_demos_policy() -> None:
    """The limits are the policy's, and the settings that a class of the reader's gets are the recipe's."""
    text, run = PAGE.read_text(), load_recipe(ROOT / "recipes/demo_tools_cpu.py", RunConfig)
    longest = json.loads((run.model.hf_path / "config.json").read_text())["max_position_embeddings"]
    [said] = re.findall(r"That policy takes (\d+) tokens, prompt and response together", text)
    assert int(said) == longest
    [settings] = re.findall(r"`environment\.settings` of its own \(`(.*?)`\)", text)
    assert json.loads(settings) == run.environment.settings
    [train] = [
        words
        for block in blocks(PAGE)
        for words in block.commands
        if words[1:3] == ["train", "recipes/demo_tools_cpu.py"]
    ]
    limits = [words_after(train, f"--{name}") for name in LIMITS]
    assert sum(map(int, limits)) <= longest


LIMITS = ("data.max-prompt-tokens", "rollout.max-response-tokens")


def words_after(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def test_the_events_of_what_survives_what_exist() -> None:
    section = PAGE.read_text().partition("## What survives what\n")[2].partition("\n## ")[0]
    cells = [line.split("|")[3] for line in section.splitlines() if line.startswith("|")][2:]
    named = {name for cell in cells for name in re.findall(r"`([a-z_]+)`", cell)}
    assert {"start", "resume", "environment_failed", "episode_restarted"} == named <= set(EVENT_KINDS)


def test_a_quoted_first_line_of_a_run_has_its_verb() -> None:
    """As ``Recorder`` prints it: `start` at step 1 alone, `resume` after a checkpoint."""
    quoted = [
        (page.name, verb, int(step))
        for page in sorted((ROOT / "docs").glob("*.md"))
        for verb, step in re.findall(r"`(\w+) at step (\d+)", page.read_text())
    ]
    assert quoted
    assert [one for one in quoted if one[1] != ("start" if one[2] == 1 else "resume")] == []
