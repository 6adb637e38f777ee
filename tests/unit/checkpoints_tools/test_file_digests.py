"""`bapo-ckpt verify RUN` finds every changed bit of a run's checkpoint by its manifest, without a copy."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from bapo_megatron.errors import CheckpointError
from checkpoints_tools import cli, verify_files

FILES = {"policy/.metadata": b"metadata", "policy/__0_0.distcp": bytes(3_000_000), "trainer.json": b"{}"}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with checkpoints of the steps 10 and 20."""
    for step in (10, 20):
        folder = tmp_path / f"run/checkpoints/step_{step:06d}"
        (folder / "policy").mkdir(parents=True)
        for name, data in FILES.items():
            (folder / name).write_bytes(data)
        entries = {
            name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            for name, data in FILES.items()
        }
        (folder / "manifest.json").write_text(json.dumps({"step": step, "files": entries}))
    return tmp_path / "run"


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def test_a_whole_checkpoint_is_whole(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (run, run / "checkpoints/step_000020", run / "checkpoints/step_000020/policy"):
        assert cli.run(["verify", str(path)]) == 0
        assert "whole: 3 files, 3,000,010 bytes, every bit as it was written" in capsys.readouterr().out


@pytest.mark.parametrize("name", list(FILES))
@pytest.mark.parametrize("place", [0, -1])
def test_one_flipped_bit_is_found(
    name: str, place: int, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(run / "checkpoints/step_000020" / name, place)
    assert cli.run(["verify", str(run)]) == 1
    printed = capsys.readouterr().out
    assert f"step_000020/{name} is not what manifest.json says: it is damaged" in printed
    assert "damaged: 1 of 3 files" in printed
    assert cli.run(["verify", str(run), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["damaged"] == [name]
    assert verify_files(run, "10").damaged == ()


def test_what_has_no_manifest_needs_a_second_checkpoint(
    run: Path, model: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (model, checkpoint):
        with pytest.raises(CheckpointError, match=r"has no manifest\.json beside it.* second checkpoint"):
            verify_files(path)
    assert cli.run(["verify", str(run), "--digests"]) == 2
    assert "are for two checkpoints: give a second path" in capsys.readouterr().err


def test_a_file_that_is_cut_or_gone_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "checkpoints/step_000020/trainer.json").write_text("{")
    for arguments in ([str(run), "--step", "20"], [str(run)], [str(run / "checkpoints")]):
        assert cli.run(["verify", *arguments]) == 2  # and does not say that the one before is whole
        told = capsys.readouterr()
        assert "trainer.json has 1 bytes instead of 2: the checkpoint is not whole" in told.err
        assert told.out == ""


def test_a_manifest_without_digests_proves_nothing(run: Path) -> None:
    manifest = run / "checkpoints/step_000020/manifest.json"
    found = json.loads(manifest.read_text())
    del found["files"]["trainer.json"]["sha256"]
    manifest.write_text(json.dumps(found))
    with pytest.raises(CheckpointError, match=r"gives the size of trainer\.json alone, no SHA-256"):
        verify_files(run)
