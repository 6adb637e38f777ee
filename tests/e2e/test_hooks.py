"""A run's hooks, its upload command and its webhook, while the run is killed and while it hangs."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from bapo_megatron.runtime.jsonl_log import read_jsonl
from tests.support.short_runs import LIMIT_S, finish, start, wait_for_steps
from tests.support.webhook import Webhook

pytestmark = pytest.mark.e2e

UPLOAD = """\
echo "$$ $1" >> "$0.begun"
while [ ! -e "$0.go" ]; do sleep 0.1; done
"""
"""An upload that says its process and its folder, and ends when it may."""


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def kinds_of(events: Path) -> list[str]:
    return [row["kind"] for row in read_jsonl(events)]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
def test_hooks_of_a_run_that_is_killed_in_an_upload_and_hangs(tmp_path: Path) -> None:
    run_dir, upload, hook = tmp_path / "run", tmp_path / "upload", Webhook()
    upload.write_text(UPLOAD)
    begun, events = tmp_path / "upload.begun", run_dir / "events.jsonl"
    flags = [
        "--steps=12",
        "--checkpoint.export-every=4",
        f"--checkpoint.after-export=sh {upload} {{folder}}",
        "--logging.on-event",
        hook.url,
        "--logging.stalled-minutes=0.1",
    ]

    process = start(run_dir, *flags)
    wait_until(begun.exists)
    wait_for_steps(process, run_dir, len(read_jsonl(run_dir / "metrics.jsonl")) + 1)  # no step waits for it
    process.kill()
    process.communicate(timeout=LIMIT_S)
    pid, folder = begun.read_text().split()
    assert Path(folder) == run_dir / "exports/step_000004"
    wait_until(lambda: not is_alive(int(pid)))
    wait_until(lambda: "failed" in hook.kinds())

    (tmp_path / "upload.go").touch()
    process = start(run_dir, *flags)
    wait_until(lambda: "resume" in kinds_of(events))  # the process that watches it is there by then
    os.kill(process.pid, signal.SIGSTOP)
    counted = Counter(hook.kinds())
    wait_until(lambda: Counter(hook.kinds())["stalled"] > counted["stalled"])
    os.kill(process.pid, signal.SIGCONT)
    finish(process)
    hook.close()
    told = hook.kinds()
    assert told[-1] == "done"
    assert "progress_again" in told[told.index("stalled") :]

    uploads = [line.split()[1] for line in begun.read_text().splitlines()]
    exports = [run_dir / "exports/step_000004", run_dir / "exports/step_000008", run_dir / "export"]
    # The last export may be whole before that of step 8, which a process of its own makes meanwhile.
    assert uploads[0] == str(exports[0])
    assert sorted(uploads[1:]) == sorted(map(str, exports))
    done = [row["step"] for row in read_jsonl(events) if row["kind"] == "after_export_done"]
    assert sorted(done) == [4, 8, 12]
