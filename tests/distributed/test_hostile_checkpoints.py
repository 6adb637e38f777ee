"""A torch_dist folder that somebody else made: the policy refuses it on every rank in one line that names the
file, or does not read what is hostile, and runs nothing of it."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bapo_megatron.config import ParallelConfig
from bapo_megatron.errors import CheckpointError
from bapo_megatron.policy import checkpoint
from tests.support.models import save_tiny_model
from tests.support.once import made_once
from tests.support.policies import small_policy
from tests.support.saves import complete
from tests.support.workers import run_layout

pytestmark = pytest.mark.distributed

PROOF = "PROOF"
LOADED = "loaded"


class Attack:
    """Touches a file in the checkpoint's folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.folder / PROOF}",)


def edited(edit: Callable[[Any, Path], object]) -> Callable[[Path], None]:
    """An attack by an edit of the description."""

    def attack(folder: Path) -> None:
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        edit(metadata, folder)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))

    return attack


def extra_state(make: Callable[[Path], Any]) -> Callable[[Path], None]:
    """Another object in the place of the first layer's extra state."""

    def edit(metadata: Any, folder: Path) -> None:
        index = next(one for one in metadata.storage_data if "_extra_state" in one.fqn)
        torch.save(make(folder), folder / "__9_9.distcp")
        info = metadata.storage_data[index]
        info.relative_path, info.offset = "__9_9.distcp", 0
        info.length = (folder / "__9_9.distcp").stat().st_size

    return edited(edit)


def pickled(folder: Path) -> list[torch.Tensor]:
    """Transformer Engine gives these bytes to pickle.loads."""
    return [torch.frombuffer(bytearray(pickle.dumps(Attack(folder))), dtype=torch.uint8)]


def first_tensor(**place: Any) -> Callable[[Path], None]:
    """It lies elsewhere."""

    def edit(metadata: Any, folder: Path) -> None:
        index = next(one for one in metadata.storage_data if "linear_qkv.weight" in one.fqn)
        shutil.copy(folder / "__0_0.distcp", folder.parent / "outside.distcp")
        vars(metadata.storage_data[index]).update(place)

    return edited(edit)


def linked(folder: Path) -> None:
    """The file is a link to one outside."""
    (folder / "__0_0.distcp").rename(folder.parent / "__0_0.distcp")
    (folder / "__0_0.distcp").symlink_to("../__0_0.distcp")


ZARR = json.dumps({"sharded_backend": "zarr", "common_backend": "torch"})
COMMON = "common.pt"
ATTACKS: dict[str, tuple[Callable[[Path], object], str]] = {
    "call in metadata": (
        edited(lambda metadata, folder: setattr(metadata, "planner_data", Attack(folder))),
        ".metadata names posix.system",
    ),
    "call in the common state": (
        lambda folder: torch.save({"args": Attack(folder)}, folder / COMMON),
        "common.pt: the common state names posix.system",
    ),
    "call in a stored object": (extra_state(lambda folder: [Attack(folder)]), LOADED),
    "pickle in an extra state": (extra_state(pickled), LOADED),
    "file outside": (
        first_tensor(relative_path="../outside.distcp"),
        "lies in '../outside.distcp', which is not a file of the checkpoint",
    ),
    "length beyond the file": (first_tensor(length=2**40), ".distcp is truncated"),
    "place beyond any file": (first_tensor(offset=10**8000), "is damaged"),
    "link outside": (linked, "__0_0.distcp is a link to '../__0_0.distcp'"),
    "fifo": (
        lambda folder: ((folder / COMMON).unlink(), os.mkfifo(folder / COMMON)),
        "common.pt is not a plain file",
    ),
    "other backends": (
        lambda folder: (folder / "metadata.json").write_text(ZARR),
        "metadata.json names other backends",
    ),
}
"""The attacks, and what the message says of each, or LOADED."""


def save_and_load_each(model: Path, root: Path) -> dict[str, str]:
    """The message with which a policy refuses each attacked copy of its own checkpoint, or LOADED."""
    policy = small_policy(model, ParallelConfig(data=2))
    complete(policy.save(root / "whole"))
    found = {}
    for name, (attack, _) in ATTACKS.items():
        folder = root / name / "policy"
        if dist.get_rank() == 0:
            shutil.copytree(root / "whole", folder)
            attack(folder)
        dist.barrier()
        try:
            policy.load(folder, 0)
            found[name] = LOADED
        except CheckpointError as error:
            found[name] = str(error)
        except Exception as error:
            found[name] = repr(error)
    policy.load(root / "whole", 0)
    return found


def load_what_changes(model: Path, folder: Path) -> None:
    """Load a checkpoint whose description becomes hostile once it was opened."""
    policy, opened = small_policy(model), checkpoint._opened
    complete(policy.save(folder))

    def then_changed(path: Path) -> Any:
        stored = opened(path)
        ATTACKS["call in metadata"][0](path)
        return stored

    checkpoint._opened = then_changed
    policy.load(folder, 0)


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, str]]]:
    """The folder of the attacked checkpoints, and what two ranks said of them."""

    def make(folder: Path) -> None:
        model = save_tiny_model("qwen2", folder / "model", num_hidden_layers=1)
        said = run_layout(save_and_load_each, ParallelConfig(data=2), model, folder)
        (folder / "said.json").write_text(json.dumps(said))

    folder = made_once(tmp_path_factory, "hostile_checkpoints", make)
    return folder, json.loads((folder / "said.json").read_text())


@pytest.mark.parametrize("name", ATTACKS)
def test_a_hostile_checkpoint_is_one_line_on_every_rank(
    name: str, refusals: tuple[Path, list[dict[str, str]]]
) -> None:
    folder, said = refusals
    first, second = (of_rank[name] for of_rank in said)
    assert ATTACKS[name][1] in first
    assert first == second
    assert first.isprintable()
    assert first == LOADED or str(folder / name / "policy") in first
    assert not list(folder.rglob(PROOF))


def test_no_other_reader_opens_a_checkpoint(tmp_path: Path) -> None:
    model = save_tiny_model("qwen2", tmp_path / "model", num_hidden_layers=1)
    run_layout(load_what_changes, ParallelConfig(), model, tmp_path / "policy")
    assert not list(tmp_path.rglob(PROOF))


def test_a_file_system_that_fails_one_rank_is_told_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a rank that could read the folder waits for the other in the collectives of the load."""

    def stale(path: Path) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))

    monkeypatch.setattr(checkpoint, "open_stored", stale)
    monkeypatch.setattr(checkpoint, "all_gather", lambda problem: [None, problem])
    with pytest.raises(CheckpointError, match="Stale file handle"):
        checkpoint._opened(tmp_path)
