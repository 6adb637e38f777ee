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
from bapo_megatron.hf import weight_stream
from bapo_megatron.rollout.engines.sent_weights import SentDigests
from bapo_megatron.rollout.weight_sync.disk import DiskSync, WeightStaging
from tests.support.plain_digester import PlainDigester, plain_digests
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
    """A policy whose weights take a collective for each tensor, as gathering does."""

    version = 4

    def __init__(self) -> None:
        self.data_rank = 0 if dist.get_rank() < WRITERS else 1
        self.ran_to_its_end = False

    def hf_weights(self) -> Iterator[tuple[str, Tensor]]:
        buffer = torch.empty(0)
        for name, tensor in tensors().items():
            dist.all_reduce(torch.zeros(1))
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
        self.took.append((folder.name, version, step, files, SentDigests.read(folder)))


def model(folder: Path) -> Path:
    folder.mkdir()
    save_file(tensors(), folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def pushed(folder: Path) -> dict[str, dict[str, Any]]:
    """What a rank sees of pushes in which nothing goes wrong, and in which rank 1 fails."""
    found = {}
    for case, broken in BROKEN.items():
        with pytest.MonkeyPatch.context() as patch:
            if broken and dist.get_rank() == 1:
                patch.setattr(weight_stream._Shard, *broken)
            found[case] = _pushed(folder / case, folder / "model")
    return found


def _pushed(staged: Path, model: Path) -> dict[str, Any]:
    policy, sampler = Gathered(), Taken() if dist.get_rank() == 0 else None
    sync = DiskSync(sampler, WeightStaging(staged, model), PlainDigester)  # type: ignore[arg-type]
    error = None
    try:
        sync.push(policy, 7)  # type: ignore[arg-type]
    except (RunStopped, ConfigError) as failure:
        error = f"{type(failure).__name__}: {failure}"
    return {"took": sampler.took if sampler else [], "error": error, "drained": policy.ran_to_its_end}


def _full(_shard: object, _name: str, _tensor: Tensor) -> None:
    raise OSError(28, "No space left on device")


_complete = weight_stream._Shard.complete


def _complete_elsewhere(shard: weight_stream._Shard) -> None:
    """On a disk of its own: rank 0 does not see what is written."""
    _complete(shard)
    shard.path.unlink()


BROKEN: dict[str, tuple[str, Any] | None] = {
    "well": None,
    "disk": ("add", _full),
    "folder": ("complete", _complete_elsewhere),
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, dict[str, Any]]]]:
    """The run's folder, and what each of four ranks saw."""
    folder = tmp_path_factory.mktemp("sync")
    model(folder / "model")
    return folder, run_layout(pushed, LAYOUT, folder)


def test_three_ranks_write_a_third_each(ranks: tuple[Path, list[dict[str, dict[str, Any]]]]) -> None:
    folder, seen = ranks
    assert [rank["well"]["error"] for rank in seen] == [None] * 4
    [(name, version, step, files, sent)] = seen[0]["well"]["took"]
    assert (name, version, step) == ("v4", 4, 7)
    assert sorted(files) == [f"model-{n:05d}.safetensors" for n in range(WRITERS)]
    written = {name: tensor for held in files.values() for name, tensor in held.items()}
    assert sum(len(held) for held in files.values()) == len(written) == len(tensors())
    assert all(torch.equal(written[name], tensor) for name, tensor in tensors().items())
    assert sent == plain_digests(tensors().items()), "all, though rank 0 has written a third"
    # 4,398 bytes; no tensor has more than 1,800, and no share is more than that above another.
    shares = [sum(tensor.nbytes for tensor in held.values()) for held in files.values()]
    assert shares == [1800, 1600, 998]
    assert [path.name for path in (folder / "well").iterdir()] == ["v4"]


@pytest.mark.parametrize(
    ("case", "says"),
    [("disk", "No space left on device"), ("folder", "is not seen on rank 0's machine: the run directory")],
)
def test_one_rank_that_cannot_write_stops_all_and_nothing_remains(
    ranks: tuple[Path, list[dict[str, dict[str, Any]]]], case: str, says: str
) -> None:
    folder, seen = ranks
    assert all(says in rank[case]["error"] for rank in seen)
    assert all(rank[case]["drained"] for rank in seen), "others would wait for it in the next gather"
    assert seen[0][case]["took"] == []
    assert list((folder / case).iterdir()) == []
    kinds = [rank[case]["error"].split(":")[0] for rank in seen]
    if case == "disk":
        assert kinds == ["RunStopped", "DiskError", "RunStopped", "RunStopped"]
        assert seen[3][case]["error"].startswith("RunStopped: rank 1: weights of version 4")
    else:
        assert kinds == ["ConfigError"] * 4
