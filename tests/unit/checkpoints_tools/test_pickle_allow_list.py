"""Safe unpickler: a global becomes a constant, container or inert record, or is refused; no code runs."""

from __future__ import annotations

import argparse
import collections
import os
import pickle
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.transformer.enums import AttnBackend

from bapo_megatron.errors import CheckpointError
from checkpoints_tools.archives.pickle_allow_list import PickledObject, load_pickle


class Attack:
    """Pickles into a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def test_builtin_values_come_back() -> None:
    value = {"a": [1, -(2**70), 2.5, None, True], "b": ("x", b"y", {3})}
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        if protocol > 2:  # before, bytes are pickled as a call of codecs.encode
            assert load_pickle(pickle.dumps(value, protocol), "x") == value


def test_types_and_sizes_become_names_and_tuples() -> None:
    value = (torch.bfloat16, torch.float32, torch.Size([2, 3]), collections.OrderedDict(a=1))
    assert load_pickle(pickle.dumps(value), "x") == ("BF16", "F32", (2, 3), {"a": 1})


def test_objects_become_inert_records() -> None:
    arguments = argparse.Namespace(tensor_model_parallel_size=2, attention_backend=AttnBackend.auto)
    record = load_pickle(pickle.dumps(arguments), "x")
    assert isinstance(record, PickledObject)
    assert record.class_name == "argparse.Namespace"
    assert record.field("tensor_model_parallel_size") == 2
    assert record.field("attention_backend").class_name == "megatron.core.transformer.enums.AttnBackend"
    assert record.field("attention_backend").arguments == (AttnBackend.auto.value,)
    assert record.field("no_such_field") is None


@pytest.mark.parametrize(
    "value", [np.zeros(3), np.float32(1.5), Path("/a"), signal.SIGTERM, torch.device("cpu")]
)
def test_megatrons_common_state_is_read(value: Any) -> None:
    assert isinstance(load_pickle(pickle.dumps(value), "x"), PickledObject)


@pytest.mark.parametrize(
    ("attack", "name"),
    [
        (Attack(os.system, "touch PROOF"), "posix.system"),
        (Attack(eval, "open('PROOF', 'w')"), "builtins.eval"),
        (Attack(exec, "open('PROOF', 'w')"), "builtins.exec"),
        (Attack(getattr, "x", "y"), "builtins.getattr"),
        (Attack(__import__, "os"), "builtins.__import__"),
        (Attack(open, "PROOF", "w"), "io.open"),
        (Attack(torch.load, "PROOF"), "torch.serialization.load"),
        (Attack(torch.hub.load, "PROOF"), "torch.hub.load"),
        (Attack(os.path.join, "a", "b"), "posixpath.join"),
    ],
)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_no_function_is_called(
    attack: Attack, name: str, protocol: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data = pickle.dumps({"weights": [1, attack]}, protocol)
    with pytest.raises(CheckpointError, match=r"evil\.pt names") as caught:
        load_pickle(data, "evil.pt")
    module, _, function = name.rpartition(".")
    assert function in str(caught.value)
    assert module.replace("builtins", "") in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_record_of_an_allowed_module_is_not_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's classes are not imported, so what their construction would do is not done."""
    called = []
    monkeypatch.setattr("megatron.core.config.set_experimental_flag", called.append)
    data = b"cmegatron.core.config\nset_experimental_flag\n(I01\ntR."
    assert load_pickle(data, "x").arguments == (True,)
    assert not called
    pickle.loads(data)
    assert called == [True]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "ends too early"),
        (pickle.dumps([1, 2, 3])[:-4], "damaged"),
        (b"\x80\x02]q\x00" + b"(K\x01K\x02", "ends too early"),
        (b"(i__main__\nAttack\n.", "names __main__.Attack"),  # INST
        (b"(c__main__\nAttack\no.", "names __main__.Attack"),  # OBJ
        (b"\x80\x04\x82\x01.", "unregistered extension"),  # EXT1
        (b"\x80\x04\x8d" + (2**62).to_bytes(8, "little") + b"ab.", "damaged"),  # a text of exabytes
        (b"]r\xff\xff\xff\x7f.", None),  # the memo's two billionth entry: C's unpickler takes 32 GB for it
        (b"ctorch\nSize\n}U\x01aK\x01sb.", "damaged"),  # sets attributes of tuple
        (b"cargparse\nNamespace\n}U\x01aK\x01sb.", "damaged"),  # of a record's class
        (b"cargparse\nNamespace\n(N}X\x05\x00\x00\x00stateK\x01sU\x00tb.", "damaged"),
        (b"(dNR.", "damaged"),
        (b"\x80\x04K\x01K\x02\x93.", "damaged"),  # a class named by numbers
        (b"Q.", "UnpicklingError|damaged|outside"),  # a persistent identifier, and an empty stack
        (b"I" + b"9" * 5000 + b"\n.", "damaged"),
    ],
)
def test_damage_is_one_message(data: bytes, reason: str | None) -> None:
    if reason is None:
        assert load_pickle(data, "file.pt") == []
        return
    with pytest.raises(CheckpointError, match="file.pt") as caught:
        load_pickle(data, "file.pt")
    assert any(word in str(caught.value) for word in reason.split("|"))


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02ccollections\nOrderedDict\nN\x85R.",
        b"\x80\x02cbuiltins\nset\n]\x85b.",  # attributes of a type
        b"\x80\x02cbuiltins\nset\nN}X\x01\x00\x00\x00aNs\x86b.",
        b"\x80\x02ccollections\nOrderedDict\n}b.",
        b"\x80\x02cargparse\nNamespace\nN}X\x0a\x00\x00\x00class_nameNs\x86b.",
        b"\x80\x02]}X\x01\x00\x00\x00aNsb.",  # and of a list
        b"\x80\x02cargparse\nNamespace\n)}X\x01\x00\x00\x00aNs\x92.",  # NEWOBJ_EX
        b"\x80\x02ctorch\nbfloat16\n)R.",  # calls a text
    ],
)
def test_what_no_pickler_writes_ends_in_one_message(data: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"file\.pt") as caught:
        load_pickle(data, "file.pt")
    assert len(str(caught.value)) < 400


def test_attributes_of_a_dictionary_do_not_count() -> None:
    """torch's state dictionaries have ``_metadata``; an attribute could take the place of a method."""
    data = b"\x80\x02ccollections\nOrderedDict\n)R}X\x05\x00\x00\x00itemsNsb."
    assert list(load_pickle(data, "x").items()) == []


def test_deeply_nested_values_are_read() -> None:
    assert load_pickle(b"\x80\x02" + b"]" * 50_000 + b"a" * 49_999 + b".", "x")
    assert load_pickle(
        b"\x80\x02cargparse\nNamespace\nq\x000" + b"N" + b"h\x00)\x81\x86" * 30_000 + b".", "x"
    )


def test_a_message_is_one_line_without_a_terminals_codes() -> None:
    name = b"os\x1b[2J" + b"x" * 10_000
    for data in (
        b"\x80\x04\x8c\x05\x0a\x1b[2J\x8c\x01a\x93.",
        b"\x80\x04X" + len(name).to_bytes(4, "little") + name + b"\x8c\x01a\x93.",
    ):
        with pytest.raises(CheckpointError, match="which no checkpoint needs; nothing was run") as caught:
            load_pickle(data, "file.pt")
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 500


def test_a_pickle_of_more_than_its_limit_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("checkpoints_tools.archives.pickle_allow_list.MOST_PICKLE_BYTES", 10)
    with pytest.raises(CheckpointError, match="too long"):
        load_pickle(pickle.dumps("a" * 20), "x")


def test_references_outside_the_pickle_need_a_reader() -> None:
    data = b"\x80\x02X\x01\x00\x00\x00aQ."
    assert load_pickle(data, "x", persistent=lambda key: key * 2) == "aa"
    with pytest.raises(CheckpointError, match="x refers to data outside"):
        load_pickle(data, "x")
