"""A full disk ends a run with one message and nothing half-written; a run deletes only what is its own."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception

from bapo_megatron.checkpoint.export import export_hf
from bapo_megatron.checkpoint.exports import StepExports
from bapo_megatron.checkpoint.reader import latest_checkpoint
from bapo_megatron.checkpoint.store import CheckpointStore, clear_leftovers
from bapo_megatron.config import CheckpointConfig
from bapo_megatron.errors import ConfigError, RunStopped, StorageFailed
from bapo_megatron.rollout.sampler.held_out import HeldOut
from bapo_megatron.rollout.sampler.step_batches import StepFiles
from bapo_megatron.rollout.sampler.write_ahead_log import Record, SegmentJournal, read_records
from bapo_megatron.runtime.exit_codes import report_error
from bapo_megatron.runtime.jsonl_log import EventLog, append_event, read_jsonl
from bapo_megatron.runtime.run_paths import RunPaths
from bapo_megatron.runtime.storage import DiskError, FailingDiskError, OldFiles, writing
from tests.support.models import SingleWriter, save_tiny_model
from tests.support.saves import save, write_policy
from tests.support.small_disk import fill, small_disk

pytestmark = pytest.mark.usefixtures("one_process_group")

FULL = "No space left on device"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", 4096) as folder:
        yield folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_tiny_model("qwen2", tmp_path / "model")


def full_then_not(disk: Path, write: Callable[[], object], named: Path) -> None:
    """``write`` is refused with a message that names the file, and done when there is room."""
    ballast = fill(disk, 8)
    with pytest.raises(RunStopped, match=f"could not be written to {named}: {FULL}"):
        write()
    ballast.unlink()
    write()


def test_weights(disk: Path, model: Path) -> None:
    weights = load_file(model / "model.safetensors")
    staging = SingleWriter(disk / "weights", model)
    full_then_not(disk, lambda: staging.write(weights.items(), 3), disk / "weights/v3")
    assert [path.name for path in (disk / "weights").iterdir()] == ["v3"]


def test_a_checkpoint(disk: Path) -> None:
    store = CheckpointStore(RunPaths(disk), CheckpointConfig())
    save(store, 10, write_policy(bytes(100_000)), {})

    def again() -> None:
        latest = latest_checkpoint(RunPaths(disk))
        assert latest is not None
        assert latest.step == 10
        save(store, 20, write_policy(bytes(100_000)), {})

    full_then_not(disk, again, disk / "checkpoints/step_000020")
    assert not list((disk / "checkpoints").glob(".*")), "half a checkpoint of before"
    ballast = fill(disk, 8)
    with pytest.raises(RunStopped, match="checkpoint of step 30 could not be written .*No space left"):
        save(store, 30, write_policy(bytes(100_000)), {})
    clear_leftovers(RunPaths(disk))  # as a continuation does, which needs the room
    ballast.unlink()
    assert sum(path.stat().st_size for path in disk.rglob("*.bin")) == 200_000
    latest = latest_checkpoint(RunPaths(disk))
    assert latest is not None
    assert latest.step == 20


@pytest.mark.parametrize("writer", ["torch", "a little of torch", "safetensors"])
def test_writers_that_hide_what_the_disk_said(disk: Path, writer: str) -> None:
    """As megatron's checkpoints, which torch writes, and the exported folder do."""
    tensors = {"x": torch.zeros(1 if "little" in writer else 50_000)}
    path = disk / "file"
    path.touch()
    fill(disk, 0)
    told = "the file could not be written to .*file: (No space|a file was cut)"
    with pytest.raises(DiskError, match=told), writing("the file", path):
        save_file(tensors, path) if writer == "safetensors" else torch.save(tensors, path)


def test_a_checkpoint_that_several_ranks_write() -> None:
    """What torch raises on every rank then says of the failure only in its text."""
    try:
        raise RuntimeError("Worker failure: [Errno 28] No space left on device")
    except RuntimeError as error:
        failure = _wrap_exception(error)
    with pytest.raises(DiskError, match="No space left"), writing("the checkpoint", Path("x")):
        raise CheckpointException("write", {1: failure})


def test_an_export(disk: Path, model: Path) -> None:
    weights = load_file(model / "model.safetensors")
    full_then_not(disk, lambda: export_hf(iter(weights.items()), model, disk / "export"), disk / "export")
    assert load_file(disk / "export/model.safetensors").keys() == weights.keys()


def test_a_line_of_a_log(disk: Path) -> None:
    log = EventLog(disk / "events.jsonl")
    log.append({"n": 0})
    full_then_not(disk, lambda: log.append({"n": 1, "text": "x" * 20_000}), log.path)
    log.append({"n": 2})
    ballast = fill(disk, 8)
    with pytest.raises(OSError, match="No space left"):  # of another process
        append_event(log.path, "stalled", message="x" * 20_000)
    ballast.unlink()
    log.append({"n": 3})
    log.close()
    assert [row["n"] for row in read_jsonl(log.path)] == [0, 1, 2, 3]


def test_the_journal(disk: Path) -> None:
    journal = SegmentJournal(disk)
    journal.rotate(Record("state", {"n": 0}, {}))
    large = Record("segments", {"parts": []}, {"ids": np.zeros(10_000, np.int32)})
    full_then_not(disk, lambda: journal.commit([large]), disk / "segments-000001.log")
    journal.close()
    assert [r.kind for r in read_records(disk / "segments-000001.log") if isinstance(r, Record)] == [
        "state",
        "segments",
    ]


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EROFS, errno.ESHUTDOWN])
def test_a_file_system_that_fails_is_another_ending(number: int) -> None:
    """As itself, and as another process or a library in another language tells of it."""
    told = os.strerror(number)
    for error in (OSError(number, told), RuntimeError(f"Worker failure: [Errno {number}] {told}")):
        named = f"x could not be written to y: {told}"
        with pytest.raises(StorageFailed, match=named) as caught, writing("x", Path("y")):
            raise error
        assert report_error(caught.value) == 4
    with pytest.raises(ConfigError, match="cannot be read") as unread:
        try:
            raise OSError(number, told)
        except OSError:
            raise ConfigError("the model's config.json cannot be read") from None
    assert report_error(unread.value) == (2 if number == errno.EROFS else 4)  # of a place that a user named
    with pytest.raises(DiskError) as full, writing("x", Path("y")):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert not isinstance(full.value, StorageFailed)
    assert report_error(full.value) == 3


@pytest.mark.parametrize(("free_bytes", "code"), [(2**31, 4), (2**20, 3), (None, 4)])
def test_a_file_cut_short_is_judged_by_the_room(
    free_bytes: int | None, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def statistics(_path: Path) -> os.statvfs_result:
        if free_bytes is None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return os.statvfs_result((1, 1, free_bytes, free_bytes, free_bytes, 9, 9, 9, 0, 255))

    monkeypatch.setattr("os.statvfs", statistics)
    with pytest.raises(DiskError, match="a file was cut short") as caught, writing("x", Path("y/z")):
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0")
    assert report_error(caught.value) == code


def test_other_errors_pass() -> None:
    for error in (ValueError("wrong"), ConnectionRefusedError(111, "refused"), ConfigError("a field")):
        with pytest.raises(type(error)), writing("a file", Path("x")):
            raise error


def test_the_first_disk_error_is_reported_though_closing_fails_too() -> None:
    with pytest.raises(RunStopped, match="the journal"), writing("a file of the run", Path("x")):
        try:
            with writing("the journal", Path("y")):
                raise OSError(28, "No space left on device")
        finally:
            raise OSError(28, "No space left on device")


def test_orphaned_checkpoint_writers_do_not_block_the_exit() -> None:
    """One failed, the others have more to tell than fits into a pipe: so megatron leaves them."""
    code = (
        "import multiprocessing as mp, sys\n"
        "from bapo_megatron import cli\n"
        "queue = mp.get_context('fork').Queue()\n"
        "mp.get_context('fork').Process(target=queue.put, args=('x' * 1_000_000,)).start()\n"
        "sys.exit(cli.run(['trian']))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE)
    try:
        assert process.wait(120) == 2
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_the_exit_code_survives_a_log_on_a_full_disk() -> None:
    command = [sys.executable, "-m", "bapo_megatron.cli", "trian"]
    with open("/dev/full", "w") as full:
        assert subprocess.run(command, stdout=full, stderr=full).returncode == 2


MODEL = Path(__file__).parents[3] / "recipes/demo/policy"


def keep_one(run: Path) -> None:
    """Save steps 10 and 20, of which the second is kept."""
    store = CheckpointStore(RunPaths(run), CheckpointConfig(keep_last=1))
    for step in (10, 20):
        save(store, step, write_policy(b"x"), {})


def resume_exports(run: Path) -> None:
    StepExports(RunPaths(run), MODEL, 0, lambda event: None).resume([])


def keep_no_weights(run: Path) -> None:
    SingleWriter(run / "weights", MODEL).keep_only(None)


def delete_steps(run: Path) -> None:
    StepFiles(RunPaths(run).journal, lambda kind, **fields: None).delete(20)


Report = Callable[..., None]


def delete_checkpoint(run: Path, report: Report) -> None:
    own = CheckpointStore(RunPaths(run), CheckpointConfig(keep_last=1), (20, 0), old=OldFiles(report))
    own.delete_old()


def delete_log(run: Path, report: Report) -> None:
    journal = SegmentJournal(run / "journal", OldFiles(report))
    journal.rotate(Record("state", {}, {}))
    journal.delete_old(())
    journal.close()


def delete_held_out(run: Path, report: Report) -> None:
    made = SimpleNamespace(_paths=RunPaths(run), _old=OldFiles(report))
    HeldOut.delete(made, 4)  # type: ignore[arg-type]


OLD: dict[str, tuple[str, Callable[[Path, Report], None]]] = {
    "checkpoint": ("checkpoints/step_000005/policy", delete_checkpoint),
    "rollouts of a step": (
        "journal/step_000005.npz",
        lambda run, report: StepFiles(run / "journal", report).delete(20),
    ),
    "log": ("journal/segments-000001.log", delete_log),
    "weights": (
        "weights/v2/model.safetensors",
        lambda run, report: SingleWriter(run / "weights", MODEL, OldFiles(report)).keep_only(None),
    ),
    "results of an evaluation": ("evaluation/step_000004.jsonl", delete_held_out),
}


@pytest.mark.parametrize(("name", "delete"), OLD.values(), ids=OLD)
def test_what_is_old_and_cannot_be_deleted_ends_no_run(
    tmp_path: Path, name: str, delete: Callable[[Path, Report], None]
) -> None:
    """A mount point, an immutable file, another user's: an event, and the next turn tries again."""
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.touch()
    (tmp_path / "checkpoints/step_000020").mkdir(parents=True)
    told: list[tuple[str, str]] = []

    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    def report(kind: str, *, path: str, reason: str) -> None:
        told.append((kind, reason))
        assert path.startswith(str(tmp_path))

    with pytest.MonkeyPatch.context() as patch:
        for owner, call in ((Path, "unlink"), (Path, "rename"), (shutil, "rmtree")):
            patch.setattr(owner, call, refused)
        delete(tmp_path, report)
    assert path.exists()
    assert told == [("old_kept", os.strerror(errno.EBUSY))]
    delete(tmp_path, report)
    assert not path.exists()
    assert len(told) == 1


def test_of_what_stays_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = OldFiles()
    for _ in range(3):
        with old.deleting(tmp_path):
            raise OSError(errno.EPERM, "Operation not permitted")
    told = f"warning: {tmp_path} could not be deleted (Operation not permitted); the next save or start tries"
    assert capsys.readouterr().err == f"{told} again\n"
    with pytest.raises(FailingDiskError, match="Stale file handle"), old.deleting(tmp_path):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))


FOREIGN: dict[str, tuple[str, Callable[[Path], None]]] = {
    "copy of a checkpoint": ("checkpoints/step_000010.copy", keep_one),
    "own folder among checkpoints": ("checkpoints/best", keep_one),
    "own hidden folder of a step": ("checkpoints/.step_000010.mine", keep_one),
    "own folder among exports": ("exports/.step_mine.bapo.tmp", resume_exports),
    "own folder among weights": ("weights/base_model", keep_no_weights),
    "own file in the journal": ("journal/step_mine.npz", delete_steps),
}


@pytest.mark.parametrize(("name", "delete"), FOREIGN.values(), ids=FOREIGN)
def test_foreign_files_stay(tmp_path: Path, name: str, delete: Callable[[Path], None]) -> None:
    path = tmp_path / name
    path.mkdir(parents=True)
    (path / "mine").write_text("mine")
    delete(tmp_path)
    assert (path / "mine").read_text() == "mine"


def test_of_a_link_to_an_old_checkpoint_the_target_stays(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (link := tmp_path / "checkpoints/step_000005").symlink_to(tmp_path / "elsewhere")
    (link / "mine").touch()
    keep_one(tmp_path)
    assert not link.is_symlink()
    assert (tmp_path / "elsewhere/mine").exists()
