"""Commands that a recipe names: their words, their limits, and what is left of them."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
import pytest

from bapo_megatron.runtime.child_process import UserCommand, command_words, missing_program

LIMIT_S = 120.0


def test_a_command_is_split_as_a_shell_does_it_and_nothing_is_expanded() -> None:
    assert command_words("hf upload 'my repo' {folder} --x=\"a b\"") == [
        *("hf", "upload", "my repo", "{folder}", "--x=a b")
    ]
    assert command_words("echo $HOME; rm *") == ["echo", "$HOME;", "rm", "*"]


@pytest.mark.parametrize(
    ("command", "problem"), [("", "it is empty"), ("  ", "it is empty"), ("a 'b", "quot")]
)
def test_a_command_without_words_is_refused(command: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        command_words(command)


def test_a_program_must_be_there(tmp_path: Path) -> None:
    script = tmp_path / "notify.sh"
    script.write_text("#!/bin/sh\n")
    assert missing_program("sh -c true") is None
    assert missing_program("no-such-program x") == "there is no program no-such-program on PATH"
    assert missing_program(f"{script} x") == f"{script} is no program that can be run (chmod +x?)"
    script.chmod(0o755)
    assert missing_program(f"{script} x") is None


def test_a_command_gets_its_input_and_its_variables_and_is_no_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_PORT", "1")
    log = tmp_path / "logs/x.log"
    command = UserCommand(
        ["sh", "-c", "cat; echo $BAPO_X ${RANK-none} ${MASTER_PORT-none}"], {"BAPO_X": "y z"}, log, b"given\n"
    )
    assert command.wait(LIMIT_S) == 0
    command.close()
    assert log.read_text() == "given\ny z none none\n"


def test_the_log_begins_anew_unless_it_is_appended_to(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    for append, text in ((False, "a\n"), (True, "a\na\n"), (False, "a\n")):
        command = UserCommand(["echo", "a"], {}, log, append=append)
        assert command.wait(LIMIT_S) == 0
        command.close()
        assert log.read_text() == text


def test_why_a_command_failed_is_its_end_and_its_last_line(tmp_path: Path) -> None:
    command = UserCommand(["sh", "-c", "echo no space >&2; echo; exit 3"], {}, tmp_path / "x.log")
    assert command.failure(command.wait(LIMIT_S), "1 h") == "exit code 3: no space"
    assert command.failure(None, "1 h") == "no end within 1 h: no space"
    command.close()
    killed = UserCommand(["sh", "-c", "kill -9 $$"], {}, tmp_path / "y.log")
    assert killed.failure(killed.wait(LIMIT_S), "") == "signal SIGKILL"
    killed.close()


def test_a_command_that_hangs_ends_with_all_that_it_started(tmp_path: Path) -> None:
    """Its child is in a session of its own, and has the pipe of nobody."""
    pids = tmp_path / "pids"
    script = f"setsid sh -c 'echo $$ >> {pids}; exec sleep 1000' & echo $$ >> {pids}; wait"
    command = UserCommand(["bash", "-c", script], {}, tmp_path / "x.log")
    deadline = time.monotonic() + LIMIT_S
    while not pids.exists() or len(pids.read_text().split()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert command.wait(0) is None
    command.close()
    for pid in map(int, pids.read_text().split()):
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_log_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "x.log").symlink_to(tmp_path / "precious")
    with pytest.raises(Exception, match="is a link"):
        UserCommand(["echo"], {}, tmp_path / "x.log")
    assert not os.path.lexists(tmp_path / "precious")
