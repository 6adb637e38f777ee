"""Time of tested programs: what counts against their limits, and what is a failure of the judge instead."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

import pytest

from bapo_megatron.reward.sandbox import sandbox as sandbox_module
from bapo_megatron.reward.sandbox.sandbox import Sandbox, SandboxError, _children_of

pytestmark = pytest.mark.integration

BUSY = "import time\nwhile time.process_time() < 0.4: pass\nprint(7)"
ENDLESS = "while True: pass"


@contextmanager
def beside(sandbox: Sandbox, act: Callable[[int, int], None]) -> Iterator[None]:
    """Call ``act`` with the process ids of the sandbox's server and of its case, once there is one."""

    def look() -> None:
        while True:
            try:
                [server] = _children_of(sandbox._child.pid)
                [case] = _children_of(server)
                return act(server, case)
            except (OSError, ValueError):
                time.sleep(0.001)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def test_a_paused_program_is_not_slow() -> None:
    """As one that waits for a processor: the clock passes its limit of a second, its own time does not."""

    def pause(_: int, case: int) -> None:
        os.kill(case, signal.SIGSTOP)
        time.sleep(1.5)
        os.kill(case, signal.SIGCONT)

    with Sandbox(BUSY, "", 512, 1.0) as sandbox, beside(sandbox, pause):
        ended = sandbox.run("", 1.0)
    assert ended is not None
    assert ended.output == "7\n"
    assert 0.3 < ended.time_s == sandbox.used_s < 1.0


def test_a_program_that_never_had_a_processor_was_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    with Sandbox(BUSY, "", 512, 1.0) as sandbox:
        monkeypatch.setattr(sandbox_module, "START_LIMIT_S", 0.0)
        monkeypatch.setattr(sandbox_module, "CLOCK_FACTOR", 2)
        said = r"nothing is known .* in 2 s this machine gave it 0.* s of .* 1 s.*; lower reward"
        stop = beside(sandbox, lambda _, case: os.kill(case, signal.SIGSTOP))
        with stop, pytest.raises(SandboxError, match=said):
            sandbox.run("", 1.0)


def test_a_program_that_proc_does_not_show_is_not_judged_by_its_sleep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where /proc is mounted with hidepid=2: it is neither wrong, nor does it wait for ever."""

    def hidden(_pid: int) -> list[int]:
        raise FileNotFoundError

    monkeypatch.setattr(sandbox_module, "_children_of", hidden)
    monkeypatch.setattr(sandbox_module, "CLOCK_FACTOR", 2)
    with Sandbox("import time; time.sleep(1000)", "", 512, 1.0) as sandbox:
        monkeypatch.setattr(sandbox_module, "START_LIMIT_S", 0.0)
        with pytest.raises(SandboxError, match=r"nothing is known .*hidepid"):
            sandbox.run("", 1.0)


def test_a_sandbox_that_is_killed_has_not_judged() -> None:
    with (
        Sandbox(ENDLESS, "", 512, 100.0) as sandbox,
        beside(sandbox, lambda server, _: os.kill(server, signal.SIGKILL)),
        pytest.raises(SandboxError, match="the sandbox was killed while a program ran"),
    ):
        sandbox.run("", 100.0)


@pytest.mark.parametrize(
    "source",
    [
        "import time; time.sleep(1000)",
        "import threading\nlock = threading.Lock()\nlock.acquire()\nlock.acquire()",
        "import threading\n[threading.Thread(target=threading.Event().wait).start() for _ in range(9)]",
        ENDLESS,
        "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass",
        "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (1, 1))\nwhile True: pass",
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
    ],
)
def test_sleep_and_processor_time_are_the_programs_own(source: str) -> None:
    """So waiting is not a way out of a verdict."""
    with Sandbox(source, "", 512, 1.0) as sandbox:
        ended = sandbox.run("", 1.0)
    assert ended is None or ended.code == -signal.SIGKILL


@pytest.mark.parametrize("kills", [count(), iter([5, 5])], ids=["short of memory", "killed otherwise"])
def test_a_program_that_the_machine_kills_for_memory_was_not_judged(
    monkeypatch: pytest.MonkeyPatch, kills: Iterator[int]
) -> None:
    """One that is killed without such a kill has had its time, or has done it itself: it is wrong."""
    assert isinstance(sandbox_module._out_of_memory_kills(), int)  # the kernel's count
    monkeypatch.setattr(sandbox_module, "_out_of_memory_kills", lambda: next(kills))
    with (
        Sandbox(ENDLESS, "", 512, 100.0) as sandbox,
        beside(sandbox, lambda _, case: os.kill(case, signal.SIGKILL)),
    ):
        if isinstance(kills, count):
            with pytest.raises(SandboxError, match="out of memory; lower reward.workers"):
                sandbox.run("", 100.0)
        else:
            ended = sandbox.run("", 100.0)
            assert ended is not None
            assert ended.code == -signal.SIGKILL
