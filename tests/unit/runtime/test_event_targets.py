"""The targets of `logging.on_event`: servers that are slow, dead and wrong; commands that fail and hang."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from bapo_megatron.runtime.event_targets import Refused, send, shown, target_problems, unreachable_targets
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


def test_a_url_gets_the_message_as_json_with_a_text(hook: Webhook, tmp_path: Path) -> None:
    send(hook.url, MESSAGE, tmp_path / "log", LONG_S)
    assert hook.messages == [MESSAGE]


@pytest.mark.parametrize("status", [302, 404, 500])
def test_a_status_that_is_no_success_is_a_refusal_without_the_url(
    status: int, hook: Webhook, tmp_path: Path
) -> None:
    hook.answer = status
    with pytest.raises(Refused, match=f"HTTP {status}") as refused:
        send(hook.url, MESSAGE, tmp_path / "log", LONG_S)
    assert "S3CRET" not in str(refused.value)


def test_a_server_that_answers_a_byte_at_a_time_hits_the_time_limit(hook: Webhook, tmp_path: Path) -> None:
    """It never exceeds the time limit of a socket."""
    hook.answer = "drip"
    with pytest.raises(Refused, match=r"no answer within 0\.5 s"):
        send(hook.url, MESSAGE, tmp_path / "log", 0.5)


def test_a_dead_server_is_a_failed_delivery(hook: Webhook, tmp_path: Path) -> None:
    hook.close()
    with pytest.raises(Refused, match="Connection refused"):
        send(hook.url, MESSAGE, tmp_path / "log", LONG_S)
    hook.__init__()  # type: ignore[misc]  # so that the fixture can close it


def test_an_error_that_repeats_the_url_is_redacted(tmp_path: Path) -> None:
    url = "http://127.0.0.1:1/S3CRET\x7f"
    with pytest.raises(Refused) as refused:
        send(url, MESSAGE, tmp_path / "log", LONG_S)
    assert "S3CRET" not in str(refused.value)


def test_a_command_gets_the_message_on_standard_input_and_in_variables(tmp_path: Path) -> None:
    log = tmp_path / "log"
    send("sh -c 'cat; echo; echo $BAPO_EVENT, $BAPO_EVENT_TEXT, $BAPO_RUN_DIR'", MESSAGE, log, LONG_S)
    first, second = log.read_text().splitlines()
    assert json.loads(first) == MESSAGE
    assert second == "done, run: done (step 3), /runs/run"


def test_a_text_of_an_event_is_no_shell_code(tmp_path: Path) -> None:
    message = {**MESSAGE, "text": "$(touch hacked); `touch hacked`"}
    send("echo", message, tmp_path / "log", LONG_S)
    send("""sh -c 'echo "$BAPO_EVENT_TEXT"'""", message, tmp_path / "log", LONG_S)
    assert (tmp_path / "log").read_text() == "\n$(touch hacked); `touch hacked`\n"


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


def test_the_form_of_a_target_is_checked_without_its_secret() -> None:
    assert not list(target_problems(["https://hooks.slack.com/services/a", "$HOOK", "${HOOK}", "notify -x"]))
    problems = list(target_problems(["https:///x", "https://h:port/S3CRET", "http://h/S3 CRET", "", "a 'b"]))
    assert [problem.split("=")[1].split(":")[0] for problem in problems] == [
        *("https", "https", "http", "''", '"a \'b"')
    ]
    assert "S3CRET" not in "".join(problems)
    assert all("give a command, a URL, or $NAME" in problem for problem in problems)


def test_what_a_target_needs_is_checked_where_the_run_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOK", "hooks.example.com/S3CRET")
    problems = list(
        unreachable_targets(["$NO_SUCH_HOOK", "no-such-program x", "sh x", "http://h/x", "$HOOK"])
    )
    assert [problem.split(": ")[0] for problem in problems] == [
        "logging.on_event=$NO_SUCH_HOOK",
        "logging.on_event='no-such-program x'",
        "logging.on_event=$HOOK",
    ]
    assert "that variable is not set; export it" in problems[0]
    assert "no program no-such-program on PATH; install it" in problems[1]
    assert "S3CRET" not in problems[2]


def test_a_target_is_named_by_its_host() -> None:
    assert shown("https://hooks.slack.com/services/T/B/S3CRET") == "https://hooks.slack.com/..."
    assert shown("https://user:S3CRET@h:80?S3CRET") == "https://h:80/..."
    assert shown("$HOOK") == "'$HOOK'"
