"""W&B, trackio and MLflow themselves, on local storage, over a kill: what they show is in metrics.jsonl."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from bapo_megatron.runtime.jsonl_log import read_jsonl
from bapo_megatron.runtime.run_paths import RunPaths
from tests.support.forked_commands import ROOT
from tests.support.short_runs import LIMIT_S, Command, finish, start

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PACKAGES = ROOT / ".venv-trackers"
KEY = "0123456789abcdef0123456789abcdef01234567"
NAMES = ("wandb", "trackio", "mlflow")
STEPS = 12
FLAGS = ("--logging.trackers", *NAMES, "--logging.project=sums", f"--steps={STEPS}", "--evaluation.every=4")
# Boards' processes are niced: on a busy machine the imports of the packages alone take longer than a minute.
PATIENT = ("--logging.catch_up_minutes=10",)

READ = """
import glob, json, os, re, sys
root, name = sys.argv[1:]
if name == "trackio":
    os.environ["TRACKIO_DIR"] = root + "/trackio"
    from trackio.sqlite_storage import SQLiteStorage as storage
    [run] = storage.get_run_records("sums")
    logs = storage.get_logs("sums", run["name"], run_id=run["id"])
    values = [(key, log["step"], log[key]) for log in logs for key in log if key not in ("step", "timestamp")]
elif name == "mlflow":
    from mlflow import MlflowClient
    client = MlflowClient(tracking_uri=f"sqlite:///{root}/mlflow/mlflow.db")
    [run] = client.search_runs([client.get_experiment_by_name("sums").experiment_id])
    assert (run.info.status, run.info.run_name) == ("FINISHED", "demo_cpu"), run.info
    histories = [(key, client.get_metric_history(run.info.run_id, key)) for key in run.data.metrics]
    values = [(key, one.step, one.value) for key, history in histories for one in history]
else:
    from wandb.proto.wandb_internal_pb2 import Record
    def records(data):  # LevelDB's log format, behind a header of seven bytes
        at, parts = 7, b""
        while at + 7 <= len(data):
            if (left := 32768 - at % 32768) < 7:
                at += left
                continue
            length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
            at += 7 + length
            if not kind or at > len(data):
                return  # torn by the kill
            parts = (parts if kind in (3, 4) else b"") + data[at - length : at]
            if kind in (1, 4):
                yield parts
    values, ends = [], []
    for path in sorted(glob.glob(root + "/wandb/offline-run-*/*.wandb")):
        for record in records(open(path, "rb").read()):
            record = Record.FromString(record)
            ends.append(record.exit.exit_code if record.HasField("exit") else None)
            items = record.history.item
            row = {item.nested_key[0]: json.loads(item.value_json) for item in items}
            step = row.pop("_step", None)
            values += [(key, step, value) for key, value in row.items() if key[0] != "_"]
    assert [code for code in ends if code is not None][-1:] == [0], ends
print("VALUES", json.dumps(values))
"""


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> None:
    if not (PACKAGES / ".done").exists():
        pytest.skip("the packages of the trackers are not installed: make trackers")
    for name in ("MLFLOW_TRACKING_URI", "TRACKIO_DIR", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"WANDB_MODE": "offline", "WANDB_API_KEY": KEY, "HF_HUB_OFFLINE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", str(PACKAGES))


def values_in(name: str, paths: RunPaths) -> list[tuple[str, int, float]]:
    """All values of a tracker: metric, step, value."""
    command = [sys.executable, "-c", READ, str(paths.trackers), name]
    read = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert read.returncode == 0, read.stderr[-3000:]
    [line] = [line for line in read.stdout.splitlines() if line.startswith("VALUES ")]
    return [(metric, step, value) for metric, step, value in json.loads(line.removeprefix("VALUES "))]


def expected(paths: RunPaths, name: str) -> dict[tuple[str, int], float]:
    """The numbers of the files, but for times: those of a step that was made again are others."""
    rows = [*read_jsonl(paths.metrics), *read_jsonl(paths.evaluations)]
    wanted = {
        (metric, row["step"]): value
        for row in rows
        for metric, value in row.items()
        if metric != "step" and value is not None and not metric.startswith("time/")
    }
    if name != "mlflow":
        return wanted
    refused = str.maketrans("+@%", "___")
    return {(metric.translate(refused), step): value for (metric, step), value in wanted.items()}


def wait_until_shown(process: Command, paths: RunPaths) -> None:
    """Until each board's package has begun, or the run is nearly over, and there is a checkpoint."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()[0].decode()[-3000:]
        made = paths.metrics.read_bytes().count(b"\n") if paths.metrics.exists() else 0
        shown = all((paths.trackers / name).exists() for name in NAMES)
        if made >= 3 and (shown or made >= STEPS - 3) and list(paths.checkpoints.glob("step_*")):
            return
        time.sleep(0.02)
    raise AssertionError("no step was shown")


def files_with(text: bytes, root: Path) -> Iterator[Path]:
    for path in root.rglob("*"):
        if path.is_file() and not path.is_symlink() and text in path.read_bytes():
            yield path


@pytest.mark.usefixtures("local")
def test_trackers_continue_their_run_across_a_kill(tmp_path: Path) -> None:
    paths, suite = RunPaths(tmp_path / "run"), tmp_path / "sums.jsonl"
    suite.write_text("".join((ROOT / "recipes/demo/eval.jsonl").read_text().splitlines(keepends=True)[:10]))
    flags = (*FLAGS, f"--evaluation.suites={suite}")
    process = start(paths.root, *flags)
    wait_until_shown(process, paths)
    os.kill(process.pid, 9)
    process.communicate()
    output = finish(start(paths.root, *flags, *PATIENT))
    assert "may lack the last steps" not in output
    [resumed] = [row["step"] for row in read_jsonl(paths.events) if row["kind"] == "resume"]
    for name in NAMES:
        values = values_in(name, paths)
        times = Counter((metric, step) for metric, step, _ in values)
        shown = {(metric, step): value for metric, step, value in values if not metric.startswith("time/")}
        wanted = expected(paths, name)
        new = {key: value for key, value in wanted.items() if key[1] >= resumed}
        assert new.items() <= shown.items(), name
        assert shown.items() <= wanted.items(), name
        if name == "mlflow":  # it names its last step
            assert set(times.values()) == {1}
    assert not list(files_with(KEY.encode(), paths.root))
