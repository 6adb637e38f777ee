"""What a run starts beside itself: hooks, the upload, the webhook while it is killed or hangs; exports."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from bapo_megatron.runtime.jsonl_log import read_jsonl
from bapo_megatron.runtime.written_folders import MARK
from checkpoints_tools import verify
from tests.support.processes import keep_priority
from tests.support.short_runs import LIMIT_S, Command, finish, start, wait_for_steps
from tests.support.waiting import is_alive
from tests.support.webhook import Webhook

pytestmark = pytest.mark.e2e

UPLOAD = """\
echo "$$ $1" >> "$0.begun"
while [ ! -e "$0.go" ]; do sleep 0.1; done
"""
"""An upload that says its process and its folder, and ends when it may."""


@pytest.fixture(autouse=True)
def _kept_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_priority(monkeypatch)


PATIENCE_S = 4 * LIMIT_S
"""A busy machine may take long; a run that has ended is told at once."""


def wait_until(is_true: Callable[[], bool], process: Command | None = None) -> None:
    """Until it is true. AssertionError, with the output of ``process``, if that ends before."""
    deadline = time.monotonic() + PATIENCE_S
    while not is_true():
        assert process is None or process.poll() is None, process.communicate()[0].decode()[-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def kinds_of(events: Path) -> list[str]:
    return [row["kind"] for row in read_jsonl(events)]


@pytest.mark.slow
def test_hooks_of_a_run_that_is_killed_in_an_upload_and_hangs(tmp_path: Path) -> None:
    run_dir, upload, hook = tmp_path / "run", tmp_path / "upload", Webhook()
    upload.write_text(UPLOAD)
    begun, events = tmp_path / "upload.begun", run_dir / "events.jsonl"
    flags = [
        "--checkpoint.export-every=4",
        f"--checkpoint.after-export=sh {upload} {{folder}}",
        "--logging.on-event",
        hook.url,
        "--logging.stalled-minutes=0.1",
    ]

    process = start(run_dir, *flags, "--steps=10000")  # more than it makes until the upload has begun
    wait_until(lambda: begun.exists() and begun.read_text().endswith("\n"), process)
    wait_for_steps(process, run_dir, len(read_jsonl(run_dir / "metrics.jsonl")) + 1)  # no step waits for it
    process.kill()
    process.communicate(timeout=LIMIT_S)
    pid, folder = begun.read_text().split()
    assert Path(folder) == run_dir / "exports/step_000004"
    wait_until(lambda: not is_alive(int(pid)))
    wait_until(lambda: "failed" in hook.kinds())
    due = [path.name for path in (run_dir / "checkpoints").glob("step_??????") if int(path.name[5:]) % 4 == 0]
    again = sorted(due)[-2:]

    (tmp_path / "upload.go").touch()
    last = 4 * (len(read_jsonl(run_dir / "metrics.jsonl")) // 4 + 2)
    process = start(run_dir, *flags, f"--steps={last}")
    wait_until(lambda: "resume" in kinds_of(events), process)  # the process that watches it is there by then
    os.kill(process.pid, signal.SIGSTOP)
    counted = Counter(hook.kinds())
    wait_until(lambda: Counter(hook.kinds())["stalled"] > counted["stalled"], process)
    os.kill(process.pid, signal.SIGCONT)
    finish(process)
    hook.close()
    told = hook.kinds()
    assert told[-1] == "done"
    assert "progress_again" in told[told.index("stalled") :]

    rows = list(read_jsonl(events))
    skipped = {f"step_{row['step']:06d}" for row in rows if row["kind"] == "export_skipped"}  # by a newer one
    uploads = [line.split()[1] for line in begun.read_text().splitlines()]
    done = [row["path"] for row in rows if row["kind"] == "export_done"]
    final = str(run_dir / "export")
    assert uploads[1:] == [path for path in done if path != str(run_dir / f"exports/step_{last:06d}")]
    assert (uploads[-1], done[-1]) == (final, final)
    assert {*again} - skipped <= {Path(path).name for path in uploads[1:]}


@pytest.mark.slow
def test_a_run_exports_its_checkpoints_and_a_continued_one_what_is_missing(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    flags = ["--steps=4", "--checkpoint.keep-last=1", "--checkpoint.export-every=2"]
    finish(start(run_dir, *flags))
    assert sorted(path.name for path in (run_dir / "exports").iterdir()) == ["step_000002", "step_000004"]
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step_000004"]
    last = run_dir / "exports/step_000004"
    assert verify(last, run_dir / "export").equal  # what the policy itself says of its weights
    assert not verify(run_dir / "exports/step_000002", last).equal
    for path in last.iterdir():
        if path.suffix != ".safetensors" and path.name != MARK:
            assert path.read_bytes() == (run_dir / "export" / path.name).read_bytes()
    mark, of_run = (json.loads((folder / MARK).read_text()) for folder in (last, run_dir / "export"))
    assert (mark.pop("written_by"), of_run.pop("written_by")) == ("bapo-ckpt", "bapo")
    assert mark == of_run

    last.rename(run_dir / "moved")
    finish(start(run_dir, *flags))
    assert verify(last, run_dir / "moved").equal
    done = [row["step"] for row in read_jsonl(run_dir / "events.jsonl") if row["kind"] == "export_done"]
    assert done == [2, 4, 4]
