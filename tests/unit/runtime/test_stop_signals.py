"""Signals that ask a run to stop, from its first moment on."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from bapo_megatron.runtime.stop_signals import SIGNALS, handling
from tests.support.processes import heed_signals

STARTING = """
import os, signal, sys
from bapo_megatron.runtime.stop_signals import handling, stop_at_once
with handling(stop_at_once):
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))
"""

HUNG_UP = """
import os, time
from bapo_megatron.runtime.stop_signals import handling
told = []
with handling(lambda number, frame: told.append(number)):
    os.write(int(os.environ["READY"]), b"r")
    while not told:
        time.sleep(0.01)
    print("a line for a terminal that is gone", flush=True)
    os.write(int(os.environ["READY"]), b"d")
"""


@pytest.mark.parametrize("name", [number.name for number in SIGNALS])
def test_a_command_that_is_told_to_stop_before_it_has_begun_ends_with_85(name: str) -> None:
    command = [sys.executable, "-c", STARTING, name]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=heed_signals)
    assert done.returncode == 85, done.stderr
    assert f"told to stop by {name} before the run began" in done.stderr


@pytest.mark.parametrize("opened", [pty.openpty, os.pipe])
def test_output_to_a_hung_up_terminal_raises_nothing(opened: Callable[[], tuple[int, int]]) -> None:
    """A terminal that is closed; a pipe to ``tee``, which ends with it: ``bapo train ... | tee log``."""
    reading, writing = os.pipe()
    outer, inner = opened()
    process = subprocess.Popen(
        [sys.executable, "-c", HUNG_UP],
        stdout=inner,
        stderr=inner,
        pass_fds=[writing],
        env={**os.environ, "READY": str(writing)},
        start_new_session=True,
        preexec_fn=heed_signals,
    )
    os.close(inner)
    os.close(writing)
    assert os.read(reading, 1) == b"r"
    os.close(outer)
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=300) == 0
    assert os.read(reading, 1) == b"d"
    os.close(reading)


def test_an_ignored_hangup_stays_ignored() -> None:
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    told: list[int] = []
    try:
        with handling(lambda number, _frame: told.append(number)):
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert told == [signal.SIGTERM]
