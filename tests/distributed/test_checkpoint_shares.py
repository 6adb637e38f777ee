"""The ranks share a checkpoint: each writes and reads a part, and its bits come back at every layout."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bapo_megatron.checkpoint.resume_check import Fingerprint, fingerprint_differences, state_fingerprint
from bapo_megatron.checkpoint.store import CheckpointStore
from bapo_megatron.config import (
    BatchConfig,
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    ParallelConfig,
    RunConfig,
)
from bapo_megatron.data.samples import Sample
from bapo_megatron.hf.reader import HfReader
from bapo_megatron.policy.megatron import MegatronPolicy
from bapo_megatron.policy.optimizer_state import Piece, cut
from bapo_megatron.runtime.run_paths import RunPaths
from tests.support.layouts import layout
from tests.support.models import save_nearly_tied_experts, save_tiny_model
from tests.support.policies import small_policy, updates_of
from tests.support.saves import CountingReader, Written, complete, counting_reads
from tests.support.tiers import slow_but
from tests.support.workers import run_layout

pytestmark = pytest.mark.distributed

Digests = dict[str, list[str]]


def trained(folder: Path, dtype: str, samples: list[Sample], parallel: ParallelConfig) -> MegatronPolicy:
    policy = small_policy(folder, parallel, dtype)
    updates_of(policy, samples, 2)
    return policy


def test_a_bucket_is_cut_into_equal_ranges() -> None:
    """Ranges of 10 elements. A parameter of elements 8 to 31 lies on four ranks, one of 10 to 20 on one."""
    assert cut(10, 20, 10) == (Piece(1, 0, 10),)
    assert cut(8, 31, 10) == (Piece(0, 0, 2), Piece(1, 2, 12), Piece(2, 12, 22), Piece(3, 22, 23))


def save_and_measure(
    folder: Path, dtype: str, samples: list[Sample], parallel: ParallelConfig, path: Path
) -> tuple[Digests, int, int]:
    """The digests of a trained policy; the bytes that this rank has written, and those it has read back."""
    policy = trained(folder, dtype, samples, parallel)
    digests = policy.state_digest()
    complete(policy.save(path))
    dist.barrier()
    written = sum(file.stat().st_size for file in path.glob(f"__{dist.get_rank()}_*.distcp"))
    with counting_reads() as read:
        policy.load(path, 2)
    assert policy.state_digest() == digests
    return digests, written, sum(read)


def fingerprint(
    folder: Path,
    samples: list[Sample] | None,
    parallel: ParallelConfig,
    path: Path,
) -> Fingerprint:
    """The fingerprint of a policy that is trained and saved; or of one that loads what was saved."""
    if samples is None:
        policy = small_policy(folder, parallel, "bfloat16")
        policy.load(path, 2)
    else:
        policy = trained(folder, "bfloat16", samples, parallel)
        complete(policy.save(path))
    return state_fingerprint(run_config(folder), policy, None)


def run_config(folder: Path) -> RunConfig:
    model, batch = ModelConfig(folder, "bfloat16"), BatchConfig(pack_tokens=96)
    return RunConfig("test", model, DataConfig(Path("none")), batch=batch)


@pytest.mark.parametrize(
    ("dtype", "written"),
    slow_but(
        [("bfloat16", "dp2-cp2"), ("float32", "tp2-sp-dp2"), ("bfloat16", "dp8")],
        ("bfloat16", "dp2-cp2"),
    ),
)
def test_each_rank_writes_and_reads_its_share(
    dtype: str, written: str, qwen2: Path, samples: list[Sample], tmp_path: Path
) -> None:
    """Bytes are spread to within a fifth and the largest parameter, which one rank writes whole; a rank reads
    whole parameters at both ends of its range. Before, the first rank of DP x CP wrote all, and every rank
    read all."""
    parallel, path = layout(written).parallel, tmp_path / "policy"
    told = run_layout(save_and_measure, parallel, qwen2, dtype, samples, parallel, path)
    assert all(digests == told[0][0] for digests, *_ in told)
    assert all(len(copies) == 1 for copies in told[0][0].values())
    total = sum(file.stat().st_size for file in path.glob("*.distcp"))
    assert sum(rank_wrote for _, rank_wrote, _ in told) == total
    largest = 12 * 128 * 32 // parallel.tensor  # fc1 and the embedding have 128 x 32 elements
    whole = total // (parallel.tensor * parallel.pipeline)  # of a model shard
    share = whole / (len(told) // parallel.tensor)
    for _, rank_wrote, rank_read in told:
        assert rank_wrote < 1.2 * share + largest
        assert rank_read < 1.2 * share + 3 * largest


@pytest.mark.parametrize("text", slow_but(["one", "tp2-sp", "pp2-vpp2"], "tp2-sp"))
def test_a_checkpoint_passes_the_resume_check_at_every_layout(
    text: str, qwen2: Path, samples: list[Sample], tmp_path: Path
) -> None:
    """The bits are equal, although the log-probs are not: in bfloat16 each layout rounds in its own way."""
    written, loaded, path = layout("dp2-pp2").parallel, layout(text).parallel, tmp_path / "policy"
    stored = run_layout(fingerprint, written, qwen2, samples, written, path)[0]
    found = run_layout(fingerprint, loaded, qwen2, None, loaded, path)[0]
    assert fingerprint_differences(run_config(qwen2), stored, found) == {}
    assert found["state"] == stored["state"]
    assert stored["state"]["step"] == ["2"]
    assert len({stored["state"][name][0] for name in ("weights", "param", "exp_avg", "exp_avg_sq")}) == 4
    if loaded.tensor > 1:
        assert found["canary"] != stored["canary"]
    found["learning_rate"] *= 2
    assert list(fingerprint_differences(run_config(qwen2), stored, found)) == ["learning_rate"]


@pytest.mark.parametrize("text", slow_but(["tp2-sp-ep2", "one"], "tp2-sp-ep2"))
def test_the_resume_check_does_not_depend_on_ties_of_routers(
    text: str, samples: list[Sample], tmp_path: Path
) -> None:
    """A mixture of experts whose routers choose otherwise at every layout."""
    folder = save_nearly_tied_experts(tmp_path / "experts")
    written, loaded, path = layout("dp2-pp2").parallel, layout(text).parallel, tmp_path / "policy"
    stored = run_layout(fingerprint, written, folder, samples, written, path)[0]
    found = run_layout(fingerprint, loaded, folder, None, loaded, path)[0]
    assert fingerprint_differences(run_config(folder), stored, found) == {}


def flip_one_weight(policy: MegatronPolicy) -> None:
    """The lowest bit of one weight, in one copy of it."""
    [parameter, *_] = policy._weights.local.values()
    parameter.data.view(torch.int16)[3, 5] ^= 1


def permute_two_rows(policy: MegatronPolicy) -> None:
    [parameter, *_] = policy._weights.local.values()
    parameter.data[[3, 4]] = parameter.data[[4, 3]]


def stale_shard(policy: MegatronPolicy) -> None:
    """This rank's moments, as they were before an update."""
    for state in policy._optimizer.chained_optimizers[0].optimizer.state.values():
        state["exp_avg"].mul_(0.5)


def lost_step(policy: MegatronPolicy) -> None:
    for state in policy._optimizer.chained_optimizers[0].optimizer.state.values():
        state["step"] -= 1


FAULTS: dict[str, tuple[Callable[[MegatronPolicy], None], set[str]]] = {
    "one flipped weight": (flip_one_weight, {"weights"}),
    "two permuted rows": (permute_two_rows, {"weights"}),
    "one stale shard": (stale_shard, {"exp_avg"}),
    "one lost step": (lost_step, {"step"}),
}


def digests_with_faults(
    folder: Path, samples: list[Sample], parallel: ParallelConfig
) -> tuple[Digests, dict[str, Digests]]:
    """The digests of a policy, and with each fault on the last rank alone."""
    policy = trained(folder, "bfloat16", samples, parallel)
    inner = policy._optimizer.chained_optimizers[0].optimizer
    tensors = [*policy._weights.local.values(), *(t for s in inner.state.values() for t in s.values())]
    copies = [tensor.detach().clone() for tensor in tensors]
    found = {}
    for name, (fault, _) in FAULTS.items():
        if dist.get_rank() == dist.get_world_size() - 1:
            fault(policy)
        found[name] = policy.state_digest()
        for tensor, copy in zip(tensors, copies, strict=True):
            tensor.data.copy_(copy)
    return policy.state_digest(), found


def test_each_fault_on_one_rank_changes_a_digest(qwen2: Path, samples: list[Sample]) -> None:
    parallel = ParallelConfig(data=2)
    told = run_layout(digests_with_faults, parallel, qwen2, samples, parallel)
    right, faults = told[0]
    assert told[1] == told[0]
    for name, (_, changed) in FAULTS.items():
        assert {one for one in right if faults[name][one] != right[one]} == changed, name
    assert faults["one flipped weight"]["weights"][0] == right["weights"][0]  # the other copy is whole


def bytes_of_the_model(folder: Path, parallel: ParallelConfig) -> int:
    reader = CountingReader(folder)
    small_policy(folder, parallel, reader=reader)
    return reader.count


def test_a_rank_reads_its_part_of_a_model_folder(tmp_path: Path) -> None:
    """The bytes of all ranks are those of the folder, and of the norms once more for each rank of TP."""
    folder, parallel = save_tiny_model("qwen2", tmp_path), layout("tp2-pp2").parallel
    read = run_layout(bytes_of_the_model, parallel, folder, parallel)
    names = HfReader(folder).names
    sizes = {name: HfReader(folder).read(name).nbytes for name in names}
    norms = sum(size for name, size in sizes.items() if "norm" in name)
    assert sum(read) == sum(sizes.values()) + (parallel.tensor - 1) * norms
    assert max(read) - min(read) <= 4 * 128 * 32 // parallel.tensor * parallel.pipeline


class _WithoutNewNames:
    """``os.scandir`` of a node of NFS that knows a folder as it was before another node wrote into it."""

    def __init__(self, entries: Any, hidden: str) -> None:
        self._entries, self._hidden = entries, hidden

    def __enter__(self) -> _WithoutNewNames:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._entries.close()

    def __iter__(self) -> _WithoutNewNames:
        return self

    def __next__(self) -> os.DirEntry[str]:
        return next(entry for entry in self._entries if not entry.name.startswith(self._hidden))


def _save_from_two_nodes(run: Path) -> dict[str, Any]:
    """A save in which each rank lists its own files alone; the manifest."""
    rank, real = dist.get_rank(), os.scandir

    def write(path: Path) -> Written:
        path.mkdir(parents=True, exist_ok=True)
        (path / f"__{rank}_0.distcp").write_bytes(bytes([rank]) * 100)
        return Written()

    store = CheckpointStore(RunPaths(run), CheckpointConfig())
    store.begin((10, 0), write, {"version": 40})
    dist.barrier()
    os.scandir = lambda path: _WithoutNewNames(real(path), f"__{1 - rank}_")  # type: ignore[assignment, return-value]
    try:
        assert store.finalize(wait=True) is not None
    finally:
        os.scandir = real
    return dict(json.loads((run / "checkpoints/step_000010/manifest.json").read_text())["files"])


def test_the_manifest_has_files_that_other_nodes_do_not_list_yet(tmp_path: Path) -> None:
    """NFS keeps a folder's list for up to a minute. A file without a digest would be lost in a fork."""
    first, second = run_layout(_save_from_two_nodes, ParallelConfig(data=2), tmp_path)
    assert first == second
    assert sorted(first) == ["policy/__0_0.distcp", "policy/__1_0.distcp", "trainer.json"]
    assert first["policy/__1_0.distcp"]["sha256"] == hashlib.sha256(bytes([1]) * 100).hexdigest()
