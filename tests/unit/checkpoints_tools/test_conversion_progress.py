"""Progress lines of a conversion."""

from __future__ import annotations

import io
import re

import pytest

from checkpoints_tools.core import progress
from checkpoints_tools.core.progress import byte_progress, format_bytes


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


@pytest.mark.parametrize(("variable", "value"), [("FORCE_COLOR", "1"), ("COLUMNS", "10")])
def test_a_log_gets_a_plain_line_every_ten_seconds(
    variable: str, value: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole and without codes, whatever the environment says of terminals."""
    monkeypatch.setenv(variable, value)
    stream = io.StringIO()
    with byte_progress(4_000_000_000, True, stream) as done:
        for _ in range(4):
            clock.now += 5
            done(1_000_000_000)
    assert stream.getvalue().splitlines() == [
        " 50% 2.0/4.0 GB 200.0 MB/s 0:00:10",
        "100% 4.0/4.0 GB 200.0 MB/s 0:00:20",
        "100% 4.0/4.0 GB 200.0 MB/s 0:00:20",
    ]


def test_a_terminal_has_one_line_that_changes(clock: Clock) -> None:
    stream = Terminal()
    with byte_progress(2000, True, stream) as done:
        for _ in range(4):
            clock.now += 1
            done(500)
    plain = re.sub(r"\x1b\[[^A-Za-z]*[A-Za-z]", "", stream.getvalue())
    assert plain.splitlines()[-1] == "100% 2.0/2.0 kB 500 bytes/s 0:00:04"
    assert plain.count("\n") <= 2


def test_a_copy_that_fails_gives_the_terminal_back(clock: Clock) -> None:
    stream = Terminal()
    with pytest.raises(OSError, match="full"), byte_progress(2000, True, stream):
        raise OSError("full")
    assert stream.getvalue().rpartition("\x1b[?25l")[2].count("\x1b[?25h") == 1  # the cursor is shown again


def test_nothing_is_shown_unasked() -> None:
    stream = Terminal()
    with byte_progress(2000, False, stream) as done:
        done(2000)
    assert stream.getvalue() == ""


def test_units() -> None:
    assert [format_bytes(n) for n in (999, 1000, 3.554e9, 65.5e12)] == [
        "999 bytes",
        "1 kB",
        "3.55 GB",
        "65.5 TB",
    ]
