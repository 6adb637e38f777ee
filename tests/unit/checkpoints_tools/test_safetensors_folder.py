"""Files of tensors: errors of safetensors headers name file and tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bapo_megatron.errors import CheckpointError
from bapo_megatron.hf.blocks import Block
from bapo_megatron.hf.safetensors_folder import read_safetensors, read_safetensors_folder
from bapo_megatron.hf.weight_files import INDEX


def write(path: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(begin: int, end: int, shape: object = (2, 3), dtype: object = "BF16") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_where_the_tensors_lie(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"b": torch.zeros(5), "a": torch.ones(2, 3, dtype=torch.bfloat16)}, path)
    data = path.stat().st_size - 20 - 12
    b, a = read_safetensors(path)
    assert (b.name, b.dtype, b.shape, b.blocks) == ("b", "F32", (5,), (Block(0, 5, 0, 1, path, data, 4),))
    assert (a.name, a.dtype, a.shape) == ("a", "BF16", (2, 3))
    assert a.blocks == (Block(0, 2, 0, 3, path, data + 20, 6),)


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"a": entry(0, 12)}, b"0" * 11, "file not fully covered"),
        ({"a": entry(0, 24, dtype="I32")}, b"0" * 24, "tensor a is of type 'I32'; supported are BF16"),
        (b"[" * 100_000, b"", "invalid JSON in header.*copy it again"),
    ],
)
def test_a_header_that_is_wrong(header: object, data: bytes, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "model.safetensors", header, data)
    with pytest.raises(CheckpointError, match=message) as error:
        read_safetensors(path)
    assert str(path) in str(error.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for file, name in (("one", "a"), ("two", "b")):
        save_file({name: torch.zeros(2)}, tmp_path / f"{file}.safetensors")
    write_index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    return tmp_path


def write_index(folder: Path, weight_map: object) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def test_files_that_the_index_does_not_list_are_left_alone(folder: Path) -> None:
    (folder / "consolidated.safetensors").write_bytes(b"of another program")
    assert set(read_safetensors_folder(folder)) == {"a", "b"}


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda f: write_index(f, {"a": "one.safetensors"}), None),
        (
            lambda f: write_index(f, {"a": "two.safetensors", "b": "two.safetensors"}),
            "two.safetensors holds no tensor a, which",
        ),
        (
            lambda f: save_file({"b": torch.zeros(2), "a": torch.zeros(2)}, f / "two.safetensors"),
            "two.safetensors holds tensor a, which .* does not place there",
        ),
        (
            lambda f: (f / "two.safetensors").unlink(),
            r"two.safetensors, which holds b by the index, is missing: copy it",
        ),
        (lambda f: write_index(f, {"a": "../one.safetensors"}), "names no file beside it"),
        (lambda f: write_index(f, []), "weight_map is not a table"),
        (lambda f: (f / INDEX).write_text("{}"), "cannot be read: KeyError"),
        (lambda f: (f / INDEX).write_bytes(b"\xff"), "cannot be read"),
        (lambda f: save_file({"a": torch.zeros(2)}, f / "model.safetensors"), "holds both"),
    ],
)
def test_an_index_that_disagrees(harm: Callable[[Path], object], message: str | None, folder: Path) -> None:
    harm(folder)
    if message is None:
        assert set(read_safetensors_folder(folder)) == {"a"}
        return
    with pytest.raises(CheckpointError, match=message):
        read_safetensors_folder(folder)
