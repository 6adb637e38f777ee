"""Progress lines of a conversion."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest

from checkpoints_tools import Settings, to_megatron
from checkpoints_tools.core import progress
from checkpoints_tools.core.progress import byte_progress, format_bytes
from tests.support.checkpoint_models import save_random_model


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
        clock.now += 20  # the files are forced to the disk
    assert stream.getvalue().splitlines() == [
        " 50% 2.0/4.0 GB 200.0 MB/s 0:00:10",
        "100% 4.0/4.0 GB 200.0 MB/s 0:00:00",
        "4 GB in 0:00:40, 100 MB/s",
    ]


def test_a_terminal_has_one_line_that_changes(clock: Clock) -> None:
    stream = Terminal()
    with byte_progress(2000, True, stream) as done:
        for _ in range(4):
            clock.now += 1
            done(500)
    plain = re.sub(r"\x1b\[[^A-Za-z]*[A-Za-z]", "", stream.getvalue())
    assert plain.splitlines()[-1].rpartition("\r")[2] == "2 kB in 0:00:04, 500 bytes/s"
    assert plain.count("\n") <= 3


def test_what_the_process_prints_stays_on_its_stdout(clock: Clock) -> None:
    before = sys.stdout, sys.stderr
    with byte_progress(2000, True, Terminal()):
        assert (sys.stdout, sys.stderr) == before


class Closed(Terminal):
    """A terminal or log that has gone."""

    def __init__(self, is_terminal: bool, error: type[OSError]) -> None:
        super().__init__()
        self.is_terminal, self.error, self.tries = is_terminal, error, 0

    def isatty(self) -> bool:
        return self.is_terminal

    def write(self, text: str) -> int:
        self.tries += 1
        raise self.error("gone")


@pytest.mark.parametrize("error", [BrokenPipeError, OSError])
@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_stderr_that_fails_costs_no_copy(
    is_terminal: bool, error: type[OSError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a broken pipe rich ends the process, and any error within the copy removes its output."""
    stream = Closed(is_terminal, error)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "_LOG_S", 0.0)
    to_megatron(save_random_model(tmp_path / "hf"), tmp_path / "out", settings=Settings(progress=True))
    assert (tmp_path / "out/release/.metadata").is_file()
    assert stream.tries > 0


def test_the_last_line_comes_when_the_output_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, told = tmp_path / "out", dict[str, bool]()
    stream = io.StringIO()

    def write(text: str) -> int:
        told[text] = output.exists()
        return len(text)

    monkeypatch.setattr(stream, "write", write)
    monkeypatch.setattr(sys, "stderr", stream)
    to_megatron(save_random_model(tmp_path / "hf"), output, settings=Settings(progress=True))
    assert [is_there for text, is_there in told.items() if " in 0:00:" in text] == [True]


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
    shown = ["999 bytes", "1 kB", "3.55 GB", "65.5 TB"]
    assert [format_bytes(n) for n in (999, 1000, 3.554e9, 65.5e12)] == shown
