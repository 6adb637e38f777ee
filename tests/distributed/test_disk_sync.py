"""Weights through a folder: every rank of the first replica writes a share, or nothing appears at all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from bapo_megatron.config import ParallelConfig
from bapo_megatron.errors import ConfigError, RunStopped
from bapo_megatron.hf import stream_writer
from bapo_megatron.rollout.weight_sync.disk import DiskSync, WeightStaging
from tests.support.workers import run_layout

pytestmark = pytest.mark.distributed

LAYOUT = ParallelConfig(data=4)
"""Four processes. The policy says that three of them are the first replica."""
WRITERS = 3


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = [900, 300, 300, 500, 7, 64, 64, 64]
    return {f"w{n}": torch.randn(size, generator=generator).bfloat16() for n, size in enumerate(sizes)}


class Gathered:
    """A policy whose weights take a collective of the replica for each tensor, as gathering does."""

    version = 4

    def __init__(self) -> None:
        self._group = dist.new_group(list(range(WRITERS)))
        self.data_rank = 0 if dist.get_rank() < WRITERS else 1
        self.ran_to_its_end = self.data_rank != 0

    def hf_weights(self) -> Iterator[tuple[str, Tensor]]:
        buffer = torch.empty(0)
        for name, tensor in tensors().items():
            dist.all_reduce(torch.zeros(1), group=self._group)
            buffer.fill_(0)  # a tensor is valid until the iterator moves on
            buffer = tensor
            yield name, tensor
        self.ran_to_its_end = True


class Taken:
    """A sampler that looks at the folder that it is given."""

    def __init__(self) -> None:
        self.took: list[Any] = []

    def load_weights(self, folder: Path, version: int, step: int) -> None:
        files = {path.name: load_file(path) for path in sorted(folder.glob("*.safetensors"))}
        self.took.append((folder.name, version, step, files))


def model(folder: Path) -> Path:
    folder.mkdir()
    save_file(tensors(), folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def pushed(folder: Path, broken: str | None = None) -> dict[str, Any]:
    """What a rank sees of a push. ``broken``: what goes wrong on rank 1."""
    if broken and dist.get_rank() == 1:
        _break(broken)
    policy, sampler = Gathered(), Taken() if dist.get_rank() == 0 else None
    sync = DiskSync(sampler, WeightStaging(folder / "weights", folder / "model"))  # type: ignore[arg-type]
    error = None
    try:
        sync.push(policy, 7)  # type: ignore[arg-type]
    except (RunStopped, ConfigError) as failure:
        error = f"{type(failure).__name__}: {failure}"
    return {"took": sampler.took if sampler else [], "error": error, "drained": policy.ran_to_its_end}


def _break(what: str) -> None:
    if what == "disk":

        def full(_shard: object, _bytes: Tensor) -> None:
            raise OSError(28, "No space left on device")

        stream_writer._Shard.append = full  # type: ignore[assignment,method-assign]
    else:  # a disk of its own: what it writes is not what rank 0 sees
        close = stream_writer._Shard.close

        def elsewhere(shard: stream_writer._Shard) -> int:
            size = close(shard)
            shard.path.unlink()
            return size

        stream_writer._Shard.close = elsewhere  # type: ignore[method-assign]


def test_three_ranks_write_a_third_each(tmp_path: Path) -> None:
    model(tmp_path / "model")
    ranks = run_layout(pushed, LAYOUT, tmp_path)
    assert [rank["error"] for rank in ranks] == [None] * 4
    [(name, version, step, files)] = ranks[0]["took"]
    assert (name, version, step) == ("v4", 4, 7)
    assert sorted(files) == [f"model-{n:05d}.safetensors" for n in range(WRITERS)]
    written = {name: tensor for held in files.values() for name, tensor in held.items()}
    assert sum(len(held) for held in files.values()) == len(written) == len(tensors())
    assert all(torch.equal(written[name], tensor) for name, tensor in tensors().items())
    # 4,398 bytes; no tensor has more than 1,800, and no share is more than that above another.
    shares = [sum(tensor.nbytes for tensor in held.values()) for held in files.values()]
    assert sum(shares) == 4398
    assert max(shares) - min(shares) <= 1800
    assert max(shares) < 4398 / 2
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["v4"]


@pytest.mark.parametrize(
    ("broken", "says"),
    [("disk", "No space left on device"), ("folder", "is not seen on rank 0's machine: the run directory")],
)
def test_one_rank_that_cannot_write_stops_all_and_nothing_remains(
    tmp_path: Path, broken: str, says: str
) -> None:
    model(tmp_path / "model")
    ranks = run_layout(pushed, LAYOUT, tmp_path, broken)
    assert all(says in rank["error"] for rank in ranks)
    assert all(rank["drained"] for rank in ranks), "others would wait for it in the next gather"
    assert ranks[0]["took"] == []
    assert list((tmp_path / "weights").iterdir()) == []
    if broken == "disk":
        assert ranks[1]["error"].startswith("DiskError")
        assert ranks[3]["error"].startswith("RunStopped: rank 1: weights of version 4")
