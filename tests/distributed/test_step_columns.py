"""A step whose columns each rank reads for itself: what is sent and read, and that nothing else changes."""

from __future__ import annotations

import dataclasses
import errno
import os
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.distributed import distributed_c10d

from bapo_megatron.algo.advantages import grpo
from bapo_megatron.algo.bapo import balanced
from bapo_megatron.algo.corrections import CorrectionsConfig
from bapo_megatron.config import (
    AlgorithmConfig,
    ParallelConfig,
    ReferenceKlConfig,
    RolloutConfig,
)
from bapo_megatron.data.packing import pack_samples
from bapo_megatron.errors import StorageFailed
from bapo_megatron.rollout.sampler.step_batches import ReplaySampler, read_header, step_path, write_step
from bapo_megatron.rollout.sampler.step_columns import StepColumns
from bapo_megatron.runtime.distributed import broadcast_from_main, is_main, on_all_ranks
from bapo_megatron.train import next_batch, train_on
from bapo_megatron.trainer.update_loss import UpdateLoss
from bapo_megatron.types import Group, Metrics, PackLayout, Prompt, Rollout, StepBatch
from tests.distributed.test_old_log_probs import batch
from tests.support.batches import MemoryBatch, samples_of
from tests.support.layouts import layout
from tests.support.policies import stepping, weights_of
from tests.support.runs import run_of
from tests.support.tiers import slow_but
from tests.support.workers import run_layout

pytestmark = pytest.mark.distributed

PLAIN = AlgorithmConfig(balanced(), reuse_epochs=2, updates_per_epoch=2, loss_mean="sequence")
EVERYTHING = AlgorithmConfig(
    dataclasses.replace(balanced(), target=0.45),
    old_log_probs="trainer",
    importance_cap=1.5,
    reuse_epochs=2,
    updates_per_epoch=2,
    corrections=CorrectionsConfig(geometric_max=1.25, off_policy_delta=0.1),
    reference_kl=ReferenceKlConfig(0.02, "k1", "reward"),
)
"""All that needs columns of every response on every rank."""


def step_batch() -> StepBatch:
    """Six groups of two; a tool wrote some tokens of one response."""
    groups = list(batch(0.0).batch.groups)
    first = groups[0].rollouts[0]
    mask_R = np.arange(len(first.token_ids_R)) % 3 != 1
    masked = dataclasses.replace(first, loss_mask_R=mask_R)
    groups[0] = dataclasses.replace(groups[0], rollouts=(masked, groups[0].rollouts[1]))
    return StepBatch(tuple(groups), {"rollout/tokens": 100.0})


class Trained(NamedTuple):
    metrics: list[Metrics]
    weights: dict[str, torch.Tensor]


def trained(
    folder: Path, parallel: ParallelConfig, algorithm: AlgorithmConfig, journal: Path | None
) -> Trained:
    """A step, replayed from ``journal`` as the loop does it, or with all columns in memory."""
    config, policy = stepping(folder, parallel, algorithm, rollout=RolloutConfig(replay=journal))
    if algorithm.reference_kl.enabled:
        policy.load_reference(folder)
    run = run_of(config, policy, UpdateLoss(algorithm), SimpleNamespace(finalize=lambda wait: None))
    found: Any = MemoryBatch(step_batch())
    if journal:
        run.sampler = ReplaySampler(journal) if is_main() else None
        found = next_batch(run, 1)
    metrics = train_on(run, 1, found)
    return Trained(metrics, weights_of(policy))


@pytest.mark.parametrize(
    ("text", "algorithm"),
    slow_but(
        [
            ("dp3", EVERYTHING),
            ("dp2-cp2", PLAIN),
            ("dp2-tp2-pp2", EVERYTHING),
            ("pp2-vpp2", PLAIN),
            ("dp2-cp2", EVERYTHING),
        ],
        ("dp3", EVERYTHING),
        ("dp2-cp2", PLAIN),
        ("dp2-tp2-pp2", EVERYTHING),
    ),
    ids=lambda one: one if isinstance(one, str) else "plain" if one is PLAIN else "everything",
)
def test_a_step_is_bit_for_bit_that_of_ranks_that_have_all_of_it(
    text: str, algorithm: AlgorithmConfig, qwen2: Path, tmp_path: Path
) -> None:
    """Metrics and weights, on every rank, after updates that deal the samples to other ranks."""
    parallel = layout(text).parallel
    write_step(tmp_path / "journal", 1, step_batch())
    in_memory = run_layout(trained, parallel, qwen2, parallel, algorithm, None)
    for ours, theirs in zip(
        run_layout(trained, parallel, qwen2, parallel, algorithm, tmp_path), in_memory, strict=True
    ):
        assert ours.metrics == theirs.metrics
        assert len(ours.metrics) == 4
        for name, tensor in ours.weights.items():
            assert torch.equal(tensor, theirs.weights[name]), name
    if algorithm is EVERYTHING:
        assert sum(row["corrections/rejected_responses"] or 0.0 for row in in_memory[0].metrics) > 0


class Traffic(NamedTuple):
    sent: int
    """Bytes that rank 0 has broadcast, as this rank received them."""
    read: Counter[int]
    """How often this rank has read each byte of the file after the header's tail."""
    packed: list[int]
    """Numbers of the samples that this rank has packed."""


def traffic(folder: Path, data: int) -> Traffic:
    """A header that rank 0 broadcasts, and an update's packs, of one sample each."""
    sent, read = [0], Counter[int]()
    broadcast, preadv = distributed_c10d.broadcast, os.preadv

    def counted(tensor: torch.Tensor, *arguments: Any, **more: Any) -> Any:
        sent[0] += tensor.nbytes
        return broadcast(tensor, *arguments, **more)

    def noted(descriptor: int, buffers: Any, offset: int) -> int:
        done = preadv(descriptor, buffers, offset)
        read.update(range(offset, offset + done))
        return done

    distributed_c10d.broadcast, os.preadv = counted, noted
    try:
        header = broadcast_from_main(read_header(folder, 1) if is_main() else None)
        columns = StepColumns(header)
        on_all_ranks(columns.open)
        samples = [one for group in samples_of(columns, grpo) for one in group]
        rank = torch.distributed.get_rank() % data  # ranks of one replica pack the same
        packs = pack_samples(samples, 4096, layout=PackLayout(rank, data))
    finally:
        distributed_c10d.broadcast, os.preadv = broadcast, preadv
    return Traffic(sent[0], read, [index for pack in packs for index, _, _ in pack.rows])


def long_step(length: int) -> StepBatch:
    """Eight groups of four responses of one length; each token is another."""
    generator = np.random.default_rng(0)
    groups = []
    for number in range(8):
        rollouts = tuple(
            Rollout(
                generator.integers(0, 9999, length).astype(np.int32),
                generator.normal(size=length).astype(np.float32),
                np.zeros(length, np.int32),
                "stop",
                float(index),
            )
            for index in range(4)
        )
        groups.append(Group(Prompt(number, np.arange(5, dtype=np.int32), "", ""), rollouts))
    return StepBatch(tuple(groups), {})


def test_the_broadcast_grows_with_responses_and_each_rank_reads_its_own_alone(tmp_path: Path) -> None:
    """Four ranks, two replicas. 100 times the tokens are sent as as many bytes, and read by the ranks."""
    found = {}
    for length in (10, 1000):
        write_step(tmp_path / str(length), 1, long_step(length))
        ranks = run_layout(traffic, ParallelConfig(data=4), tmp_path / str(length), 2)
        assert len({rank.sent for rank in ranks}) == 1
        found[length] = ranks
    assert found[1000][0].sent < 1.2 * found[10][0].sent
    assert found[1000][0].sent < 100 * 32 + 2000  # of a file of 0.4 MB
    header = read_header(tmp_path / "1000", 1)
    offset, _ = header.file.columns["token_ids"]
    for rank in found[1000]:
        assert len(rank.packed) == 16
        assert set(rank.read.values()) == {1} or max(rank.read.values()) <= 4  # a prompt serves its group
        tokens = [one for one in rank.read if offset <= one < offset + 4 * 32 * 1000]
        own = {offset + 4 * (1000 * index + at) for index in rank.packed for at in range(1000)}
        assert {one for one in tokens if (one - offset) % 4 == 0} == own
        assert all(rank.read[one] == 1 for one in tokens)
    assert sorted(found[1000][0].packed + found[1000][1].packed) == list(range(32))
    assert found[1000][0].packed == found[1000][2].packed


def seen_by(folder: Path) -> str:
    """What a rank says where rank 1 sees no file."""
    header = broadcast_from_main(read_header(folder, 1) if is_main() else None)
    if torch.distributed.get_rank() == 1:
        header = dataclasses.replace(header, file=header.file._replace(path=folder / "elsewhere.npz"))
    with pytest.raises(StorageFailed, match="No such file") as raised:
        on_all_ranks(StepColumns(header, limit_s=0.3).open)
    stale = OSError(errno.ESTALE, "Stale file handle")
    with pytest.raises(OSError if is_main() else StorageFailed, match="Stale file handle"):
        on_all_ranks(lambda: fail(stale) if is_main() else None)
    return str(raised.value)


def fail(error: Exception) -> None:
    raise error


def test_a_file_that_one_rank_does_not_see_ends_all_of_them(tmp_path: Path) -> None:
    write_step(tmp_path, 1, step_batch())
    assert step_path(tmp_path, 1).is_file()
    first, second = run_layout(seen_by, ParallelConfig(data=2), tmp_path)
    assert first == f"rank 1: {second}"
    assert f"{tmp_path}/elsewhere.npz on " in second
    assert "this rank has waited 0.3 s" in second
