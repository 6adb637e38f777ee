"""A torch_dist folder that somebody else made: the policy refuses it on every rank in one line that names the
file, and runs nothing of it."""

from __future__ import annotations

import io
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

from bapo_megatron.config import BatchConfig, ModelConfig, OptimizerConfig, ParallelConfig
from bapo_megatron.errors import CheckpointError
from bapo_megatron.policy.megatron import MegatronPolicy
from tests.support.models import save_tiny_model
from tests.support.once import made_once
from tests.support.saves import complete
from tests.support.workers import run_layout

pytestmark = pytest.mark.distributed

PROOF = "PROOF"


class Attack:
    """Touches a file in the checkpoint's folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.folder / PROOF}",)


def _metadata(folder: Path) -> Any:
    return pickle.loads((folder / ".metadata").read_bytes())


def _store(folder: Path, metadata: Any) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def a_call_in_metadata(folder: Path) -> None:
    metadata = _metadata(folder)
    metadata.planner_data = Attack(folder)
    _store(folder, metadata)


def a_call_in_the_common_state(folder: Path) -> None:
    torch.save({"args": Attack(folder)}, folder / "common.pt")


def _replace_extra_state(folder: Path, value: Any) -> None:
    """Another object in the place of the first layer's extra state."""
    metadata = _metadata(folder)
    index = next(one for one in metadata.storage_data if "_extra_state" in one.fqn)
    buffer = io.BytesIO()
    torch.save(value, buffer)
    info = metadata.storage_data[index]
    info.relative_path, info.offset, info.length = "__9_9.distcp", 0, len(buffer.getvalue())
    (folder / "__9_9.distcp").write_bytes(buffer.getvalue())
    _store(folder, metadata)


def a_call_in_a_stored_object(folder: Path) -> None:
    _replace_extra_state(folder, [Attack(folder)])


def a_pickle_in_the_bytes_of_an_extra_state(folder: Path) -> None:
    """Transformer Engine gives these bytes to pickle.loads."""
    data = pickle.dumps(Attack(folder))
    _replace_extra_state(folder, [torch.frombuffer(bytearray(data), dtype=torch.uint8)])


def an_archive_in_an_extra_state(folder: Path) -> None:
    """And these to torch.load."""
    inner = io.BytesIO()
    torch.save(Attack(folder), inner)
    _replace_extra_state(folder, [inner])


def _place_first_tensor(folder: Path, **place: Any) -> None:
    metadata = _metadata(folder)
    index = next(one for one in metadata.storage_data if "linear_qkv.weight" in one.fqn)
    vars(metadata.storage_data[index]).update(place)
    _store(folder, metadata)


def a_file_outside(folder: Path) -> None:
    shutil.copy(folder / "__0_0.distcp", folder.parent / "outside.distcp")
    _place_first_tensor(folder, relative_path="../outside.distcp")


def a_file_by_its_absolute_path(folder: Path) -> None:
    _place_first_tensor(folder, relative_path=str(folder / "__0_0.distcp"))


def a_length_beyond_the_file(folder: Path) -> None:
    _place_first_tensor(folder, length=2**40)


def a_place_beyond_any_file(folder: Path) -> None:
    _place_first_tensor(folder, offset=10**8000)


def a_link_outside(folder: Path) -> None:
    (folder / "__0_0.distcp").rename(folder.parent / "linked.distcp")
    (folder / "__0_0.distcp").symlink_to("../linked.distcp")


def a_linked_description(folder: Path) -> None:
    (folder / ".metadata").rename(folder.parent / ".metadata")
    (folder / ".metadata").symlink_to("../.metadata")


def a_fifo(folder: Path) -> None:
    (folder / "common.pt").unlink()
    os.mkfifo(folder / "common.pt")


def other_backends(folder: Path) -> None:
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr", "common_backend": "torch"}))


def no_backends(folder: Path) -> None:
    (folder / "metadata.json").write_text("[" * 30_000)


ATTACKS: dict[Callable[[Path], None], str] = {
    a_call_in_metadata: ".metadata names posix.system",
    a_call_in_the_common_state: "common.pt: the common state names posix.system",
    a_call_in_a_stored_object: "_extra_state/shard_0_1 names posix.system",
    a_pickle_in_the_bytes_of_an_extra_state: "_extra_state/shard_0_1 is not empty",
    an_archive_in_an_extra_state: "_extra_state/shard_0_1 is not empty",
    a_file_outside: "lies in '../outside.distcp', which is not a file of the checkpoint",
    a_file_by_its_absolute_path: "which is not a file of the checkpoint",
    a_length_beyond_the_file: ".distcp is truncated",
    a_place_beyond_any_file: "is damaged",
    a_link_outside: "__0_0.distcp is a link to '../linked.distcp'",
    a_linked_description: ".metadata is a link",
    a_fifo: "common.pt is not a plain file",
    other_backends: "metadata.json names other backends",
    no_backends: "metadata.json cannot be read",
}
"""The attacks, and what the message says of each."""


def save_and_load_each(model: Path, root: Path) -> dict[str, str]:
    """The message with which a policy refuses each attacked copy of its own checkpoint."""
    batch, optimizer = BatchConfig(pack_tokens=96), OptimizerConfig(lr=1e-3)
    policy = MegatronPolicy(ModelConfig(model, "float32"), ParallelConfig(data=2), batch, optimizer, 6, 1.0)
    complete(policy.save(root / "whole"))
    found = {}
    for attack in ATTACKS:
        folder = root / attack.__name__ / "policy"
        if dist.get_rank() == 0:
            shutil.copytree(root / "whole", folder)
            attack(folder)
        dist.barrier()
        try:
            policy.load(folder, 0)
            found[attack.__name__] = "loaded"
        except CheckpointError as error:
            found[attack.__name__] = str(error)
        except Exception as error:
            found[attack.__name__] = repr(error)
    policy.load(root / "whole", 0)
    return found


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, str]]]:
    """The folder of the attacked checkpoints, and what two ranks said of them."""

    def make(folder: Path) -> None:
        model = save_tiny_model("qwen2", folder / "model", num_hidden_layers=1)
        said = run_layout(save_and_load_each, ParallelConfig(data=2), model, folder)
        (folder / "said.json").write_text(json.dumps(said))

    folder = made_once(tmp_path_factory, "hostile_checkpoints", make)
    return folder, json.loads((folder / "said.json").read_text())


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_a_hostile_checkpoint_is_one_line_on_every_rank(
    attack: Callable[[Path], None], refusals: tuple[Path, list[dict[str, str]]]
) -> None:
    folder, said = refusals
    first, second = (of_rank[attack.__name__] for of_rank in said)
    assert ATTACKS[attack] in first
    assert first == second
    assert first.isprintable()
    assert str(folder / attack.__name__ / "policy") in first
    assert not list(folder.rglob(PROOF))
