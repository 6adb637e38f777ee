"""Writer of torch archives without torch: torch and the pickle module read them."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from checkpoints_tools.archives.torch_archive import (
    ALIGNMENT,
    Call,
    Instance,
    Name,
    Persistent,
    dumps,
    object_archive,
    tensor_archive,
)
from tests.support.checkpoint_models import TYPES


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


def test_archives_are_zip_files() -> None:
    """Of which other programs check the checksums, but for that of a tensor's bytes."""
    archive = tensor_archive("F32", (2,), 0)
    whole = zipfile.ZipFile(io.BytesIO(archive.before + bytes(8) + archive.after))
    names = ["archive/data.pkl", "archive/byteorder", "archive/data/0", "archive/version"]
    assert whole.namelist() == names
    assert [whole.read(name) for name in (names[1], names[3])] == [b"little", b"3\n"]
    assert whole.read(names[0]).startswith(b"\x80\x02")
    assert zipfile.ZipFile(io.BytesIO(object_archive([None]))).testzip() is None


def test_an_entry_of_more_than_four_gigabytes_is_refused() -> None:
    assert tensor_archive("BF16", (2**31 - 2**15,), 0).payload == 2**32 - 2**16
    with pytest.raises(ValueError, match="4294967296 bytes are too many"):
        tensor_archive("BF16", (2**31,), 0)


VALUES = [None, True, False, 0, 255, 256, -1, 2**31 - 1, 2**31, -(2**31), 2**62, -(2**62), 1e-6, "", "\u00e9"]


def test_values_are_those_that_pickle_reads() -> None:
    value = {"list": VALUES, "tuple": tuple(VALUES), "empty": ({}, [], ()), 5: {"deep": [[1]]}}
    assert pickle.loads(dumps(value)) == value
    assert torch.load(io.BytesIO(object_archive(value)), weights_only=True) == value


def test_names_calls_and_instances() -> None:
    ordered = Call(Name("collections", "OrderedDict"), ([("a", 1)],))
    namespace = Instance(Name("types", "SimpleNamespace"), {"x": Name("collections", "OrderedDict")})
    bare = Instance(Name("types", "SimpleNamespace"), None)
    found = pickle.loads(dumps([ordered, namespace, bare]))
    assert found == [OrderedDict(a=1), SimpleNamespace(x=OrderedDict), SimpleNamespace()]


def test_persistent_ids() -> None:
    class Reader(pickle.Unpickler):
        def persistent_load(self, key: Any) -> Any:
            return ("known", key)

    assert Reader(io.BytesIO(dumps([Persistent(("storage", 3))]))).load() == [("known", ("storage", 3))]


def test_what_cannot_be_written_is_refused() -> None:
    with pytest.raises(TypeError, match="is not written to pickles"):
        dumps({1, 2})
