"""Layout reference files: exact round trip, and errors for damaged ones."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from bapo_megatron.commands.verify import layout_reference as module
from bapo_megatron.commands.verify.check import model_digests
from bapo_megatron.commands.verify.layout_reference import (
    identity_differences,
    read_layout_reference,
    write_layout_reference,
)
from bapo_megatron.errors import ConfigError
from tests.support.layout_references import handmade

POLICY = Path(__file__).parents[3] / "recipes/demo/policy"


def test_round_trip(tmp_path: Path) -> None:
    written = handmade()
    write_layout_reference(tmp_path / "c.npz", written)
    read = read_layout_reference(tmp_path / "c.npz")
    assert (read.identity, read.made) == (written.identity, written.made)
    for one, two in zip(read.samples, written.samples, strict=True):
        for item in dataclasses.fields(one):
            ours, theirs = getattr(one, item.name), getattr(two, item.name)
            np.testing.assert_array_equal(ours, theirs)
            assert getattr(ours, "dtype", None) == getattr(theirs, "dtype", None)
    for name in ("log_probs", "entropies"):
        for ours, theirs in zip(getattr(read.tokens, name), getattr(written.tokens, name), strict=True):
            np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(read.totals.sums, written.totals.sums)
    assert dataclasses.replace(read.totals, sums=None) == dataclasses.replace(written.totals, sums=None)
    assert [path.name for path in tmp_path.iterdir()] == ["c.npz"]


@pytest.mark.parametrize("part", [0.0, 0.1, 0.5, 0.99])
def test_a_truncated_file(part: float, tmp_path: Path) -> None:
    path = tmp_path / "c.npz"
    write_layout_reference(path, handmade())
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * part)])
    with pytest.raises(ConfigError, match="is damaged or is none"):
        read_layout_reference(path)


def test_a_changed_byte(tmp_path: Path) -> None:
    path = tmp_path / "c.npz"
    write_layout_reference(path, handmade())
    content = bytearray(path.read_bytes())
    place = content.index(np.float32(-7).tobytes())  # the last log-prob
    content[place] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(ConfigError, match="is damaged or is none"):
        read_layout_reference(path)


def test_columns_of_unequal_length(tmp_path: Path) -> None:
    whole = handmade()
    tokens = dataclasses.replace(whole.tokens, log_probs=whole.tokens.log_probs[:1])
    write_layout_reference(tmp_path / "c.npz", dataclasses.replace(whole, tokens=tokens))
    with pytest.raises(ConfigError, match="2 numbers where 5 belong"):
        read_layout_reference(tmp_path / "c.npz")


def test_a_damaged_and_a_missing_file(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no certificate")
    with pytest.raises(ConfigError, match=r"notes\.txt is damaged or is none"):
        read_layout_reference(tmp_path / "notes.txt")
    with pytest.raises(ConfigError, match="does not exist; make one with --save"):
        read_layout_reference(tmp_path / "absent.npz")


def test_another_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FORMAT", 2)
    write_layout_reference(tmp_path / "c.npz", handmade())
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="has format 2, this version of the program reads 1"):
        read_layout_reference(tmp_path / "c.npz")


def test_differences_of_identity_are_listed() -> None:
    one = handmade()
    assert identity_differences(one, dict(one.identity)) == []
    other = {"model.weights_sha256": "cd", "canary.seed": 0, "canary.tokens": 9}
    assert identity_differences(one, other) == [
        "canary.tokens: None in the certificate, 9 here",
        "model.weights_sha256: 'ab' in the certificate, 'cd' here",
    ]


def test_digests_tell_models_apart(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(POLICY, tmp_path / "model"))
    before = model_digests(folder)
    assert before == model_digests(POLICY)
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "model.safetensors").write_bytes(content)
    changed = model_digests(folder)
    assert changed["weights_sha256"] != before["weights_sha256"]
    assert changed["config_sha256"] == before["config_sha256"]
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rope_theta": 2.0}))
    assert model_digests(folder)["config_sha256"] != before["config_sha256"]
