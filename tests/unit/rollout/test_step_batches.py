"""Step files: bit-exact round trip, replay, and detection of damage."""

from __future__ import annotations

import dataclasses
import errno
import os
from pathlib import Path

import numpy as np
import pytest

from bapo_megatron.errors import ConfigError, StorageFailed
from bapo_megatron.rollout.sampler.state import SamplerState
from bapo_megatron.rollout.sampler.step_batches import (
    ReplaySampler,
    StepFiles,
    read_example,
    read_header,
    read_step,
    step_groups,
    step_path,
    write_step,
)
from bapo_megatron.rollout.sampler.step_columns import header_of
from bapo_megatron.types import Group, Prompt, Rollout, StepBatch

# Floats whose bits a careless format loses: subnormal, negative zero, neighbours of one, a NaN with payload.
ODD_FLOATS = np.array([0x00000001, 0x80000000, 0x3F7FFFFF, 0x3F800001, 0xFF800000, 0x7FC12345], np.uint32)


def rollout(length: int, reward: float, seed: int = 0) -> Rollout:
    rng = np.random.default_rng(seed)
    log_probs = rng.standard_normal(length).astype(np.float32)
    log_probs[: len(ODD_FLOATS)] = ODD_FLOATS.view(np.float32)[:length]
    return Rollout(
        token_ids_R=rng.integers(0, 2**31 - 1, length).astype(np.int32),
        log_probs_R=log_probs,
        versions_R=rng.integers(0, 9, length).astype(np.int32),
        finish_reason="length" if length else "stop",
        reward=reward,
    )


def batch() -> StepBatch:
    first = Prompt(
        7, np.array([1, 2, 3], np.int32), r"\frac{é}{2}", "src", {"index": 1, "deep": {"a": [1.5]}}
    )
    second = Prompt(8, np.array([5], np.int32), "2", "src")
    return StepBatch(
        (
            Group(first, (rollout(10, 0.1), rollout(0, -1.0))),
            Group(second, (rollout(3, 1 / 3, 2), rollout(8, 0.0, 3))),
        ),
        {"reward/mean": 0.1 + 0.2, "rollout/length_max": None},
    )


def assert_same(left: StepBatch, right: StepBatch) -> None:
    assert left.metrics == right.metrics
    assert len(left.groups) == len(right.groups)
    for a, b in zip(left.groups, right.groups, strict=True):
        assert vars(a.prompt) | {"token_ids_P": 0} == vars(b.prompt) | {"token_ids_P": 0}
        assert a.prompt.token_ids_P.tobytes() == b.prompt.token_ids_P.tobytes()
        assert len(a.rollouts) == len(b.rollouts)
        for x, y in zip(a.rollouts, b.rollouts, strict=True):
            assert (x.finish_reason, x.reward) == (y.finish_reason, y.reward)
            for name in ("token_ids_R", "log_probs_R", "versions_R"):
                one, other = getattr(x, name), getattr(y, name)
                assert one.dtype == other.dtype
                assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("stored", [batch(), StepBatch((), {"reward/mean": 1.0})], ids=["whole", "empty"])
def test_a_step_file_is_bit_exact(tmp_path: Path, stored: StepBatch) -> None:
    write_step(tmp_path / "journal", 12, stored)
    assert_same(read_step(tmp_path / "journal", 12), stored)


def test_loss_masks_round_trip_and_are_optional(tmp_path: Path) -> None:
    """A rollout without a mask, beside one with a mask, gets one of ones."""
    plain = batch()
    mask_R = np.array([True, False, True])
    last = plain.groups[1]
    masked = (dataclasses.replace(last.rollouts[0], loss_mask_R=mask_R), last.rollouts[1])
    groups = (plain.groups[0], dataclasses.replace(last, rollouts=masked))
    write_step(tmp_path, 1, dataclasses.replace(plain, groups=groups))
    found = read_step(tmp_path, 1)
    assert_same(found, plain)
    masks = [rollout.loss_mask_R for group in found.groups for rollout in group.rollouts]
    assert [mask.tolist() for mask in masks] == [[True] * 10, [], [True, False, True], [True] * 8]
    with np.load(write_step(tmp_path, 2, plain)) as arrays:
        assert arrays.files == ["header", "prompt_ids", "token_ids", "log_probs", "versions"]
    assert all(one.loss_mask_R is None for group in read_step(tmp_path, 2).groups for one in group.rollouts)


def test_the_example_is_the_first_response_that_was_given_tokens(tmp_path: Path) -> None:
    """Without one it is the first response; a step that trained on nothing has none."""
    plain = batch()
    write_step(tmp_path, 1, plain)
    ids_P, [found] = read_example(tmp_path, 1)
    assert (ids_P.tolist(), len(found.token_ids_R)) == ([1, 2, 3], 10)
    given = dataclasses.replace(plain.groups[1].rollouts[1], loss_mask_R=np.arange(8) != 3)
    write_step(tmp_path, 2, StepBatch((plain.groups[0], Group(plain.groups[1].prompt, (given,))), {}))
    ids_P, [found] = read_example(tmp_path, 2)
    assert (ids_P.tolist(), len(found.token_ids_R)) == ([5], 8)
    write_step(tmp_path, 3, StepBatch((), {}))
    with pytest.raises(ConfigError, match=r"step_000003.npz has no responses: the step trained on nothing"):
        read_example(tmp_path, 3)


def test_a_compressed_step_is_refused_before_it_fills_the_memory(tmp_path: Path) -> None:
    """A report and a replay read the steps of anybody's run: here 100 kB that become 100 MB, no header."""
    path = write_step(tmp_path, 1, batch())
    np.savez_compressed(path, header=np.zeros(100_000_000, np.uint8))
    assert path.stat().st_size < 200_000
    for read in (read_example, read_header):
        with pytest.raises(ConfigError, match=r"its header.npy is compressed; write it with numpy.savez"):
            read(tmp_path, 1)


def test_a_step_is_not_lost_because_the_disk_fails_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server of NFS that is away for a minute: put aside, the step would be sampled anew."""
    write_step(tmp_path, 1, batch())
    files = StepFiles(tmp_path, lambda *_, **__: None)

    def fail(*_: object) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    state = SamplerState([], 2)
    reads = (
        lambda: files.is_readable(1),
        lambda: files.missing_records(state, 1),
        lambda: step_groups(tmp_path, 1),
    )
    for read in reads:
        with monkeypatch.context() as away:
            away.setattr(Path, "open", fail)
            with pytest.raises(StorageFailed, match=r"step 1 could not be read .*: Stale file handle"):
                read()
    assert files.is_readable(1)


def test_replay_serves_the_stored_batches(tmp_path: Path) -> None:
    write_step(tmp_path / "journal", 0, batch())
    sampler = ReplaySampler(tmp_path)
    sampler.start(0, sampler.state())
    header = sampler.next_batch(0, 1.0)
    assert header.file.path == step_path(tmp_path / "journal", 0)
    assert header == header_of(batch(), header.file)
    with pytest.raises(ConfigError, match=r"step_000001\.npz: no such file"):
        sampler.next_batch(1, 1.0)
    with pytest.raises(ConfigError, match=r"rollout\.replay=.*no journal"):
        ReplaySampler(tmp_path / "elsewhere")


def test_damage_anywhere_is_detected(tmp_path: Path) -> None:
    path = write_step(tmp_path, 1, batch())
    whole = path.read_bytes()
    damaged = [whole[:length] for length in range(0, len(whole), 97)]
    damaged += [whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :] for at in range(0, len(whole), 13)]
    told: list[str] = []
    for content in damaged:
        path.write_bytes(content)
        try:
            assert_same(read_step(tmp_path, 1), batch())  # a byte that carries nothing, such as a date
            read_header(tmp_path, 1)
        except ConfigError as error:
            told.append(str(error))
    assert len(told) > len(damaged) / 2
    assert all("step_000001.npz: the record of step 1 is damaged" in one for one in told)
