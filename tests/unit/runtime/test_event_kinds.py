"""The table of event kinds, held to what the package and the job's shell write."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bapo_megatron.runtime.event_kinds import (
    BEGINNINGS,
    ENDS,
    EVENT_KINDS,
    MOST_TEXT,
    event_text,
    is_sent,
    is_trouble,
    sent_text,
)

ROOT = Path(__file__).parents[3]
WRITERS = "_stop_signals|_?event|_?report(?:_problem)?|_tell(?:_of)?|_note|_announced|warning"
WRITTEN = re.compile(rf'(?:"kind":\s*|\bevent(?:: str)?\s?=\s?|\b(?:{WRITERS})\(\s*)"(\w+)"')


def python_kinds() -> set[str]:
    folders = [
        ROOT / "bapo_megatron" / name for name in ("trainer", "rollout", "checkpoint", "reward", "runtime")
    ]
    texts = [path.read_text() for folder in folders for path in folder.rglob("*.py")]
    return {kind for text in texts for kind in WRITTEN.findall(text)}


def shell_kinds() -> set[str]:
    texts = [path.read_text() for path in (*(ROOT / "slurm/lib").glob("*.sh"), ROOT / "slurm/task.sh")]
    return {kind for text in texts for kind in re.findall(r"\bbapo_event (\w+) \"", text)}


def test_every_kind_that_is_written_is_in_the_table_and_the_other_way_round() -> None:
    found = python_kinds() | shell_kinds()
    assert {
        "engine_lost",
        "job_requeue",
        "stalled",
        "threads_kept",
        "reward_failed",
        "after_export_failed",
    } <= found
    # Written under a name that is computed: by ends of a run, the beginning of a journal, helper jobs.
    computed = {*ENDS, *BEGINNINGS, "server_hangs", "convert_done", "evaluate_done"}
    computed |= {"journal_missing", "fork_position"}
    assert set(EVENT_KINDS) - found <= computed
    assert found <= set(EVENT_KINDS)


def test_what_is_sent_is_trouble_or_news_and_never_the_failure_to_send() -> None:
    """An event about a target that is dead, sent to that target, would make another such event."""
    assert not is_sent({"kind": "on_event_failed"})
    assert is_trouble({"kind": "on_event_failed"})
    for kind in (
        "stalled",
        "job_requeue",
        "engine_gap",
        "engine_lost",
        "done",
        "failed",
        "preempted",
        "resume",
    ):
        assert is_sent({"kind": kind}), kind
    for kind in ("checkpoint", "engine_ready", "saving", "after_export_done", "new one"):
        assert not is_sent({"kind": kind})
        assert not is_trouble({"kind": kind})
    assert not is_sent({})


def test_the_text_of_an_event_is_one_short_printable_line() -> None:
    event = {"kind": "engine_lost", "engine": "http://n7:1", "reason": "gone\nfor  good", "step": 3}
    assert event_text(event) == "engine lost: gone for good: http://n7:1"
    assert sent_text("run", event, 1) == "run: engine lost: gone for good: http://n7:1 (step 3)"
    assert sent_text("run", event, 4).endswith("(step 3) [4 of them]")
    assert len(sent_text("run", {"kind": "failed", "reason": "x" * 5000}, 1)) == MOST_TEXT
    assert "\x1b" not in sent_text("run", {"kind": "failed", "reason": "\x1b[2J"}, 1)


@pytest.mark.parametrize("kind", ["export_failed", "job_stopped", "after_export_failed", "sampler_died"])
def test_trouble_is_sent_too(kind: str) -> None:
    assert is_trouble({"kind": kind})
    assert is_sent({"kind": kind})
