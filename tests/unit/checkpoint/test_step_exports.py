"""Exports beside the training: from a real checkpoint, by a real process, killed at any moment."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from bapo_megatron.checkpoint.exports import AfterExport, StepExports
from bapo_megatron.checkpoint.store import CheckpointStore
from bapo_megatron.commands.train import wait_for_exports
from bapo_megatron.config import CheckpointConfig
from bapo_megatron.errors import Preempted
from bapo_megatron.interfaces import Saving
from bapo_megatron.runtime.run_paths import RunPaths
from bapo_megatron.trainer.build import Run
from bapo_megatron.trainer.flow_control import finalize_checkpoint
from bapo_megatron.trainer.update_loss import UpdateLoss
from checkpoints_tools import to_megatron
from tests.support.checkpoint_models import folder_bytes, save_random_model
from tests.support.processes import keep_priority
from tests.support.runs import Asked, run_of
from tests.support.saves import Written, save
from tests.support.small_steps import run_config
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("one_process_group")

BIG = {"hidden_size": 1024, "intermediate_size": 2048, "vocab_size": 5000}
"""About 120 MB, which keeps a process busy for a while."""
DEADLINE_S = 120.0


@pytest.fixture(autouse=True)
def _kept_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_priority(monkeypatch)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("model") / "hf", files=2)


@pytest.fixture(scope="module")
def policy(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a policy would save of that model."""
    path = tmp_path_factory.mktemp("policy") / "megatron"
    to_megatron(model, path)
    return path / "release"


def copy_of(policy: Path) -> Callable[[Path], Saving]:
    """Stands for a policy's ``save``."""

    def write(path: Path) -> Saving:
        shutil.copytree(policy, path)
        return Written()

    return write


class Owner:
    """A run's store and its exports, with the events that they note."""

    def __init__(
        self,
        run_dir: Path,
        model: Path,
        policy: Path,
        every: int = 10,
        newest: tuple[int, int] = (0, 0),
        after: AfterExport | None = None,
        **checkpoint: Any,
    ) -> None:
        self.events: list[dict[str, Any]] = []
        self.exports = StepExports(RunPaths(run_dir), model, every, self.events.append, after)
        config, in_use = CheckpointConfig(**{"keep_last": 1, **checkpoint}), self.exports.is_using
        self.store = CheckpointStore(RunPaths(run_dir), config, newest, is_in_use=in_use)
        self.paths, self._policy = RunPaths(run_dir), policy

    def reach(self, step: int) -> None:
        """Save the checkpoint of a step and offer it."""
        save(self.store, step, copy_of(self._policy), {})
        self.exports.offer(step)

    def wait(self) -> None:
        """Until no export is in the making."""
        until(lambda: not self.exports.is_busy() or self.exports.poll())

    def kinds(self) -> list[tuple[str, int]]:
        return [(event["kind"], event["step"]) for event in self.events]

    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in self.paths.checkpoints.iterdir())


@pytest.fixture
def owner(tmp_path: Path, model: Path, policy: Path) -> Iterator[Owner]:
    owner = Owner(tmp_path, model, policy)
    yield owner
    owner.exports.close()


def process_of(owner: Owner) -> Any:
    """The process that exports now."""
    return owner.exports._process


@pytest.fixture
def halted(owner: Owner) -> Iterator[psutil.Process]:
    """The export of step 10 as a process that has just begun and is halted: it lasts until it is woken."""
    owner.reach(10)
    child = psutil.Process(process_of(owner).pid)
    child.suspend()
    yield child
    if child.is_running():
        child.resume()


def test_an_export_is_the_model_to_the_bit_with_all_its_files(owner: Owner, model: Path) -> None:
    owner.reach(10)
    assert owner.kinds() == [("export_started", 10)]
    owner.wait()
    assert owner.kinds() == [("export_started", 10), ("export_done", 10)]
    done = owner.events[-1]
    assert done["path"] == str(owner.paths.step_export(10))
    assert 0 < done["seconds"] < DEADLINE_S
    assert folder_bytes(Path(done["path"])) == folder_bytes(model)
    assert json.loads(json.dumps(owner.events)) == owner.events


def test_the_export_process_imports_no_torch() -> None:
    """Or it would take a second copy of half a gigabyte beside every trainer."""
    module = "bapo_megatron.checkpoint.exports"
    script = f"import sys, {module}; print({{'torch', 'megatron'}} & {{*sys.modules}})"
    assert subprocess.check_output([sys.executable, "-c", script], text=True) == "set()\n"


def test_its_checkpoint_stays_as_long_as_it_is_read(owner: Owner, halted: psutil.Process) -> None:
    assert os.getpgid(halted.pid) == halted.pid  # Slurm tells all of a task's process group to save
    for step in (15, 25):
        owner.reach(step)
    assert owner.checkpoints() == ["step_000010", "step_000025"]
    halted.resume()
    owner.wait()
    assert owner.kinds()[-1] == ("export_done", 10)
    owner.reach(35)
    assert owner.checkpoints() == ["step_000035"]


def test_one_at_a_time_then_the_newest(owner: Owner, halted: psutil.Process, model: Path) -> None:
    for step in (20, 30, 40):
        owner.reach(step)
        assert process_of(owner).pid == halted.pid
    assert [event for event in owner.events if event["kind"] == "export_skipped"] == [
        {"kind": "export_skipped", "step": 20, "newer": 30},
        {"kind": "export_skipped", "step": 30, "newer": 40},
    ]
    # That of step 30 was to be read when the last one became whole. It goes with the next.
    assert owner.checkpoints() == ["step_000010", "step_000030", "step_000040"]
    halted.resume()
    owner.wait()
    ends = [("export_done", 10), ("export_started", 40), ("export_done", 40)]
    assert owner.kinds()[-3:] == ends
    assert sorted(path.name for path in owner.paths.step_exports.iterdir()) == ["step_000010", "step_000040"]
    assert folder_bytes(owner.paths.step_export(40)) == folder_bytes(model)


@pytest.mark.parametrize("killed", [False, True])
def test_a_failure_is_an_event_and_the_next_one_goes_on(
    owner: Owner, halted: psutil.Process, killed: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    owner.reach(20)
    if killed:
        halted.kill()
    else:
        (owner.paths.checkpoints / "step_000010/policy/common.pt").unlink()
        halted.resume()
    owner.wait()
    failed = owner.events[-3]
    assert (failed["kind"], failed["step"]) == ("export_failed", 10)
    assert ("it ended with exit code -9" if killed else "common.pt") in failed["message"]
    assert "warning: the export of step 10 has failed: " in capfd.readouterr().err
    assert owner.kinds()[-2:] == [("export_started", 20), ("export_done", 20)]
    assert not owner.paths.step_export(10).exists()


def test_a_process_that_cannot_be_started_is_such_a_failure(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a limit of processes: training continues, and so do later exports."""

    def refused(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", refused)
        owner.reach(10)
    assert owner.kinds() == [("export_failed", 10)]
    assert not owner.exports.is_busy()
    owner.reach(20)
    assert owner.kinds()[-1] == ("export_started", 20)


def test_a_step_that_was_made_again_is_exported_again(owner: Owner) -> None:
    """A run that continues from an older checkpoint, perhaps with another recipe, writes its steps anew."""
    owner.reach(10)
    owner.wait()
    stale = owner.paths.step_export(10) / "stale"
    stale.touch()
    owner.reach(10)
    owner.wait()
    assert not stale.exists()
    # With what the run did not write in it, the earlier one is kept beside it.
    assert (owner.paths.step_exports / "step_000010.kept-1/stale").exists()
    shutil.rmtree(owner.paths.step_exports / "step_000010.kept-1")
    owner.reach(10)
    owner.wait()
    assert owner.kinds()[-1] == ("export_done", 10)
    assert [path.name for path in owner.paths.step_exports.iterdir()] == ["step_000010"]


def test_a_continued_run_makes_two_missing_ones(tmp_path: Path, model: Path, policy: Path) -> None:
    before = Owner(tmp_path, model, policy, every=0, keep_last=0)
    for step in (5, 10, 20, 30, 40):
        before.reach(step)
    shutil.copytree(model, tmp_path / "exports/step_000040")
    shutil.copytree(model, tmp_path / "exports/.step_000010.bapo.tmp")
    owner = Owner(tmp_path, model, policy, newest=(40, 0), keep_last=0)
    owner.exports.resume(owner.store.steps())
    owner.wait()
    owner.exports.close()
    assert [step for kind, step in owner.kinds() if kind == "export_done"] == [20, 30]
    names = ["step_000020", "step_000030", "step_000040"]
    assert sorted(path.name for path in owner.paths.step_exports.iterdir()) == names


def test_the_command_runs_on_each_whole_export_until_it_has_succeeded(
    tmp_path: Path, model: Path, policy: Path
) -> None:
    """The next start tries all again, writing no folder; the last step has it for `RUN/export` alone."""
    log = tmp_path / "log"
    command = f"sh -c 'test -e $0/config.json && echo $1 >> {log} && test $1 = 20' {{folder}} {{step}}"
    owner = Owner(tmp_path, model, policy, after=AfterExport(command, 60.0, "run", 50), keep_last=0)
    for step in (10, 20, 30, 40, 50):
        owner.reach(step)
        owner.wait()
    assert log.read_text().split() == ["10", "20", "30", "40"]
    ends = [(kind, step) for kind, step in owner.kinds() if kind != "export_started"]
    failed, done = "export_failed", "export_done"
    assert ends == [(failed, 10), (done, 20), (failed, 30), (failed, 40), (done, 50)]
    again = Owner(tmp_path, model, policy, after=AfterExport("true", 60.0, "run", 50), newest=(50, 0))
    written = [path.stat().st_ino for path in sorted(owner.paths.step_exports.iterdir())]
    again.exports.resume(again.store.steps())
    again.wait()
    assert again.kinds() == [(kind, n) for n in (10, 30, 40) for kind in ("export_started", done)]
    assert written == [path.stat().st_ino for path in sorted(owner.paths.step_exports.iterdir())]
    names = [f"step_0000{n}" for n in (10, 20, 30, 40)]
    assert json.loads(owner.paths.after_export.read_text())["done"] == names
    again.reach(20)  # made again, by a run that went back: another export
    assert json.loads(owner.paths.after_export.read_text())["done"] == [f"step_0000{n}" for n in (10, 30, 40)]
    for one in (owner, again):
        one.exports.close()


_TRAINER = """
import sys
from pathlib import Path
from bapo_megatron.checkpoint.exports import StepExports
from bapo_megatron.runtime.run_paths import RunPaths
exports = StepExports(RunPaths(Path(sys.argv[1])), Path(sys.argv[2]), 10, print)
exports.resume([10])
print("begun", exports._process.pid, flush=True)
sys.stdin.read()
"""


@contextmanager
def trainer(run_dir: Path, model: Path) -> Iterator[psutil.Process]:
    """A process that has the export of step 10 made, which is yielded; killed at the end of the block."""
    command = [sys.executable, "-c", _TRAINER, str(run_dir), str(model)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        told = next(line for line in process.stdout if line.startswith("begun"))
        yield psutil.Process(int(told.split()[1]))
        os.kill(process.pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_kill_of_the_trainer_at_any_moment_ends_it_and_the_next_run_makes_it_whole(tmp_path: Path) -> None:
    big = save_random_model(tmp_path / "hf", **BIG)
    to_megatron(big, tmp_path / "megatron")
    run_dir = tmp_path / "run"
    owner = Owner(run_dir, big, tmp_path / "megatron/release")
    owner.reach(10)
    start = time.monotonic()
    owner.wait()
    took = time.monotonic() - start
    whole = folder_bytes(owner.paths.step_export(10))
    unfinished = 0
    for share in (0.0, 0.4, 0.8):
        shutil.rmtree(owner.paths.step_export(10), ignore_errors=True)
        with trainer(run_dir, big) as child:
            until(lambda: list(owner.paths.step_exports.glob(".step_*.tmp")))  # it has begun
            time.sleep(share * took)
        child.wait(DEADLINE_S)
        if owner.paths.step_export(10).exists():
            assert folder_bytes(owner.paths.step_export(10)) == whole
        else:
            unfinished += 1
        owner.exports.resume([10])
        owner.wait()
        assert folder_bytes(owner.paths.step_export(10)) == whole
        assert [path.name for path in owner.paths.step_exports.iterdir()] == ["step_000010"]
    assert unfinished > 0
    owner.exports.close()


def run_with(owner: Owner) -> Run:
    config = run_config(steps=20)
    run = run_of(config, None, UpdateLoss(config.algorithm), owner.store)
    run.exports = owner.exports
    return run


def test_the_loop_offers_what_is_whole(owner: Owner, policy: Path, halted: psutil.Process) -> None:
    run = run_with(owner)
    owner.store.begin((20, 0), copy_of(policy), {})
    finalize_checkpoint(run, wait=True)  # returns, though the export of step 10 does not continue
    assert owner.exports.is_using(20)
    owner.store.begin((20, 2), copy_of(policy), {})
    finalize_checkpoint(run, wait=True)
    assert owner.kinds() == [("export_started", 10)]
    assert owner.checkpoints() == ["step_000010", "step_000020", "step_000020_update_002"]
    halted.resume()
    until(lambda: ("export_started", 20) in owner.kinds() or finalize_checkpoint(run))


def test_a_run_s_end_waits(owner: Owner, halted: psutil.Process, monkeypatch: pytest.MonkeyPatch) -> None:
    owner.reach(20)

    def wake(seconds: float) -> None:
        if halted.is_running():
            halted.resume()
        time.sleep(seconds / 100)

    monkeypatch.setattr("bapo_megatron.commands.train.sleep", wake)
    wait_for_exports(run_with(owner))
    done = [step for kind, step in owner.kinds() if kind == "export_done"]
    assert done == [10, 20]
    assert owner.checkpoints() == ["step_000020"]


def test_who_waits_at_the_end_can_be_told_to_stop(owner: Owner, halted: psutil.Process) -> None:
    run = run_with(owner)
    run.preemption = Asked(at=1)  # type: ignore[assignment]
    owner.reach(20)
    with pytest.raises(Preempted, match="saved after step 20"):
        wait_for_exports(run)
