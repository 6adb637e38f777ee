"""What a run deletes is its own: no link is followed, and what somebody else put there stays."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from bapo_megatron.checkpoint import store
from bapo_megatron.checkpoint.exports import StepExports
from bapo_megatron.checkpoint.store import CheckpointStore, clear_leftovers
from bapo_megatron.config import CheckpointConfig
from bapo_megatron.rollout.sampler.step_batches import StepFiles
from bapo_megatron.rollout.weight_sync.disk import WeightStaging
from bapo_megatron.runtime.run_paths import RunPaths
from tests.support.saves import save, write_policy

pytestmark = pytest.mark.usefixtures("one_process_group")

MODEL = Path(__file__).parents[3] / "recipes/demo/policy"


def keep_one(run: Path) -> None:
    """Save steps 10 and 20, of which the second is kept."""
    store = CheckpointStore(run, CheckpointConfig(keep_last=1))
    for step in (10, 20):
        save(store, step, write_policy(b"x"), {})


def save_20(run: Path) -> None:
    save(CheckpointStore(run, CheckpointConfig(keep_last=1)), 20, write_policy(b"x"), {})


def resume_exports(run: Path) -> None:
    StepExports(run, MODEL, 0, lambda event: None).resume([])


def keep_no_weights(run: Path) -> None:
    WeightStaging(run / "weights", MODEL).keep_only(None)


def prepare_weights(run: Path) -> None:
    staging = WeightStaging(run / "weights", MODEL)
    staging.prepare(3)
    staging.publish(3, {})
    staging.discard(3)


def delete_steps(run: Path) -> None:
    StepFiles(RunPaths(run).journal, lambda kind, **fields: None).delete(20)


OWN: dict[str, tuple[str, Callable[[Path], None]]] = {
    "checkpoint that is not kept": ("checkpoints/step_000005", save_20),
    "checkpoint that is saved anew": ("checkpoints/step_000020", save_20),
    "half-written checkpoint": ("checkpoints/.step_000020.0123abcd.tmp", clear_leftovers),
    "half-deleted checkpoint": ("checkpoints/.step_000005_update_001.deleted", save_20),
    "half-written export": ("exports/.step_000020.bapo-ckpt.tmp", resume_exports),
    "older weights": ("weights/v2", keep_no_weights),
    "half-written weights": ("weights/.v3.tmp", prepare_weights),
    "weights written anew": ("weights/v3", prepare_weights),
}


@pytest.mark.parametrize("kind", ["folder", "link", "dangling link"])
@pytest.mark.parametrize(("name", "delete"), OWN.values(), ids=OWN)
def test_deletion_removes_a_link_and_keeps_its_target(
    tmp_path: Path, name: str, delete: Callable[[Path], None], kind: str
) -> None:
    path, elsewhere = tmp_path / "run" / name, tmp_path / "elsewhere"
    path.parent.mkdir(parents=True)
    elsewhere.mkdir()
    if kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(elsewhere if kind == "link" else tmp_path / "absent")
    if kind != "dangling link":
        (path / "old").write_text("old")
    delete(tmp_path / "run")
    assert not path.is_symlink()
    assert not (path / "old").exists()
    assert [file.name for file in elsewhere.iterdir()] == (["old"] if kind == "link" else [])


def test_a_checkpoint_that_is_still_read_is_deleted_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On NFS its folder stays while a process of this machine reads a file of it; the run goes on."""

    def refused(folder: Path) -> None:
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(folder))

    with monkeypatch.context() as patched:
        patched.setattr(store, "remove_folder", refused)
        keep_one(tmp_path)
    folder = RunPaths(tmp_path).checkpoints
    kept = sorted(path.name for path in folder.iterdir())
    assert [name.split(".")[1] for name in kept[:-1]] == ["step_000010"]
    assert kept[-1] == "step_000020"
    [line] = capsys.readouterr().err.splitlines()
    assert re.fullmatch(
        r"warning: .*step_000010\S+ could not be deleted \(.*not empty.*; the next .* again", line
    )
    save_20(tmp_path)
    assert [path.name for path in folder.iterdir()] == ["step_000020"]


FOREIGN: dict[str, tuple[str, Callable[[Path], None]]] = {
    "copy of a checkpoint": ("checkpoints/step_000010.copy", keep_one),
    "checkpoint of another program": ("checkpoints/iter_000010", keep_one),
    "own folder among checkpoints": ("checkpoints/best", keep_one),
    "own hidden folder among checkpoints": ("checkpoints/.step_notes", keep_one),
    "own hidden folder of a step": ("checkpoints/.step_000010.mine", keep_one),
    "own folder among exports": ("exports/.step_mine.bapo-ckpt.tmp", resume_exports),
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


@pytest.mark.parametrize("kind", ["file", "FIFO"])
@pytest.mark.parametrize("name", ["step_000005", "step_000020", ".step_000020.mine.tmp"])
def test_what_is_no_folder_stays_beside_the_checkpoints(tmp_path: Path, name: str, kind: str) -> None:
    path = tmp_path / "checkpoints" / name
    path.parent.mkdir()
    if kind == "file":
        path.write_text("mine")
    else:
        os.mkfifo(path)
    keep_one(tmp_path)
    assert (tmp_path / "checkpoints/step_000020/manifest.json").is_file()
    found = [file for file in path.parent.iterdir() if not file.is_dir()]
    assert len(found) == 1
    assert kind == "FIFO" or found[0].read_text() == "mine"
