"""Programs of pickle instructions, hostile names among them: the restricted unpickler gives plain values or
its one error, and imports and calls nothing."""

from __future__ import annotations

import pickle
import sys
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bapo_megatron.errors import CheckpointError
from checkpoints_tools.archives.pickle_allow_list import PickledObject, load_pickle

NAMES = [
    *("os\nsystem", "posix\nsystem", "builtins\neval", "builtins\nexec", "builtins\ngetattr"),
    *("builtins\n__import__", "subprocess\nPopen", "importlib\nimport_module", "operator\nattrgetter"),
    *("torch\nload", "torch._C\n_jit_pass_inline", "torch.storage\n_load_from_bytes", "runpy\nrun_path"),
    *("torch\nSize", "torch\nbfloat16", "builtins\nset", "collections\nOrderedDict", "argparse\nNamespace"),
    *("torch._utils\n_rebuild_tensor_v2", "_codecs\nencode", "megatron.core\nanything", "pathlib\nPosixPath"),
    *("megatron.core.config\nos.system", "argparse\nNamespace.__init__", "collections\nOrderedDict.fromkeys"),
]
PLAIN = (str, bytes, int, float, type(None), list, dict, tuple, set, frozenset, PickledObject, type)
FORBIDDEN = ("import", "exec", "compile", "open", "os.", "subprocess", "pickle", "socket", "ctypes", "sys.")


@st.composite
def instructions(draw: st.DrawFn) -> bytes:
    """One instruction with its argument."""
    code = draw(st.sampled_from([op for op in OPCODES if op not in b"."]))
    argument = ARGUMENTS.get(code)
    return bytes([code]) + (draw(argument) if argument is not None else b"")


OPCODES = sorted(set(b"".join(v for k, v in vars(pickle).items() if k.isupper() and isinstance(v, bytes))))
_TEXT = st.sampled_from([b"os", b"system", b"state", b"a", b"torch", b"Size", b"__class__"])
ARGUMENTS: dict[int, st.SearchStrategy[bytes]] = {
    ord("c"): st.sampled_from([f"{name}\n".encode() for name in NAMES]),
    ord("i"): st.sampled_from([f"{name}\n".encode() for name in NAMES]),
    ord("h"): st.sampled_from([b"\0", b"\1"]),
    ord("q"): st.sampled_from([b"\0", b"\1"]),
    ord("j"): st.just(b"\0\0\0\0"),
    ord("r"): st.sampled_from([b"\0\0\0\0", b"\xff\xff\xff\x7f"]),
    ord("K"): st.binary(min_size=1, max_size=1),
    ord("M"): st.binary(min_size=2, max_size=2),
    ord("J"): st.binary(min_size=4, max_size=4),
    ord("G"): st.binary(min_size=8, max_size=8),
    ord("I"): st.sampled_from([b"01\n", b"7\n", b"9" * 5000 + b"\n"]),
    ord("U"): _TEXT.map(lambda text: bytes([len(text)]) + text),
    ord("X"): _TEXT.map(lambda text: len(text).to_bytes(4, "little") + text),
    0x8C: _TEXT.map(lambda text: bytes([len(text)]) + text),
    0x80: st.sampled_from([b"\2", b"\4", b"\5"]),
    0x8A: st.sampled_from([b"\1\1", b"\xff" + b"\x7f" * 255]),
    0x95: st.just(bytes(8)),
}


@pytest.fixture(scope="module")
def events() -> Any:
    """The audit events of whatever is watched: a list to clear before, which has a switch at its side."""
    seen: list[str] = []
    watching: list[bool] = []

    def note(event: str, _arguments: Any) -> None:
        if watching and event.startswith(FORBIDDEN):
            seen.append(event)

    for codec in ("raw-unicode-escape", "unicode-escape", "ascii", "latin1"):
        b"a".decode(codec)  # imports it, once
    sys.addaudithook(note)  # cannot be removed; it does nothing once the switch is off
    yield seen, watching
    watching.clear()


def _check(value: Any, seen: set[int]) -> None:
    assert isinstance(value, PLAIN)
    if isinstance(value, type):
        assert value in (tuple, set) or issubclass(value, PickledObject | dict)
    elif id(value) not in seen:
        seen.add(id(value))
        inner = [*value, *value.values()] if isinstance(value, dict) else value
        inner = [*value.arguments, value.state] if isinstance(value, PickledObject) else inner
        for one in inner if isinstance(inner, list | tuple | set | frozenset) else ():
            _check(one, seen)


@example(program=[b"cos\nsystem\n", b"(", b"X\4\0\0\0true", b"t", b"R"])
@example(program=[b"X\2\0\0\0os", b"X\6\0\0\0system", b"\x93", b"X\4\0\0\0true", b"\x85", b"R"])
@settings(max_examples=200)
@given(program=st.lists(instructions(), max_size=30))
def test_a_program_gives_plain_values_or_the_one_error(program: list[bytes], events: Any) -> None:
    seen, watching = events
    seen.clear()
    value, message = None, "noise"
    watching.append(True)
    try:
        value = load_pickle(b"".join(program) + b".", "noise", persistent=repr)
    except CheckpointError as error:
        message = str(error)
    finally:
        watching.clear()
    assert message.startswith("noise")
    assert message.isprintable()
    _check(value, set())
    assert not seen


def test_the_watch_sees_what_runs(events: Any) -> None:
    seen, watching = events
    seen.clear()
    watching.append(True)
    pickle.loads(b"cos\nsystem\n(X\4\0\0\0truetR.")
    watching.clear()
    assert "os.system" in seen
