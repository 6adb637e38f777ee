"""A checkpoint is whole or absent, whatever happens to it."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from bapo_megatron.checkpoint import store as stores
from bapo_megatron.checkpoint.reader import Checkpoint, latest_checkpoint
from bapo_megatron.checkpoint.store import CheckpointStore, _files_below, clear_leftovers
from bapo_megatron.config import CheckpointConfig
from bapo_megatron.errors import CheckpointError, ConfigError, StorageFailed
from bapo_megatron.runtime.jsonl_log import EventLog
from bapo_megatron.runtime.run_paths import RunPaths
from bapo_megatron.runtime.storage import DiskError, writing
from tests.support.saves import Written, save, write_policy

pytestmark = pytest.mark.usefixtures("one_process_group")


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    store = CheckpointStore(RunPaths(tmp_path), CheckpointConfig())
    for step in (10, 20):
        save(store, step, write_policy(b"weights of %d" % step), {"version": step * 4})
    return store


def folder_of(store: CheckpointStore) -> Path:
    return store._paths.checkpoints


def names_of(store: CheckpointStore) -> list[str]:
    return sorted(path.name for path in folder_of(store).iterdir())


def latest_of(store: CheckpointStore) -> Checkpoint | None:
    return latest_checkpoint(store._paths)


def flip_a_bit(folder: Path) -> None:
    path = folder / "policy/deep/weights.bin"
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(data)


def truncate(folder: Path) -> None:
    path = folder / "policy/deep/weights.bin"
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    "damage",
    [
        flip_a_bit,
        truncate,
        lambda folder: (folder / "manifest.json").write_text('{"files": '),
        lambda folder: (folder / "manifest.json").write_text('{"files": {}}'),
        lambda folder: (folder / "manifest.json").unlink(),
        lambda folder: (folder / "policy/deep/weights.bin").unlink(),
    ],
)
def test_a_damaged_checkpoint_is_skipped_with_a_message(
    damage: Callable[[Path], None], store: CheckpointStore, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(folder_of(store) / "step_000020")
    latest = latest_of(store)
    assert latest is not None
    assert latest.step == 10
    [why] = latest.passed_over
    assert why.startswith(f"{folder_of(store)}/step_000020: ")
    assert f"passing over {why}" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["manifest.json", "weights.bin"])
@pytest.mark.parametrize(("number", "kind"), [(errno.ESTALE, StorageFailed), (errno.EACCES, ConfigError)])
def test_a_checkpoint_that_cannot_be_read_now_is_no_damaged_one(
    name: str, number: int, kind: type[Exception], store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run would continue from step 10, and delete the whole checkpoint of step 20 at its next save."""
    real = os.open

    def failing(path: Any, *rest: Any, **more: Any) -> int:
        if str(path).endswith(f"step_000020/{name}"):
            raise OSError(number, os.strerror(number))
        return real(path, *rest, **more)

    def failing_path(self: Path, *rest: Any, **more: Any) -> Any:
        if self.name == name:
            raise OSError(number, os.strerror(number))
        return opened(self, *rest, **more)

    opened = Path.open
    monkeypatch.setattr(os, "open", failing)
    monkeypatch.setattr(Path, "open", failing_path)
    with (
        pytest.raises(kind, match=os.strerror(number)) as raised,
        writing("a file of the run", folder_of(store)),
    ):
        latest_of(store)
    assert not isinstance(raised.value, CheckpointError)
    assert "move it away to continue without it" in str(raised.value)
    monkeypatch.undo()
    assert latest_of(store).step == 20


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.EACCES, ConfigError), (errno.EIO, StorageFailed)],
)
def test_checkpoints_that_cannot_be_listed_are_no_new_run(
    number: int, kind: type[Exception], store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user's folder, or an expired ticket. The run would begin at step 1, over its own record."""

    def failing(path: Any) -> Any:
        if Path(path) == folder_of(store):
            raise OSError(number, os.strerror(number), str(path))
        return real[name](path)

    real = {name: getattr(os, name) for name in ("listdir", "scandir")}
    for name in real:
        monkeypatch.setattr(os, name, failing)
    with pytest.raises(kind, match=rf"list of checkpoints could not be read at .*{os.strerror(number)}"):
        latest_of(store)
    with pytest.raises(kind, match=rf"list of checkpoints could not be read at .*{os.strerror(number)}"):
        clear_leftovers(store._paths)


def test_a_rank_without_the_reason_of_a_failed_save_waits_for_rank_0(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which knows it, and must end first: the launcher takes the first that ends for the cause."""
    waited: list[float] = []
    monkeypatch.setattr(stores, "sleep", waited.append)
    monkeypatch.setattr(signal, "signal", lambda *_: None)

    class Failed(Written):
        def finish(self) -> None:
            raise CheckpointException("write", {})

    with pytest.raises(CheckpointException):
        save(store, 30, lambda path: (write_policy(b"half")(path), Failed())[1], {})
    assert waited == [120.0]


def test_one_that_cannot_be_moved_away_stops_the_run(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "_remove", lambda *_: None)
    with pytest.raises(DiskError, match="step_000020, an older checkpoint of the same step.*move it away"):
        save(store, 20, write_policy(b"new"), {"version": 80})


def test_the_newest_save_is_kept_though_broken_ones_have_its_step_or_later(store: CheckpointStore) -> None:
    save(store, 30, write_policy(b"x"), {})
    for step in (20, 30):
        truncate(folder_of(store) / f"step_{step:06d}")
    save(store, 20, write_policy(b"continued from before"), {"version": 7})
    assert latest_of(store).trainer == {"version": 7}
    assert [path.name for path in folder_of(store).iterdir()] == ["step_000020"]


def test_all_checkpoints_damaged_is_an_error_and_no_restart_at_step_1(store: CheckpointStore) -> None:
    for step in (10, 20):
        truncate(folder_of(store) / f"step_{step:06d}")
    with pytest.raises(CheckpointError, match="no checkpoint of the run is whole") as caught:
        latest_of(store)
    assert "step_000010" in str(caught.value)
    assert "move" in str(caught.value)


class Slow(Written):
    """Not done before it is told so."""

    is_done = False

    def is_written(self) -> bool:
        return self.is_done


def test_a_deleted_file_that_nfs_keeps_for_a_while_is_in_no_manifest(tmp_path: Path) -> None:
    """It is gone once its last process closes it, and the whole checkpoint would count as damaged."""
    (tmp_path / "policy").mkdir()
    for name in ("policy/.metadata", "policy/__0_0.distcp", "policy/.nfs0000000001a2b3c400000001"):
        (tmp_path / name).touch()
    assert sorted(_files_below(tmp_path)) == ["policy/.metadata", "policy/__0_0.distcp"]


def test_an_empty_folder_is_no_new_run_if_a_checkpoint_is_on_record(tmp_path: Path) -> None:
    """A disk behind `checkpoints/` that is not mounted. At step 1 the run would erase its own record."""
    folder, events = RunPaths(tmp_path).checkpoints, EventLog(RunPaths(tmp_path).events)
    folder.mkdir()
    events.event("start", step=1)
    assert latest_checkpoint(RunPaths(tmp_path)) is None  # killed before its first one
    events.event("checkpoint", step=10, updates=0)
    events.event("checkpoint", step=20, updates=0)
    events.event("step_lost", step=3, note='"checkpoint"')
    with pytest.raises(
        CheckpointError, match=r"is empty, .* recorded a checkpoint of step 20: mount its disk"
    ):
        latest_checkpoint(RunPaths(tmp_path))
    folder.rename(tmp_path / "away")
    assert latest_checkpoint(RunPaths(tmp_path)) is None
    events.event("start", step=1)
    folder.mkdir()  # killed again, in its first save
    assert latest_checkpoint(RunPaths(tmp_path)) is None


def test_training_continues_while_a_checkpoint_is_written(store: CheckpointStore) -> None:
    """The policy must be written, and is in its manifest."""
    saving = Slow()
    store.begin((30, 0), lambda path: (write_policy(b"slow")(path), saving)[1], {})
    for _ in range(3):
        assert store.finalize(wait=False) is None
        assert latest_of(store).step == 20
    saving.is_done = True
    while (saved := store.finalize(wait=False)) is None:
        pass
    assert (saved.step, saved.updates) == (30, 0)
    assert store.finalize(wait=True) is None
    assert latest_of(store).step == 30
    (folder_of(store) / "step_000030/policy/deep/weights.bin").write_bytes(b"less")
    assert latest_of(store).step == 20


def test_one_within_a_step_comes_after_the_step_before_and_before_its_own(store: CheckpointStore) -> None:
    store.begin((20, 3), write_policy(b"within"), {"within": 1})
    store.finalize(wait=True)
    latest = latest_of(store)
    assert latest is not None
    assert (latest.moment, latest.trainer) == ((20, 3), {"within": 1})
    assert latest.path.name == "step_000020_update_003"
    save(store, 21, write_policy(b"x"), {})
    assert latest_of(store).moment == (21, 0)


@pytest.mark.parametrize(
    ("kept", "before", "scores", "steps"),
    [
        # The newest, and the two with the highest scores; of equal ones the later.
        ({"keep_best": 2}, {}, {10: 0.5, 20: 0.7, 30: 0.5, 50: 0.1}, [20, 30, 50]),
        ({"keep_best": 1}, {10: 0.5, 20: 0.4}, {}, [10, 50]),  # scores of the run before count
        ({"keep_every": 20}, {}, {}, [20, 40, 50]),
        ({"keep_last": 2}, {}, {}, [40, 50]),
        ({"keep_last": 0}, {}, {}, [10, 20, 30, 40, 50]),
    ],
)
def test_which_are_kept(
    kept: dict[str, int], before: dict[int, float], scores: dict[int, float], steps: list[int], tmp_path: Path
) -> None:
    config = CheckpointConfig(**{"keep_last": 1, **kept})
    store = CheckpointStore(RunPaths(tmp_path), config, scores=before)
    for step in (10, 20, 30, 40, 50):
        save(store, step, write_policy(b"x"), {})
        if step in scores:
            store.record_score(step, scores[step])
    assert names_of(store) == [f"step_{step:06d}" for step in steps]


def test_a_milestone_that_was_passed_over_goes(tmp_path: Path) -> None:
    """The run continues from before it, so it is of another course, if of any."""
    store = CheckpointStore(RunPaths(tmp_path), CheckpointConfig(keep_last=1, keep_every=20))
    for step in (10, 20):
        save(store, step, write_policy(b"x"), {})
    truncate(folder_of(store) / "step_000020")
    store = CheckpointStore(RunPaths(tmp_path), CheckpointConfig(keep_last=1, keep_every=20), newest=(10, 0))
    save(store, 11, write_policy(b"y"), {})
    assert [path.name for path in folder_of(store).iterdir()] == ["step_000011"]
