"""The audit of tools: each way in which a journal and the tools' own log may differ is found."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.audit import Exchange
from tests.support.faulty_tools import FAILURES, SHARES, fault_of
from tests.support.tool_accounts import check_steps, check_tools

Rows = list[dict[str, Any]]
Episodes = dict[str, list[Exchange]]
EOS = 0


class Letters:
    """A tokenizer: one token a letter."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return "".join(map(chr, ids))


def named(fault: str) -> str:
    """An episode whose first step has this fault, and whose second has none."""
    names = (f"{number}-0-0" for number in range(10**6))
    return next(name for name in names if (fault_of(name, 0), fault_of(name, 1)) == (fault, "none"))


def said(
    text: str = "", reason: str | None = None, failure: str | None = None, detail: str = ""
) -> dict[str, Any]:
    return {"text": text, "finish_reason": reason, "failure": failure, "detail": detail}


def story() -> tuple[Rows, Episodes]:
    """A tool that was asked twice, the first time again after a kill, and one that raised."""
    good, bad = named("none"), named("raise")
    asked = {"what": "asked", "episode": good, "replies": 0, "turn": "1+1", "fault": "none"}
    answered = {"what": "answered", "episode": good, "replies": 0, "said": "2"}
    end = {"what": "asked", "episode": good, "replies": 1, "turn": "two", "fault": "none"}
    ended = {"what": "answered", "episode": good, "replies": 1, "said": None}
    raised = {"what": "asked", "episode": bad, "replies": 0, "turn": "x", "fault": "raise"}
    outlived = {"what": "outlived", "episode": bad, "replies": 0}
    turns = [
        Exchange([*map(ord, "1+1"), EOS], said("2"), [*map(ord, "[2]")]),
        Exchange([*map(ord, "two"), EOS], said(reason="stop")),
    ]
    failed = Exchange([ord("x"), EOS], said(reason="failed", failure="raised"))
    rows = [asked, answered, asked, {**answered}, end, ended, raised, outlived]
    return rows, {good: turns, bad: [failed]}


def written(folder: Path, rows: Rows) -> Path:
    log = folder / "tools.log"
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return log


def test_a_true_story_is_counted(tmp_path: Path) -> None:
    rows, episodes = story()
    found = check_tools(written(tmp_path, rows), episodes, Letters())
    assert found == {
        "asked": 3,
        "asked again": 1,
        "answers in the journal": 3,
        "fault none": 2,
        "fault raise": 1,
        "failed raised": 1,
        "outlived their step": 1,
    }


@pytest.mark.parametrize(
    ("fault", "detail", "is_true"),
    [
        ("late", "signal SIGKILL", True),
        ("hang", "signal SIGKILL", True),
        ("late", "exit code 9", False),
        ("none", "signal SIGKILL", False),
    ],
)
def test_a_killed_worker_may_be_the_second_loss_of_a_step_out_of_time(
    tmp_path: Path, fault: str, detail: str, is_true: bool
) -> None:
    """It was out of time once already; a step without a fault is not lost by a kill."""
    name = named(fault)
    asked = {"what": "asked", "episode": name, "replies": 0, "turn": "1", "fault": fault}
    failed = Exchange([ord("1"), EOS], said(reason="failed", failure="died", detail=detail))
    log = written(tmp_path, [asked])
    if is_true:
        assert check_tools(log, {name: [failed]}, Letters())["failed died"] == 1
    else:
        with pytest.raises(AssertionError, match=f"is '{fault}', and the journal says 'died', '{detail}'"):
            check_tools(log, {name: [failed]}, Letters())


def put(fault: str, turn: int = 0, **fields: Any) -> Callable[[Rows, Episodes], None]:
    """An exchange of the episode with this fault has other ``fields``."""

    def mistake(_rows: Rows, episodes: Episodes) -> None:
        for name, value in fields.items():
            setattr(episodes[named(fault)][turn], name, value)

    return mistake


@pytest.mark.parametrize(
    ("mistake", "text"),
    [
        (lambda _, episodes: episodes.pop(named("none")), "was asked about a turn that is not on disk"),
        (put("none", turn_ids=[*map(ord, "9+1"), EOS]), r"was asked '1\+1'; on disk is '9\+1'"),
        (lambda rows, _: rows[3].update(said="3"), "the tool said '2', then '3'"),
        (lambda rows, _: rows.pop(5), "the journal has an answer that no tool gave"),
        (put("none", said=said("3")), "'3' is not '2'"),
        (put("none", given_ids=[*map(ord, "[3]")]), r"its tokens are '\[3\]'"),
        (
            put("none", said=said(reason="failed", failure="time")),
            "the fault of its tool is 'none', and the journal says 'time'",
        ),
        (put("raise", said=said("2")), "the fault of its tool is 'raise', and the journal says None"),
        (put("none", said=said(reason="stop")), "ended with 'stop', and the tool said '2'"),
    ],
)
def test_a_story_that_is_not_true_is_found(
    tmp_path: Path, mistake: Callable[[Rows, Episodes], object], text: str
) -> None:
    rows, episodes = story()
    mistake(rows, episodes)
    with pytest.raises(AssertionError, match=text):
        check_tools(written(tmp_path, rows), episodes, Letters())


@pytest.mark.parametrize(
    ("steps", "versions", "text"),
    [
        ([1, 3], [1, 2], r"steps \[1, 3\]"),
        ([1, 1], [1, 2], r"steps \[1, 1\]"),
        ([1, 2], [1, 1], r"versions \[1, 1\]"),
    ],
)
def test_a_step_that_is_missing_or_there_twice_is_found(
    tmp_path: Path, steps: list[int], versions: list[int], text: str
) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {one}}}\n' for one in steps))
    (tmp_path / "updates.jsonl").write_text("".join(f'{{"version": {one}}}\n' for one in versions))
    with pytest.raises(AssertionError, match=text):
        check_steps(tmp_path)


def test_faults_have_names_and_are_a_minority() -> None:
    assert SHARES.keys() >= FAILURES.keys()
    assert sum(SHARES.values()) < 0.5
    drawn = [fault_of(f"{number}-0-0", 0) for number in range(20_000)]
    assert abs(drawn.count("slow") / 20_000 - SHARES["slow"]) < 0.02
