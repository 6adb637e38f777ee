"""Progress lines of a conversion."""

from __future__ import annotations

import io

import pytest

from checkpoints_tools.core import progress
from checkpoints_tools.core.progress import ByteProgress, format_bytes, format_time


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def test_a_log_gets_a_line_every_ten_seconds(clock: Clock) -> None:
    stream = io.StringIO()
    shown = ByteProgress(4_000_000_000, stream)
    for _ in range(3):
        clock.now += 5
        shown.add(1_000_000_000)
    clock.now += 5
    shown.add(1_000_000_000)
    shown.end()
    assert stream.getvalue().splitlines() == [
        " 50 %  2 GB of 4 GB  200 MB/s  ETA 10 s",
        "100 %  4 GB of 4 GB  200 MB/s  took 20 s",
        "100 %  4 GB of 4 GB  200 MB/s  took 20 s",
    ]


def test_a_terminal_has_one_line_that_changes(clock: Clock) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    shown = ByteProgress(2000, stream)
    clock.now += 1
    shown.add(500)
    clock.now += 0.1
    shown.add(500)  # too soon to show
    clock.now += 0.9
    shown.add(1000)
    shown.end()
    lines = stream.getvalue().split("\r\033[K")
    assert lines[1] == " 25 %  500 bytes of 2 kB  500 bytes/s  ETA 3 s"
    assert lines[2:] == ["100 %  2 kB of 2 kB  1 kB/s  took 2 s", "100 %  2 kB of 2 kB  1 kB/s  took 2 s\n"]


def test_units() -> None:
    assert [format_bytes(n) for n in (999, 1000, 3.554e9, 65.5e12)] == [
        "999 bytes",
        "1 kB",
        "3.55 GB",
        "65.5 TB",
    ]
    assert [format_time(s) for s in (0.4, 59, 60, 185, 3723)] == ["0 s", "59 s", "1:00", "3:05", "1:02:03"]
