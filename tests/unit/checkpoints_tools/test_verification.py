"""Two checkpoints are equal if every bit is, whatever their formats; else the first difference is named.

And `verify RUN` finds every changed bit of a run's checkpoint by its manifest, without a copy.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bapo_megatron.errors import CheckpointError
from checkpoints_tools import cli, reshard, to_megatron, verify, verify_files
from checkpoints_tools.core import copying
from tests.support.checkpoint_models import load_tensors, save_changed, save_random_model, save_tensors
from tests.support.legacy_checkpoints import save_legacy
from tests.unit.checkpoints_tools.conftest import RUN_FILES, make_step

LAYER = "model.layers.1."


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    return save_random_model(tmp_path / "hf", "qwen2", files=2)


@pytest.fixture
def others(hf: Path, tmp_path: Path) -> dict[str, Path]:
    """The same model in other formats and cuts."""
    to_megatron(hf, tmp_path / "torch_dist", grid=3)
    save_legacy(hf, tmp_path / "legacy", tensor=2, pipeline=3)
    reshard(tmp_path / "torch_dist", tmp_path / "padded", grid=5, vocabulary_multiple=64)
    return {name: tmp_path / name for name in ("torch_dist", "legacy", "padded")}


def test_all_formats_are_equal(hf: Path, others: dict[str, Path]) -> None:
    tensors = load_tensors(hf)
    for other in others.values():
        for first, second in ((hf, other), (other, others["legacy"])):
            found = verify(first, second, digests=True)
            assert found.equal, found
            assert (found.tensors, found.nbytes) == (len(tensors), sum(t.nbytes for t in tensors.values()))
            for name, tensor in tensors.items():
                digest = hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest()
                assert found.digests[name] == (digest, digest)


@pytest.mark.parametrize("band", [1 << 20, 96, 1])
@pytest.mark.parametrize("name", [f"{LAYER}self_attn.k_proj.weight", f"{LAYER}mlp.down_proj.weight"])
def test_one_flipped_bit_is_found(
    name: str, band: int, hf: Path, others: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """However few rows are compared at a time."""
    tensors = load_tensors(hf)
    changed = tensors[name].clone().view(torch.int16)
    row, column = changed.shape[0] - 2, 17
    before = int(changed[row, column]) & 0xFFFF
    changed[row, column] ^= 0x40
    changed[row + 1, 3] ^= 1  # a later one, which is not the first
    damaged = save_changed(hf, tmp_path / "damaged", **{name: changed.view(torch.bfloat16)})
    monkeypatch.setattr(copying, "BUFFER_BYTES", band)
    monkeypatch.setattr("checkpoints_tools.core.comparing.BUFFER_BYTES", band)
    for other in (hf, *others.values()):
        found = verify(other, damaged, digests=True)
        [difference] = found.differences
        assert (difference.tensor, difference.kind) == (name, "value")
        assert f"row {row}, column {column}" in difference.message
        assert f"(0x{before:04x}) in the first" in difference.message
        assert f"(0x{before ^ 0x40:04x}) in the second" in difference.message
        unequal = {key for key, (here, there) in found.digests.items() if here != there}
        assert unequal == {name}
        digest = hashlib.sha256(changed.view(torch.uint8).numpy().tobytes()).hexdigest()
        assert found.digests[name][1] == digest


@pytest.mark.parametrize(
    ("dtype", "bits", "shown"),
    [
        ("BF16", 0x7FC1, "1.5 (0x3fc0) in the first, nan (0x7fc1) in the second"),
        ("F16", 0x3C01, "1.5 (0x3e00) in the first, 1.00097656 (0x3c01) in the second"),
        ("F32", 0x3F800001, "1.5 (0x3fc00000) in the first, 1.00000012 (0x3f800001) in the second"),
    ],
)
def test_values_are_shown_as_numbers(dtype: str, bits: int, shown: str, tmp_path: Path) -> None:
    first, second = (save_random_model(tmp_path / name, dtype=dtype) for name in ("first", "second"))
    tensors = load_tensors(first)
    tensors["model.norm.weight"][5] = 1.5
    save_tensors(first, tensors)
    tensors["model.norm.weight"].view(torch.int32 if dtype == "F32" else torch.int16)[5] = bits
    save_tensors(second, tensors)
    [difference] = verify(first, second).differences
    assert difference.message == f"differs first at element 5: {shown}"


def test_a_missing_tensor_another_type_and_another_shape(hf: Path, tmp_path: Path) -> None:
    tensors = load_tensors(hf)
    bias, norm = f"{LAYER}self_attn.q_proj.bias", "model.norm.weight"
    changes = {norm: tensors[norm].float(), "model.extra": tensors[bias], bias: None}
    changes["lm_head.weight"] = tensors["lm_head.weight"][:-1].clone()
    other = save_changed(hf, tmp_path / "other", **changes)
    found = {d.tensor: (d.kind, d.message) for d in verify(hf, other).differences}
    assert found == {
        bias: ("missing", "is missing in the second"),
        "model.extra": ("missing", "is missing in the first"),
        norm: ("type", "is of type BF16 in the first, F32 in the second"),
        "lm_head.weight": ("shape", "has shape [101, 48] in the first, [100, 48] in the second"),
    }


def test_a_copy_of_a_tied_embedding_does_not_count(tmp_path: Path) -> None:
    hf = save_random_model(tmp_path / "hf", "llama", tie_word_embeddings=True)
    to_megatron(hf, tmp_path / "torch_dist")
    tensors = load_tensors(hf)
    assert "lm_head.weight" not in tensors
    save_tensors(hf, {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    assert verify(hf, tmp_path / "torch_dist").equal
    save_tensors(hf, {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].flip(0).contiguous()})
    for refuse in (lambda: verify(hf, tmp_path / "torch_dist"), lambda: to_megatron(hf, tmp_path / "out")):
        with pytest.raises(CheckpointError, match=r"ties lm_head.weight to .* differs first .*: set \"tie_"):
            refuse()


def test_the_command(
    hf: Path, others: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["verify", str(hf), str(others["legacy"])]) == 0
    assert "equal: 39 tensors" in capsys.readouterr().out
    shard = hf / "model-00001-of-00002.safetensors"
    tensors = load_file(shard)
    for tensor in tensors.values():
        tensor.view(torch.uint8)[-1] ^= 1
    save_tensors(tmp_path / "hf", {**load_tensors(hf), **tensors}, 2)
    assert cli.run(["verify", str(hf), str(others["legacy"])]) == 1
    out = capsys.readouterr().out
    assert "... and" in out
    assert f"different: {len(tensors)} of 39 tensors" in out
    assert cli.run(["verify", str(hf), str(others["legacy"]), "--json", "--digests"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert len(found["differences"]) == len(tensors)
    assert set(found["digests"]) == set(load_tensors(hf))
    assert cli.run(["verify", str(hf), str(tmp_path / "absent")]) == 2
    assert "absent is not a folder" in capsys.readouterr().err


# --- the files of one checkpoint ---


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with checkpoints of the steps 10 and 20."""
    for step in (10, 20):
        make_step(tmp_path / "run", step)
    return tmp_path / "run"


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def test_a_whole_checkpoint_is_whole(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (run, run / "checkpoints/step_000020", run / "checkpoints/step_000020/policy"):
        assert cli.run(["verify", str(path)]) == 0
        assert "whole: 3 files, 3,000,010 bytes, every bit as it was written" in capsys.readouterr().out


@pytest.mark.parametrize("name", list(RUN_FILES))
@pytest.mark.parametrize("place", [0, -1])
def test_one_flipped_bit_of_a_file_is_found(
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


def test_what_has_no_manifest_needs_a_second_checkpoint(model: Path, checkpoint: Path) -> None:
    for path in (model, checkpoint):
        with pytest.raises(CheckpointError, match=r"has no manifest\.json beside it.* second checkpoint"):
            verify_files(path)


def test_a_file_that_is_cut_or_gone_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "checkpoints/step_000020/trainer.json").write_text("{")
    for arguments in ([str(run), "--step", "20"], [str(run)], [str(run / "checkpoints")]):
        assert cli.run(["verify", *arguments]) == 2  # and does not say that the one before is whole
        told = capsys.readouterr()
        assert "trainer.json has 1 bytes instead of 2: the checkpoint is not whole" in told.err
        assert told.out == ""
