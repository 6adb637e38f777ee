"""Targets of `logging.on_event`, slow, dead and wrong ones too; and the kinds of events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from bapo_megatron.runtime.event_kinds import (
    MOST_TEXT,
    NEWS,
    NOT_SENT,
    TROUBLE,
    is_sent,
    is_trouble,
    sent_text,
)
from bapo_megatron.runtime.event_targets import Refused, send, shown, target_problems
from tests.support.event_kinds import written_kinds
from tests.support.webhook import Webhook

LONG_S = 120.0
MESSAGE = {
    "text": "run: done (step 3)",
    "run": "run",
    "run_dir": "/runs/run",
    "count": 1,
    "event": {"kind": "done", "step": 3},
}


@pytest.fixture
def hook() -> Iterator[Webhook]:
    hook = Webhook()
    yield hook
    hook.close()


@pytest.mark.parametrize("end", ["", "\x7f"])
def test_an_error_that_repeats_the_url_is_redacted(end: str, tmp_path: Path) -> None:
    with pytest.raises(Refused) as refused:
        send(f"http://127.0.0.1:1/S3CRET{end}", MESSAGE, tmp_path / "log", LONG_S)
    assert end or "Connection refused" in str(refused.value)
    assert "S3CRET" not in str(refused.value)


def test_a_command_gets_the_message_on_standard_input_and_in_variables(tmp_path: Path) -> None:
    log = tmp_path / "log"
    send("sh -c 'cat; echo; echo $BAPO_EVENT, $BAPO_EVENT_TEXT, $BAPO_RUN_DIR'", MESSAGE, log, LONG_S)
    first, second = log.read_text().splitlines()
    assert json.loads(first) == MESSAGE
    assert second == "done, run: done (step 3), /runs/run"


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("sh -c 'echo no token; exit 7'", "exit code 7: no token"),
        ("sleep 1000", r"no end within 0\.5 s"),
        ("no-such-program", "it cannot be started: .*No such file"),
    ],
)
def test_a_command_that_fails_is_a_refusal(command: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(Refused, match=reason):
        send(command, MESSAGE, tmp_path / "log", 0.5 if "sleep" in command else LONG_S)


def test_a_variable_may_hold_a_url_or_a_command(
    hook: Webhook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOK", f" {hook.url}\n")
    send("$HOOK", MESSAGE, tmp_path / "log", LONG_S)
    send("${HOOK}", MESSAGE, tmp_path / "log", LONG_S)
    assert len(hook.messages) == 2
    monkeypatch.setenv("HOOK", "echo sent")
    send("$HOOK", MESSAGE, tmp_path / "log", LONG_S)
    assert (tmp_path / "log").read_text() == "sent\n"
    monkeypatch.delenv("HOOK")
    with pytest.raises(Refused, match=r"\$HOOK is not set"):
        send("$HOOK", MESSAGE, tmp_path / "log", LONG_S)


def test_the_form_of_a_target_is_checked_without_its_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOK", "https://hooks.slack.com/services/b")
    assert not list(target_problems(["https://hooks.slack.com/services/a", "$HOOK", "${HOOK}", "true -x"]))
    problems = list(target_problems(["https:///x", "http://h/S3 CRET", "", "a 'b"]))
    assert [problem.split("=")[1].split(":")[0] for problem in problems] == [
        *("https", "http", "''", '"a \'b"')
    ]
    assert "S3CRET" not in "".join(problems)
    assert all("give a command, a URL, or an exported $NAME" in problem for problem in problems)


def test_what_a_target_needs_is_checked_where_the_run_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOK", "hooks.example.com/S3CRET")
    assert not list(target_problems(["sh x", "http://h/x"]))
    for target, why in (
        ("$NO_SUCH_HOOK", "that variable is not set"),
        ("no-such-program x", "there is no program no-such-program"),
        ("$HOOK", "its value is neither a URL"),
    ):
        [problem] = target_problems([target])
        assert problem.startswith(f"logging.on_event={target!r}: {why}")
        assert "S3CRET" not in problem


def test_a_target_is_named_by_its_host() -> None:
    assert shown("https://hooks.slack.com/services/T/B/S3CRET") == "https://hooks.slack.com/..."
    assert shown("https://user:S3CRET@h:80?S3CRET") == "https://h:80/..."
    assert shown("$HOOK") == "'$HOOK'"


def test_every_kind_that_is_shown_or_sent_is_written_under_its_name() -> None:
    """One that is written under another name would neither be shown nor sent."""
    assert {*TROUBLE, *NEWS, NOT_SENT} <= set(written_kinds())
    assert not TROUBLE & {*NEWS, NOT_SENT}


def test_what_is_sent_is_trouble_or_news_and_never_the_failure_to_send() -> None:
    """An event about a target that is dead, sent to that target, would make another such event."""
    assert is_trouble({"kind": "on_event_failed"})
    assert is_sent({"kind": "done"})
    assert not any(map(is_sent, [{"kind": "on_event_failed"}, {"kind": "saving"}, {"kind": "new one"}, {}]))


def test_the_text_of_an_event_is_one_short_printable_line() -> None:
    event = {"kind": "engine_lost", "engine": "http://n7:1", "reason": "gone\nfor  good \x1b[2J", "step": 3}
    told = r"run: engine lost: gone for good \x1b[2J: http://n7:1 (step 3) [4 of them]"
    assert sent_text("run", event, 4) == told
    assert len(sent_text("run", {"kind": "failed", "reason": "x" * 5000}, 1)) == MOST_TEXT
