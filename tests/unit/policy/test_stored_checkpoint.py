"""The size limits of the safe checkpoint reader (decompression bombs)."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from bapo_megatron.errors import CheckpointError
from bapo_megatron.policy.stored_checkpoint import check_size
from checkpoints_tools.archives.pickle_allow_list import load_pickle
from checkpoints_tools.archives.torch_zip import read_archive


def read(file: Path) -> Any:
    with file.open("rb") as stream:
        return read_archive(stream, file, file.name)


def nested(depth: int) -> list[Any]:
    value: list[Any] = [1]
    for _ in range(depth):
        value = [value, value]
    return value


@pytest.mark.parametrize("value", [nested(60), [torch.zeros(1 << 20)] * 300], ids=["lists", "one tensor"])
def test_unbounded_references_are_refused(value: list[Any], tmp_path: Path) -> None:
    file = tmp_path / "common.pt"
    torch.save(value, file)
    with pytest.raises(CheckpointError, match=r"common\.pt unfolds to more than it holds"):
        check_size(read(file), file)


def test_a_runs_own_records_are_within_the_limit(tmp_path: Path) -> None:
    file = tmp_path / "common.pt"
    torch.save({"rng": [torch.get_rng_state()] * 64, "args": {str(n): n for n in range(10_000)}}, file)
    check_size(read(file), file)


def test_repeated_copies_of_one_tuple_are_refused() -> None:
    count = 5_000
    items = b"(" + b"K\x01" * count + b"tq\x00"
    calls = b"".join(b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\nh\x00R0" for _ in range(count))
    with pytest.raises(CheckpointError, match="copies more than it holds"):
        load_pickle(pickle.PROTO + b"\x02" + items + calls + b".", "a file")
