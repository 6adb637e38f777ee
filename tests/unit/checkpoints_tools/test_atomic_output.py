"""An output is whole or absent: kills at every moment, full disks, two runs at once, somebody's folders."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bapo_megatron.errors import ConfigError
from bapo_megatron.runtime import written_folders
from bapo_megatron.runtime.written_folders import temporary_folder, write_mark
from checkpoints_tools import Settings
from checkpoints_tools.core import atomic_output, copying
from checkpoints_tools.core.atomic_output import check_space
from checkpoints_tools.formats.locate import open_checkpoint
from tests.support.checkpoint_models import folder_bytes, save_random_model
from tests.unit.checkpoints_tools.conftest import OVERWRITE, Convert, in_a_child


def die_at(moment: int, *touched: Path) -> None:
    """SIGKILL this process when it is about to touch one of these folders for the ``moment``-th time."""
    os.fsync = lambda descriptor: None  # slow, and only a power failure could tell
    left, names = moment, [str(path) for path in touched]

    def count(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        if (event == "open" or event.startswith("os.")) and any(name in str(arguments) for name in names):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


def moments(convert: Convert, output: Path, settings: Settings, *touched: Path) -> Iterator[int]:
    """Every moment at which a conversion touches these folders, each after it was killed there."""
    moment = 1
    while True:

        def work() -> None:
            die_at(moment, *touched)  # noqa: B023
            convert(output, settings)

        status = in_a_child(work)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            return
        yield moment
        moment += 1


@pytest.mark.slow
def test_a_kill_leaves_the_whole_output_or_none(convert: Convert, model: Path, tmp_path: Path) -> None:
    convert(tmp_path / "whole", Settings())
    whole = folder_bytes(tmp_path / "whole")
    output = tmp_path / "output"
    finished, kills = False, 0
    for _ in moments(convert, output, Settings(), tmp_path):
        kills += 1
        if output.exists():
            assert folder_bytes(output) == whole
            shutil.rmtree(output)
            finished = True
        # What is left cannot be opened, even by one who knows the model, or all of its weights are there.
        left = temporary_folder(output)
        if (left / "config.json").exists() or (left / "release/.metadata").exists():
            assert folder_bytes(left) == whole
        for path in (left, left / "release"):
            try:
                open_checkpoint(path, reference=model)
            except ConfigError:
                continue
            ends = (".safetensors", ".distcp", "model_optim_rng.pt")
            weights = {n: data for n, data in whole.items() if n.endswith(ends)}
            assert weights.items() <= folder_bytes(left).items()
    assert kills > 20
    assert finished, "a kill after the rename was among the moments"
    assert folder_bytes(output) == whole
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.slow
def test_a_kill_while_replacing_leaves_the_old_or_the_new_output(convert: Convert, tmp_path: Path) -> None:
    output = tmp_path / "output"
    convert(output, Settings())
    new = folder_bytes(output)
    config = next(output.rglob("config.json"))
    changed = config.read_bytes().replace(b" 512", b" 256")
    config.write_bytes(changed)
    write_mark(output, atomic_output.WRITER)
    old = folder_bytes(output)
    assert old != new
    seen = set()
    # What it does in its temporary folder, beside them, is killed above.
    for _ in moments(convert, output, OVERWRITE, output, written_folders._replaced_folder(output)):
        # As the next run finds it.
        found = folder_bytes(atomic_output.check_output(output, True, []))
        assert found in (old, new)
        seen.add(found == new)
        config.write_bytes(changed)
        write_mark(output, atomic_output.WRITER)
    assert seen == {False, True}
    assert folder_bytes(output) == new
    assert [path.name for path in tmp_path.iterdir()] == ["output"]


def test_a_term_signal_cleans_up(tmp_path: Path) -> None:
    big = save_random_model(tmp_path / "hf", hidden_size=1024, intermediate_size=2048, vocab_size=5000)
    output = tmp_path / "output"
    command = [sys.executable, "-m", "checkpoints_tools.cli", "to-megatron", str(big), str(output)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None and not temporary_folder(output).exists():
            time.sleep(0.001)
        process.terminate()
    assert process.returncode == 143
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_signal_before_the_new_folder_is_told_of_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = Path.mkdir

    def interrupted(path: Path, **named: bool) -> None:
        make(path, **named)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "mkdir", interrupted)
    with pytest.raises(KeyboardInterrupt), written_folders.new_folder(tmp_path / "output", "a test"):
        pytest.fail("it was interrupted before")
    assert not list(tmp_path.iterdir())


def test_a_lock_that_its_owner_has_deleted_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run before ends between this one's open and its lock: a third may have a lock of its own."""
    flock, lock = fcntl.flock, tmp_path / ".output.bapo.lock"

    def late(descriptor: int, how: int) -> None:
        lock.unlink()
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with (
        pytest.raises(ConfigError, match="another process"),
        atomic_output.atomic_output(tmp_path / "output"),
    ):
        pass


def test_two_runs_at_once(convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on NFS, which locks only what is open for writing: no folder."""
    flock = fcntl.flock

    def as_nfs(descriptor: int, how: int) -> None:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", as_nfs)
    output = tmp_path / "output"
    with atomic_output.atomic_output(output) as folder:
        (folder / "half").touch()
        with pytest.raises(ConfigError, match="another process is writing"):
            convert(output, Settings())
        assert (folder / "half").exists()
    assert list(tmp_path.iterdir()) == [output]


def test_without_locks_no_folder_of_another_run_is_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lustre mounted without flock."""

    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    output = tmp_path / "output"
    with atomic_output.atomic_output(output) as folder:
        (folder / "half").touch()
        with (
            pytest.raises(ConfigError, match=r"output\.bapo\.tmp is there, .* cannot lock files"),
            atomic_output.atomic_output(output),
        ):
            pass
    assert (output / "half").exists()


def test_too_little_space_is_seen_before(
    convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(ConfigError, match=r"needs [\d,]+ bytes and .* has 1,000 free"):
        convert(tmp_path / "new/output", Settings())
    assert list(tmp_path.iterdir()) == []
    check_space(tmp_path / "new/output", 1000)


@pytest.mark.parametrize(
    ("code", "error", "message"),
    [
        (errno.ENOSPC, ConfigError, "the disk is full: .* was not written, and nothing of it was left"),
        (errno.EDQUOT, ConfigError, "was not written, and nothing of it was left"),
        (errno.EFBIG, ConfigError, "larger than the system allows: .* nothing of it was left"),
        (errno.EIO, OSError, "Input/output error"),
    ],
)
def test_a_disk_that_fills_up_or_breaks(
    code: int,
    error: type[Exception],
    message: str,
    convert: Convert,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = iter(range(1000))
    for name in ("pwritev", "copy_file_range"):
        original = getattr(os, name)

        def write(*arguments: object, original: Callable[..., int] = original) -> int:
            if next(calls) > 5:
                raise OSError(code, os.strerror(code))
            return original(*arguments)

        monkeypatch.setattr(copying.os, name, write)
    with pytest.raises(error, match=message):
        convert(tmp_path / "output", Settings())
    assert list(tmp_path.iterdir()) == []
