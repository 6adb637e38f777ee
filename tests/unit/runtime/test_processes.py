"""Processes that end with their parent, whatever they do, however it ends; commands that a recipe names."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from bapo_megatron.runtime import child_process, processes
from bapo_megatron.runtime.child_process import (
    AnsweringChild,
    ChildDied,
    ChildProcess,
    ChildTimeout,
    NoAnswer,
    UserCommand,
    with_import_path,
    within,
)
from tests.support.waiting import is_alive, until

ROOT = Path(__file__).parents[3]


STUBBORN = """
import os, signal, subprocess, sys, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
own = subprocess.Popen(["sleep", "1000"], start_new_session=True)  # as a helper in a session of its own
left = subprocess.run(["sh", "-c", "setsid sleep 1000 > /dev/null & echo $!"], stdout=subprocess.PIPE)
print(os.getpid(), own.pid, int(left.stdout), flush=True)
time.sleep(1000)
"""
"""A server that does not end when asked, with a child in another session and an orphan."""

HOLDS = """
import os, re, signal, sys
from bapo_megatron.runtime.processes import die_with_parent
die_with_parent(int(sys.argv[-1]))
child = os.fork()
if child:
    print(os.getpid(), child, flush=True)
re.fullmatch("(1+)+", "1" * 50 + "x")  # C code that holds the interpreter, in both
"""
"""A program of ours with a child in its process group."""

PARENT = """
import os, subprocess, sys, threading, time
from bapo_megatron.runtime.child_process import ChildProcess, with_import_path
def start():
    command = [sys.executable, "-c", sys.argv[2]]
    child = ChildProcess(command, with_import_path(os.environ), guarded=sys.argv[1] == "guarded")
    globals().update(kept=child)
thread = threading.Thread(target=start)
thread.start()
thread.join()
time.sleep(1000)
"""
"""Starts a child from a thread, which then ends."""


@contextmanager
def parent_of(code: str, kind: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A parent that a thread of has started ``code``, and the processes that this names."""
    command = [sys.executable, "-c", PARENT, kind, code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as parent:
        assert parent.stdout is not None
        named = [int(word) for word in parent.stdout.readline().split()]
        try:
            yield parent, named
        finally:
            parent.kill()
            for pid in named:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(("kind", "code", "count"), [("guarded", STUBBORN, 3), ("own", HOLDS, 2)])
def test_all_that_a_child_started_ends_with_the_parent_and_not_with_a_thread(
    kind: str, code: str, count: int
) -> None:
    with parent_of(code, kind) as (parent, named):
        assert len(named) == count
        time.sleep(0.5)  # the thread has ended: nothing is to happen
        assert all(map(is_alive, named))
        parent.kill()
        until(lambda: not any(map(is_alive, named)))


def test_all_that_a_guarded_child_started_ends_with_it() -> None:
    with parent_of(STUBBORN, "guarded") as (parent, named):
        os.kill(named[0], signal.SIGKILL)  # as the kernel does where memory is short
        until(lambda: not any(map(is_alive, named)))
        assert parent.poll() is None


def test_a_guarded_child_ends_with_its_guardian() -> None:
    with parent_of(STUBBORN, "guarded") as (_, named):
        guardian = psutil.Process(named[0]).ppid()
        assert guardian not in (1, os.getpid())
        os.kill(guardian, signal.SIGKILL)
        until(lambda: not is_alive(named[0]))
        assert not is_alive(named[0])


def started(code: str) -> tuple[ChildProcess, list[int]]:
    child = ChildProcess([sys.executable, "-c", code], os.environ, guarded=True, stdout=subprocess.PIPE)
    assert child.process.stdout is not None
    return child, [int(word) for word in child.process.stdout.readline().split()]


def test_a_guarded_child_that_is_stopped_with_its_guardian_is_ended() -> None:
    child, named = started(STUBBORN)
    os.killpg(child.pid, signal.SIGSTOP)
    child.close()
    assert not any(map(is_alive, named))
    with pytest.raises(ProcessLookupError):
        os.killpg(child.pid, 0)
    child.close()  # a second time does nothing


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import sys; sys.exit(7)", 7),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
    ],
)
def test_the_guardian_ends_as_its_child_did(code: str, expected: int) -> None:
    child = ChildProcess([sys.executable, "-c", code], os.environ, guarded=True)
    assert child.wait_end(60) == expected
    child.close()
    assert child.process.returncode == expected


def test_a_guarded_child_hears_what_its_group_is_told() -> None:
    """It has the default dispositions, and saves in its own way; the guardian waits for it."""
    code = (
        "import os, signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n"
        "assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL\n"
        "assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])\nprint(1, flush=True)\ntime.sleep(1000)"
    )
    child, _ = started(code)
    os.killpg(child.pid, signal.SIGTERM)
    assert child.wait_end(60) == 5
    child.close()


def test_a_fork_ends_with_its_parent() -> None:
    code = (
        "import os, time\nfrom bapo_megatron.runtime.processes import die_with_parent\nparent = os.getpid()\n"
        "if os.fork() == 0:\n    die_with_parent(parent=parent)\n    print(os.getpid(), flush=True)\n"
        "time.sleep(1000)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT) as parent:
        assert parent.stdout is not None
        fork = int(parent.stdout.readline())
        assert is_alive(fork)
        parent.kill()
    until(lambda: not is_alive(fork))


def test_a_parent_that_died_before_the_setup_is_noticed() -> None:
    code = "from bapo_megatron.runtime.processes import die_with_parent\ndie_with_parent(parent=1 << 22)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL
    reading, writing = os.pipe()
    os.close(writing)
    code = code.replace("parent=1 << 22", str(reading))
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, pass_fds=[reading], start_new_session=True, check=False
    )
    os.close(reading)
    assert done.returncode == -signal.SIGKILL


ANSWERS = """
import json, os, sys, time
from bapo_megatron.runtime.processes import die_with_parent
die_with_parent(int(sys.argv[-1]))
for line in sys.stdin:
    question = json.loads(line)
    if question == "die":
        os._exit(3)
    time.sleep(1000 if question == "wait" else 0)
    odd = {'"babble"': "no", '"nest"': 100_000 * "["}
    print(odd.get(line.strip(), json.dumps([question])), flush=True)
"""


@pytest.fixture
def child() -> Iterator[AnsweringChild]:
    made = AnsweringChild([sys.executable, "-c", ANSWERS], with_import_path(os.environ))
    yield made
    made.close()


def test_requests_and_replies(child: AnsweringChild) -> None:
    assert child.ask({"x": "1" * 300_000}, 60) == [{"x": "1" * 300_000}]  # more than a pipe takes
    with pytest.raises(ChildTimeout):
        child.ask("wait", 0.1)


def test_a_child_that_cannot_answer_says_how_it_ended(child: AnsweringChild) -> None:
    for question in ("babble", "nest"):
        with pytest.raises(ChildDied, match="answered no JSON"):
            child.ask(question, 60)
    with pytest.raises(ChildDied, match="exit code 3"):
        child.ask("die", 60)


def test_a_child_that_another_thread_kills(child: AnsweringChild) -> None:
    killer = threading.Timer(0.3, child.kill)
    killer.start()
    with pytest.raises(ChildDied, match="signal SIGKILL"):
        child.ask("wait", 60)
    killer.join()


def test_an_unkillable_child_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that waits for a disk heeds no signal; here none is sent."""
    monkeypatch.setattr(child_process, "_UNKILLABLE_S", 0.2)
    monkeypatch.setattr(processes, "descendants", lambda _pid: [])
    deaf = ChildProcess(["sleep", "1000"], os.environ, guarded=True)
    with monkeypatch.context() as patch:
        patch.setattr(os, "killpg", lambda *_: None)
        deaf.close()
    deaf.process.wait(60)  # its lifeline is closed: the guardian, which can, has ended it


def test_work_that_is_not_done_in_time_is_left_behind() -> None:
    before = set(psutil.Process().children())
    assert within(60, lambda: {"a": 1}) == {"a": 1}
    with pytest.raises(NoAnswer, match=r"no answer within 0\.1 s"):
        within(0.1, lambda: time.sleep(1000))
    with pytest.raises(ChildDied, match="SIGKILL"):
        within(60, lambda: os.kill(os.getpid(), signal.SIGKILL))
    assert set(psutil.Process().children()) <= before  # no zombie: a webhook may hang for days


def test_a_command_gets_its_input_and_its_variables_and_is_no_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = with_import_path({**os.environ, "RANK": "0", "MASTER_PORT": "1", "PYTHONPATH": "/users"})
    monkeypatch.setattr(os, "environ", ours)
    log = tmp_path / "logs/x.log"
    words, text = (
        ["sh", "-c", "cat; echo $BAPO_X ${RANK-none}${MASTER_PORT-} $PYTHONPATH"],
        "given\ny z none /users\n",
    )
    for append, times in ((False, 1), (True, 2), (False, 1)):  # the log begins anew, or is appended to
        command = UserCommand(words, {"BAPO_X": "y z"}, log, b"given\n", append=append)
        assert command.wait(120) == 0
        command.close()
        assert log.read_text() == times * text
