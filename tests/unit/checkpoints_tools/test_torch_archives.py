"""Archives of torch.save, read and written without torch: tensors lie where it has them, damage is named."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bapo_megatron.errors import CheckpointError
from checkpoints_tools.archives.pickle_allow_list import DTYPE_BYTES, DTYPES
from checkpoints_tools.archives.torch_archive import ALIGNMENT, dumps, object_archive, tensor_archive
from checkpoints_tools.archives.torch_zip import StoredTensor, read_archive
from tests.support.checkpoint_models import TYPES


def save(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def read(folder: Path, data: bytes) -> Any:
    """What the reader finds in a file of these bytes."""
    path = folder / "a.pt"
    path.write_bytes(data)
    with path.open("rb") as stream:
        return read_archive(stream, path, "the state")


def content(stored: StoredTensor) -> bytes:
    nbytes = DTYPE_BYTES[stored.dtype]
    for size in stored.shape:
        nbytes *= size
    return stored.file.read_bytes()[stored.position : stored.position + nbytes]


@pytest.mark.parametrize("name", DTYPES)
def test_every_type_is_found(name: str, tmp_path: Path) -> None:
    tensor = torch.arange(24).reshape(2, 3, 4).to(getattr(torch, name))
    stored = read(tmp_path, save(tensor))
    assert (stored.dtype, stored.shape, stored.contiguous) == (DTYPES[name], (2, 3, 4), True)
    assert content(stored) == bytes(tensor.view(torch.uint8).numpy().tobytes())


def test_tensors_in_a_state_are_found_and_the_rest_is_kept(tmp_path: Path) -> None:
    whole = torch.arange(40, dtype=torch.float32)
    state = {
        "view": whole[8:20].view(3, 4),
        "parameter": torch.nn.Parameter(whole[20:24]),
        "transposed": whole[:6].view(2, 3).T,
        "column": whole[:6].view(2, 3)[:, :1],
        "one row": whole.as_strided((1, 3), (99, 1)),
        "empty": torch.zeros(0, 5),
        "number": torch.tensor(7),
        "nested": [(1, {"deep": whole[39:]}), "text", None, 2.5],
    }
    found = read(tmp_path, save(state))
    assert content(found["view"]) == whole[8:20].numpy().tobytes()
    assert content(found["parameter"]) == whole[20:24].numpy().tobytes()
    assert content(found["nested"][0][1]["deep"]) == whole[39:].numpy().tobytes()
    assert content(found["number"]) == (7).to_bytes(8, "little")
    assert found["nested"][1:] == ["text", None, 2.5]
    keys = ("view", "one row", "empty", "number", "transposed", "column")
    assert [found[key].contiguous for key in keys] == [True, True, True, True, False, False]


Change = Callable[[str, bytes], tuple[str, bytes] | None]


def rezip(data: bytes, change: Change, method: int = zipfile.ZIP_STORED) -> bytes:
    """The archive with other members."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w", method) as new:
        for name in old.namelist():
            if (changed := change(name, old.read(name))) is not None:
                new.writestr(*changed)
    return out.getvalue()


def only(suffix: str, edit: Callable[[bytes], bytes] | None) -> Change:
    def change(name: str, data: bytes) -> tuple[str, bytes] | None:
        if not name.endswith(suffix):
            return name, data
        return None if edit is None else (name, edit(data))

    return change


WHOLE = save({"weight": torch.arange(100, dtype=torch.float32).view(10, 10)})


def in_pickle(old: bytes, new: bytes) -> bytes:
    return rezip(WHOLE, only("data.pkl", lambda data: data.replace(old, new)))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not an archive of torch.save"),
        (WHOLE[:-30], "not an archive of torch.save"),
        (WHOLE[:200], "not an archive of torch.save"),
        (b"not a zip file" * 10, "not an archive of torch.save"),
        (rezip(WHOLE, lambda *member: member, zipfile.ZIP_DEFLATED), "is compressed"),
        (rezip(WHOLE, only("data.pkl", None)), "it has 0 data.pkl"),
        (rezip(WHOLE, only("data/0", None)), "no member data/0"),
        (rezip(WHOLE, only("data/0", lambda data: data[:-4])), "396 bytes; 100 elements of F32 take 400"),
        (rezip(WHOLE, only("byteorder", lambda data: b"big")), "byte order b'big'"),
        (rezip(WHOLE, only("data.pkl", lambda data: data[:-3])), "damaged pickle"),
        (in_pickle(b"K\x0aK\x0a", b"K\x0aK\x0b"), "beyond its"),
        (in_pickle(b"storage", b"STORAGE"), "unknown way"),
        (in_pickle(b"FloatStorage", b"QUInt8Storage"), "names torch"),
    ],
)
def test_damage_is_named(data: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"a\.pt.*{message}") as caught:
        read(tmp_path, data)
    assert "the state" in str(caught.value)


def test_a_zip_header_with_a_wrong_offset_is_named(tmp_path: Path) -> None:
    """The directory at the end says where an entry begins; there must be one, and it must fit."""
    with zipfile.ZipFile(io.BytesIO(WHOLE)) as archive:
        header = archive.getinfo("archive/data/0").header_offset
    broken = bytearray(WHOLE)
    broken[header : header + 4] = b"XXXX"
    with pytest.raises(CheckpointError, match="data/0 is not where the archive says"):
        read(tmp_path, broken)
    broken[header : header + 4] = WHOLE[header : header + 4]
    broken[header + 28 : header + 30] = b"\xff\xff"  # of its extra field: longer than the file
    with pytest.raises(CheckpointError, match="data/0 is not where the archive says"):
        read(tmp_path, broken)


def test_a_member_of_two_lengths_is_named(tmp_path: Path) -> None:
    """In the directory: as stored, and as it would be unpacked."""
    broken = bytearray(WHOLE)
    record = broken.rindex(b"archive/data/0") - 46
    assert broken[record : record + 4] == b"PK\1\2"
    broken[record + 20 : record + 24] = (300).to_bytes(4, "little")
    with pytest.raises(CheckpointError, match="member data/0 is compressed"):
        read(tmp_path, broken)


def test_a_part_that_occurs_a_billion_times_is_read_once(tmp_path: Path) -> None:
    value: Any = [torch.zeros(1)]
    for _ in range(30):
        value = [value, value]
    found = read(tmp_path, save(value))
    assert found[0] is found[1]


def test_a_self_containing_object_is_damage(tmp_path: Path) -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(CheckpointError, match="damaged"):
        read(tmp_path, save(value))


@pytest.mark.parametrize("position", [0, 1, 63, 64, 1000])
@pytest.mark.parametrize(("dtype", "shape"), [("BF16", (3, 5)), ("F16", (7,)), ("F32", (1, 2, 3))])
def test_torch_loads_an_archive(dtype: str, shape: tuple[int, ...], position: int) -> None:
    expected = torch.randn(shape).to(TYPES[dtype])
    payload = bytes(expected.view(torch.uint8).numpy())
    archive = tensor_archive(dtype, shape, position)
    assert (position + len(archive.before)) % ALIGNMENT == 0
    assert archive.payload == len(payload)
    whole = archive.before + payload + archive.after
    assert len(whole) == archive.nbytes
    loaded = torch.load(io.BytesIO(whole), weights_only=True)
    assert loaded.dtype == expected.dtype
    assert torch.equal(loaded, expected)


VALUES = [None, True, False, 0, 255, 256, -1, 2**31 - 1, 2**31, -(2**31), 2**62, -(2**62), 1e-6, "", "\u00e9"]


def test_values_are_those_that_pickle_reads() -> None:
    value = {"list": VALUES, "tuple": tuple(VALUES), "empty": ({}, [], ()), 5: {"deep": [[1]]}}
    assert pickle.loads(dumps(value)) == value
    archive = io.BytesIO(object_archive(value))
    assert torch.load(archive, weights_only=True) == value
    assert zipfile.ZipFile(archive).testzip() is None
