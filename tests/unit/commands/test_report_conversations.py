"""The report's three episodes as conversations: which, what of them, escaped, what stands in their place."""

from __future__ import annotations

import html
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from bapo_megatron.commands.report.conversations import MOST_TOKENS, conversations
from bapo_megatron.commands.report.data import MetricTable, RunRecord
from bapo_megatron.commands.report.page import write_report
from bapo_megatron.rollout.sampler.step_batches import step_path, write_step
from bapo_megatron.types import GIVEN, FinishReason, Group, Prompt, Rollout, StepBatch
from tests.support.pages import ROOT
from tests.unit.commands.test_report import (
    check_harmless,
    few_pictures,
    make_hostile,
    write_config,
    write_lines,
)

__all__ = ["few_pictures"]

MODEL = ROOT / "recipes/demo/policy_tools"
TOKENIZER = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
FRAME = "\n<|im_start|>tool\n{}<|im_end|>\n<|im_start|>assistant\n"
SCRIPT = "<script>alert(1)</script>{{7*7}}"


def ids(text: str) -> np.ndarray:
    return np.array(TOKENIZER.encode(text).ids, np.int32)


def rollout(*turns: str, reward: float = 1.0, reason: FinishReason = "stop") -> Rollout:
    """A response of turns, sampled and given by turns."""
    parts = [ids(turn) for turn in turns]
    mask_R = np.concatenate([np.full(len(part), place % 2 == 0) for place, part in enumerate(parts)])
    tokens_R, versions_R = np.concatenate(parts), np.where(mask_R, 0, GIVEN).astype(np.int32)
    columns = (tokens_R, np.zeros(len(mask_R), np.float32), versions_R)
    return Rollout(*columns, loss_mask_R=mask_R, finish_reason=reason, reward=reward)


def asked(value: str = "935") -> Rollout:
    return rollout("755+180<|im_end|>", FRAME.format(value), "\\boxed{935}<|im_end|>")


def write_run(folder: Path, steps: dict[int, Rollout], prompt: str = "755+180=") -> RunRecord:
    for step, found in steps.items():
        other = rollout("I guess 9<|im_end|>", reward=0.0)  # was given nothing
        group = Group(Prompt(0, ids(prompt), "935", "sums"), (other, found))
        write_step(folder / "journal", step, StepBatch((group,), {}))
    return RunRecord(folder, MetricTable([{"step": 1.0}]), MetricTable([]), [], {"model.hf_path": str(MODEL)})


def texts(run: RunRecord) -> list[list[tuple[str, str]]]:
    """Speaker and whole text of each block of each conversation."""
    return [
        [(block.speaker, "".join(text for text, _ in block.pieces)) for block in one.blocks]
        for one in conversations(run)
    ]


def test_an_episode_by_hand(tmp_path: Path) -> None:
    """Prompt, sampled turns and given ones with their frames, special tokens apart, reward, end."""
    [found] = conversations(write_run(tmp_path, {4: asked()}))
    assert found.is_short
    tokens, given = len(asked().token_ids_R), len(ids(FRAME.format("935")))
    counts = f"2 turns, {tokens} tokens, {given} of them given"
    assert found.title == f"Step 4: reward 1.000, {counts}, ended by the environment"
    start, end = ("<|im_start|>", True), ("<|im_end|>", True)
    frame = [("\n", False), start, ("tool\n935", False), end, ("\n", False), start, ("assistant\n", False)]
    assert [(block.speaker, block.pieces) for block in found.blocks] == [
        ("prompt", [("755+180=", False)]),
        ("model", [("755+180", False), end]),
        ("environment", frame),
        ("model", [("\\boxed{935}", False), end]),
    ]


def test_how_an_episode_ended(tmp_path: Path) -> None:
    """A response of a source without an environment ended by itself."""
    [found] = conversations(write_run(tmp_path / "cut", {1: rollout("1", FRAME, reason="turns")}))
    assert found.title.endswith("ended after the most turns")
    [found] = conversations(write_run(tmp_path / "whole", {1: rollout("9<|im_end|>")}))
    assert found.title.endswith("0 of them given, ended by a stop token")


def test_the_first_the_middle_and_the_last_step_are_read_and_no_other(tmp_path: Path) -> None:
    """Files of all other steps could not be read; a short run has fewer episodes."""
    run = write_run(tmp_path, {step: asked(str(step)) for step in range(10, 21)})
    for step in set(range(10, 21)) - {10, 15, 20}:
        step_path(tmp_path / "journal", step).write_bytes(b"")
    found = texts(run)
    assert [[text for who, text in one if who == "environment"] for one in found] == [
        [FRAME.format(step)] for step in (10, 15, 20)
    ]
    assert len(conversations(write_run(tmp_path / "short", {1: asked(), 2: asked()}))) == 2


def test_a_long_block_is_cut_in_its_middle(tmp_path: Path) -> None:
    run = write_run(tmp_path, {1: rollout("ab" * MOST_TOKENS, FRAME, "c")})
    [found] = conversations(run)
    pieces = found.blocks[1].pieces
    half = "ab" * (MOST_TOKENS // 4)
    assert pieces == [(half, False), (f" … {MOST_TOKENS:,} tokens … ", True), (half, False)]
    assert not found.is_short


def test_what_stands_in_the_place_of_episodes(tmp_path: Path) -> None:
    """A damaged file costs its own episode."""
    run = write_run(tmp_path, {})
    [found] = conversations(run)
    assert found.title == "No episode is stored"
    assert f"{tmp_path}/journal has no step" in found.problem
    run.config["model.hf_path"] = str(tmp_path / "absent")
    [found] = conversations(run)
    assert found.title == "No episode can be shown as text"
    for folder in ("absent", "export"):
        assert f"{tmp_path}/{folder}/tokenizer.json does not exist" in found.problem
    (tmp_path / "export").symlink_to(MODEL)
    write_run(tmp_path, {step: asked() for step in (1, 2, 3)})
    step_path(tmp_path / "journal", 2).write_bytes(b"PK")
    first, second, third = conversations(run)
    assert (second.title, second.blocks) == ("Step 2", [])
    assert "the record of step 2 is damaged" in second.problem
    assert first.blocks
    assert third.blocks


def episode_row(step: int, **more: float) -> dict[str, Any]:
    ends = {f"environment/finish_{name}": 0.25 for name in ("stop", "length", "turns", "failed")}
    return {"step": step, "reward/mean": 0.5, "environment/turns_mean": 2.0, **ends, **more}


@pytest.mark.usefixtures("few_pictures")
def test_a_conversation_on_the_page_is_text(tmp_path: Path) -> None:
    """Markup of prompt, model and tool is escaped; the whole text is there, in its order."""
    make_hostile(tmp_path)
    write_run(tmp_path, {1: rollout(f"{SCRIPT}<|im_end|>", FRAME.format(SCRIPT), "</pre></div>")}, SCRIPT)
    write_config(tmp_path, {"name": SCRIPT, "model.hf_path": str(MODEL)})
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    write_lines(tmp_path / "metrics.jsonl", [{**row, **episode_row(row["step"])} for row in rows])
    page = write_report([tmp_path]).read_text()
    check_harmless(page)
    end, shown = f"<i>{html.escape('<|im_end|>')}</i>", html.escape(SCRIPT)
    turns = [page.index(f"<pre>{shown}</pre>"), page.index(f"<pre>{shown}{end}</pre>")]
    turns.append(page.index("<pre>&lt;/pre&gt;&lt;/div&gt;</pre>"))
    assert turns == sorted(turns)
    assert page.count('<div class="block model">') == 2
    titles = "Configuration, Curves, By staleness, Three episodes, Events, Values"
    assert ", ".join(re.findall("<h2>(.*?)</h2>", page)) == titles


@pytest.mark.usefixtures("few_pictures")
def test_plots_of_episodes(tmp_path: Path) -> None:
    """A plot has the curves that were measured; without an environment no journal is opened."""
    rows = [episode_row(1), episode_row(2, **{"episode/calls": 1.5})]
    for more, drawn in (
        ({"environment/reward_turn_x": 0.5}, False),
        ({"environment/reward_turn_2": 0.5}, True),
    ):
        write_lines(tmp_path / "metrics.jsonl", [*rows, episode_row(3, **more)])
        page = write_report([tmp_path]).read_text()
        titles = ("Turns of an episode", "How episodes end", "Reward by answer")
        assert [f'alt="{title} by step"' in page for title in titles] == [True, True, drawn]
    assert page.index("<summary>All") < page.index("<code>episode/<wbr>calls</code>")
    assert conversations(write_run(tmp_path, {1: asked()}))[0].blocks
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1, "reward/mean": 0.5}])
    page = write_report([tmp_path]).read_text()
    assert 'class="block' not in page
    assert "episodes</h2>" not in page


def test_branches_are_a_tree(tmp_path: Path) -> None:
    """A second conversation from the first turn, without what it shares, and one with a prompt of its own,
    which an unfinished one begins with: that has no tokens of its own."""
    first = asked()
    other = rollout("755+180<|im_end|>", FRAME.format("7"), "7<|im_end|>", reward=0.5)
    own = rollout("", "1+1=", "2<|im_end|>", reward=0.5)
    part = replace(rollout("", "1+1="), branch=3, has_prompt=False)
    branches = (first, replace(own, branch=1, has_prompt=False), replace(other, branch=2), part)
    group = Group(Prompt(0, ids("755+180="), "935", "sums"), branches)
    run = write_run(tmp_path, {1: first})
    write_step(tmp_path / "journal", 1, StepBatch((group,), {}))
    found = conversations(run)
    names = ("1 of 4", "3 of 4, behind ", "2 of 4", "4 of 4, behind ")
    assert all(f"Step 1, branch {name}" in one.title for one, name in zip(found, names, strict=True))
    assert [one.depth for one in found] == [0, 1, 0, 1]
    said = ["".join(text for block in one.blocks for text, _ in block.pieces) for one in found]
    assert said[1].endswith("7<|im_end|>\n<|im_start|>assistant\n7<|im_end|>")
    assert "755" not in said[1], "what it shares is shown once"
    assert said[2] == "1+1=2<|im_end|>"
    assert [[block.speaker for block in one.blocks] for one in found[1:]] == [
        ["environment", "model"],
        ["prompt", "model"],
        [],
    ]
