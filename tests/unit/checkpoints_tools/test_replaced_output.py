"""``--overwrite``: only outputs of bapo-ckpt are replaced, and a kill leaves the old or the new one."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from bapo_megatron.errors import ConfigError
from bapo_megatron.runtime.written_folders import MARK
from checkpoints_tools import to_hf, to_megatron
from checkpoints_tools.core import atomic_output
from tests.unit.checkpoints_tools.conftest import OVERWRITE, Convert, in_a_child

Target = Callable[[Path, Path], object]


def run_folder(path: Path, _: Path) -> None:
    """As a run has it, config.json among its files."""
    (path / "journal").mkdir(parents=True)
    (path / "journal/step_000001.npz").touch()
    (path / "config.json").write_text("{}")
    (path / "metrics.jsonl").write_text("{}")


def edited(edit: Callable[[Path], object]) -> Target:
    """A copy of what a conversion has written, with an edit."""

    def make(path: Path, written: Path) -> None:
        shutil.copytree(written, path)
        edit(path)

    return make


def replace_text(path: Path, old: bytes, new: bytes) -> None:
    path.write_bytes(path.read_bytes().replace(old, new))


def instead(make: Callable[[Path], object], name: str) -> Target:
    """Something else under the name of a file."""
    return edited(lambda folder: ((folder / name).unlink(), make(folder / name)))


CONFIG, TOKENIZER = "release/hf/config.json", "release/hf/tokenizer.json"
TARGETS: list[tuple[Target, str]] = [
    (run_folder, "has no .*an earlier version"),
    (
        edited(lambda folder: (folder / "release/thesis.tex").touch()),
        r"holds release/thesis\.tex, which was put",
    ),
    (
        edited(lambda folder: replace_text(folder / CONFIG, b"}", b"} ")),
        r"config\.json, which was changed since",
    ),
    (
        instead(lambda path: path.symlink_to("config.json"), TOKENIZER),
        r"hf/tokenizer\.json, which was put there",
    ),
    (
        edited(lambda folder: replace_text(folder / MARK, b'"bapo-ckpt"', b'"bapo"')),
        "was written by 'bapo', not by bapo-ckpt",
    ),
    (edited(lambda folder: (folder / MARK).unlink()), "has no .*an earlier version"),
    (edited(lambda folder: (folder / MARK).write_text("{")), "cannot be read"),
    (instead(os.mkfifo, MARK), "is not a plain file"),
    (lambda path, _: path.touch(), "is a link, a file or a device"),
    (lambda path, _: os.mkfifo(path), "is a link, a file or a device"),
    (lambda path, written: path.symlink_to(written), "is a link, a file or a device"),
]


@pytest.mark.parametrize(("make", "told"), TARGETS)
def test_foreign_files_are_never_replaced(
    make: Target, told: str, model: Path, checkpoint: Path, tmp_path: Path
) -> None:
    """Also a folder that appears while the output is being written."""
    make(tmp_path / "output", checkpoint)
    before = entries(tmp_path)
    with pytest.raises(ConfigError, match=rf"(?s)output .*/output .*{told}"):
        to_hf(checkpoint, tmp_path / "output", model, settings=OVERWRITE)
    assert entries(tmp_path) == before

    late = tmp_path / "late"
    to_megatron(model, late)
    with pytest.raises(ConfigError, match=told), atomic_output.atomic_output(late) as folder:
        (folder / "config.json").touch()
        shutil.rmtree(late)
        make(late, checkpoint)
        before = entries(late)
    assert entries(late) == before
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


def entries(path: Path) -> list[tuple[str, int, int]]:
    """All that is at ``path``, by name, kind and inode."""
    found = [path, *path.rglob("*")] if path.is_dir() and not path.is_symlink() else [path]
    return sorted((str(p), p.lstat().st_mode, p.lstat().st_ino) for p in found)


def test_a_home_folder_or_a_mount_point_is_no_output(
    convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with pytest.raises(ConfigError, match="is a mount point or your home folder"):
        convert(tmp_path / "home", OVERWRITE)
    with pytest.raises(ConfigError, match=r"/proc is a mount point or|lie in, one another"):
        convert(Path("/proc"), OVERWRITE)


def write(output: Path, text: str) -> None:
    with atomic_output.atomic_output(atomic_output.check_output(output, True, [])) as folder:
        (folder / "config.json").write_text(text)
        (folder / "weights").write_text(text)


@pytest.mark.parametrize("first", [MARK, "config.json", "weights"])
def test_a_kill_while_the_old_output_is_deleted_blocks_no_later_one(tmp_path: Path, first: str) -> None:
    """Whichever of its files was deleted first."""
    output = tmp_path / "output"
    write(output, "old")

    def killed() -> None:
        def dies(folder: Path, **_: object) -> None:
            os.unlink(folder / first)
            os.kill(os.getpid(), signal.SIGKILL)

        shutil.rmtree = dies  # type: ignore[assignment]
        write(output, "killed")

    assert os.WTERMSIG(in_a_child(killed)) == signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 3  # with the lock that it held
    write(output, "new")
    assert (output / "weights").read_text() == "new"
    assert list(tmp_path.iterdir()) == [output]


def test_an_old_output_that_cannot_be_deleted_fails_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on NFS while a server has a file of it open: the folder stays, however often it is deleted."""
    output = tmp_path / "output"
    write(output, "old")

    def busy(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise OSError(errno.EBUSY, "busy", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", busy)
        write(output, "new")
        write(output, "newer")
    assert (output / "weights").read_text() == "newer"
    assert "an old output, could not be deleted whole: delete it" in capsys.readouterr().err
    write(output, "last")
    assert list(tmp_path.iterdir()) == [output]
