"""Whatever a file holds: a checkpoint is read, or it is refused in one message, and nothing in it is run."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_megatron.errors import ConfigError
from checkpoints_tools import cli, inspect_checkpoint, to_megatron
from checkpoints_tools.formats.locate import open_checkpoint
from tests.support.checkpoint_models import save_random_model
from tests.support.legacy_checkpoints import save_legacy

FILES = [
    "torch_dist/.metadata",
    "torch_dist/common.pt",
    "torch_dist/__0_0.distcp",
    "legacy/mp_rank_00/model_optim_rng.pt",
    "legacy/mp_rank_01/model_optim_rng.pt",
    "hf/model-00001-of-00002.safetensors",
    "hf/model.safetensors.index.json",
    "hf/config.json",
    "run/checkpoints/step_000120/manifest.json",
    "run/checkpoints/step_000120/policy/.metadata",
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model in every format, and a run with a checkpoint of it."""
    root = tmp_path_factory.mktemp("fuzz")
    small = {"num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 4, "vocab_size": 6}
    hf = save_random_model(
        root / "hf", "qwen2", files=2, num_attention_heads=2, num_key_value_heads=2, **small
    )
    to_megatron(hf, root / "made", grid=2)
    save_legacy(hf, root / "made_legacy", tensor=2, multiple=1)
    (root / "made/release").rename(root / "torch_dist")
    (root / "made_legacy/release").rename(root / "legacy")
    step = root / "run/checkpoints/step_000120"
    shutil.copytree(root / "torch_dist", step / "policy")
    files = {
        str(path.relative_to(step)): {"bytes": path.stat().st_size}
        for path in step.rglob("*")
        if path.is_file()
    }
    (step / "manifest.json").write_text(json.dumps({"files": files}))
    return root


@contextmanager
def changed(path: Path, data: bytes) -> Iterator[None]:
    """The file with other content."""
    before = path.read_bytes()
    path.write_bytes(data)
    try:
        yield
    finally:
        path.write_bytes(before)


@st.composite
def damage(draw: st.DrawFn) -> Any:
    """A function from bytes to bytes: a few flipped, written over, cut out, doubled or put in; a cut end."""
    steps = draw(
        st.lists(
            st.tuples(
                st.sampled_from(["flip", "write", "cut", "double", "insert", "end"]),
                st.floats(0, 1, exclude_max=True),
                st.integers(1, 40),
                st.binary(min_size=1, max_size=12),
            ),
            min_size=1,
            max_size=4,
        )
    )

    def apply(data: bytes) -> bytes:
        for kind, place, count, new in steps:
            at = int(place * len(data))
            match kind:
                case "flip":
                    flipped = bytes(byte ^ (1 << count % 8) for byte in data[at : at + 1])
                    data = data[:at] + flipped + data[at + 1 :]
                case "write":
                    data = data[:at] + new + data[at + len(new) :]
                case "cut":
                    data = data[:at] + data[at + count :]
                case "double":
                    data = data[: at + count] + data[at:]
                case "insert":
                    data = data[:at] + new + data[at:]
                case "end":
                    data = data[:at]
        return data

    return apply


def refusal(look: Callable[[], Any]) -> str | None:
    """The message in which ``look`` refuses; None if it does not. Any other error is a failure."""
    try:
        look()
    except ConfigError as error:
        return str(error)
    return None


def read_all(root: Path, file: str) -> None:
    """Everything that looks at the file."""
    path = root / file.split("/")[0]
    reference = None if path.name == "hf" else root / "hf"
    for look in (open_checkpoint, inspect_checkpoint):
        assert refusal(partial(look, path, reference=reference)) != ""


@pytest.mark.parametrize("file", FILES)
def test_damaged_files_are_read_or_refused(file: str, root: Path) -> None:
    whole = (root / file).read_bytes()

    @settings(max_examples=50)
    @given(damage())
    def check(apply: Any) -> None:
        with changed(root / file, apply(whole)):
            read_all(root, file)

    check()


def pickle_of(path: Path) -> tuple[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        name = next(name for name in archive.namelist() if name.endswith("data.pkl"))
        return name, archive.read(name)


def with_pickle(path: Path, pickled: bytes) -> bytes:
    """The archive with another pickle, and with the checksum that belongs to it."""
    out = io.BytesIO()
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(out, "w") as new:
        for name in old.namelist():
            new.writestr(name, pickled if name.endswith("data.pkl") else old.read(name))
    return out.getvalue()


@pytest.mark.parametrize("file", ["torch_dist/common.pt", "legacy/mp_rank_01/model_optim_rng.pt"])
def test_damaged_descriptions_of_objects_are_read_or_refused(file: str, root: Path, tmp_path: Path) -> None:
    """Behind the checksum of the archive, which would catch most damage before."""
    original = tmp_path / "whole.pt"
    torch.save(torch.load(root / file, weights_only=False), original)  # with the checksums of its tensors
    _, pickled = pickle_of(original)

    @settings(max_examples=80)
    @given(damage())
    def check(apply: Any) -> None:
        with changed(root / file, with_pickle(original, apply(pickled))):
            read_all(root, file)

    check()


class Attack:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("command", ["inspect", "verify", "to-hf", "reshard"])
@pytest.mark.parametrize(
    "file",
    [
        "torch_dist/.metadata",
        "torch_dist/common.pt",
        "torch_dist/__0_0.distcp",
        "legacy/mp_rank_01/model_optim_rng.pt",
    ],
)
def test_no_command_runs_what_a_file_says(
    file: str, command: str, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    proof = tmp_path / "proof"
    evil: dict[str, Any] = {"model": Attack(proof), "content_metadata": Attack(proof)}
    if file.endswith(".metadata"):
        data = pickle.dumps(evil)
    elif file.endswith(".distcp"):
        # Every archive of the file has its pickle overwritten; that of the first tensor is enough.
        data = (root / file).read_bytes()
        at = data.index(b"ctorch._utils\n_rebuild_tensor_v2")
        call = b"cposix\nsystem\n(X" + len(bytes(proof)).to_bytes(4, "little")
        data = data[:at] + call + data[at + len(call) :]
    else:
        buffer = io.BytesIO()
        torch.save(evil, buffer)
        data = buffer.getvalue()
    source, out = root / file.split("/")[0], tmp_path / "out"
    arguments = {
        "inspect": [str(source)],
        "verify": [str(source), str(root / "hf")],
        "to-hf": [str(source), str(out), "--hf-reference", str(root / "hf")],
        "reshard": [str(source), str(out), "--hf-reference", str(root / "hf")],
    }[command]
    with changed(root / file, data):
        code = cli.run([command, *arguments])
    message = capsys.readouterr().err
    assert not proof.exists()
    assert not out.exists()
    if command == "inspect" and file.endswith(".distcp"):
        assert code == 0  # descriptions alone are read
    else:
        assert code == 2
        assert str(root / file) in message
        if not file.endswith(".distcp"):
            assert "posix.system" in message


def test_the_attack_would_have_worked(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Attack(tmp_path / "proof")))
    assert (tmp_path / "proof").exists()
