"""Columns of single responses out of a step's file: bit-exact, of that file alone, never of a broken one."""

from __future__ import annotations

import dataclasses
import os
import re
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bapo_megatron.algo.advantages import grpo
from bapo_megatron.data.samples import Sample
from bapo_megatron.errors import StorageFailed
from bapo_megatron.rollout.sampler import step_columns
from bapo_megatron.rollout.sampler.step_batches import read_header, step_path, write_step
from bapo_megatron.rollout.sampler.step_columns import StepColumns
from bapo_megatron.runtime.storage import FailingDiskError
from bapo_megatron.types import Group, Prompt, StepBatch
from tests.support.batches import samples_of
from tests.unit.rollout.test_step_batches import batch, rollout


def masked() -> StepBatch:
    """``batch`` with a loss mask, and a group whose prompt is empty: its first token is not predicted."""
    plain = batch()
    mask_R = np.array([True, False, True])
    second = plain.groups[1]
    some = dataclasses.replace(
        second, rollouts=(dataclasses.replace(second.rollouts[0], loss_mask_R=mask_R),)
    )
    bare = Group(Prompt(9, np.zeros(0, np.int32), "", "src"), (rollout(2, 1.0, 5), rollout(0, 0.0)))
    return StepBatch((plain.groups[0], some, bare), plain.metrics)


def opened(folder: Path, step: int) -> StepColumns:
    columns = StepColumns(read_header(folder, step))
    columns.open()
    return columns


def test_the_numbers_of_a_header_are_those_of_the_columns(tmp_path: Path) -> None:
    write_step(tmp_path, 1, masked())
    stored = [one for group in samples_of(opened(tmp_path, 1), grpo, ["", "x"]) for one in group]
    names = ("response_tokens", "trained_tokens", "predicted_tokens", "positions", "versions", "advantage")
    for sample in stored:
        loaded = sample.loaded()
        assert isinstance(loaded, Sample)
        for name in (*names, "source"):
            assert getattr(sample, name) == getattr(loaded, name), name
    assert [one.trained_tokens for one in stored] == [10, 0, 2, 2, 0]
    assert [one.predicted_tokens for one in stored] == [10, 0, 2, 1, 0]


def test_a_file_that_comes_late_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """First there is none, then an older one of the same step, at last the one that rank 0 has read."""
    write_step(tmp_path / "there", 3, masked())
    whole = step_path(tmp_path / "there", 3).read_bytes()
    header = read_header(tmp_path / "there", 3)
    path = step_path(tmp_path / "here", 3)
    header = dataclasses.replace(header, file=header.file._replace(path=path))
    path.parent.mkdir()
    states = [b"", whole[:-7], bytes(len(whole)), whole]
    waited = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        path.write_bytes(states.pop(0))

    monkeypatch.setattr(step_columns.time, "sleep", sleep)
    columns = StepColumns(header)
    columns.open()
    assert (len(waited), states) == (4, [])
    assert columns.read(0, 0)[0].tolist() == [1, 2, 3]


def test_a_file_that_stays_another_one_is_named_with_its_host(tmp_path: Path) -> None:
    path = write_step(tmp_path, 3, batch())
    columns, whole = StepColumns(read_header(tmp_path, 3), limit_s=0.0), path.read_bytes()
    path.write_bytes(whole[:-9] + bytes(9))
    size = f"{len(whole):,}"
    says = (
        f"{path} on {socket.gethostname()}: the file of {size} bytes is another than rank 0 has read. "
        f"Rank 0 has read {size} bytes there, and this"
    )
    with pytest.raises(StorageFailed, match="^" + re.escape(says)):
        columns.open()


def test_a_flipped_bit_is_found_where_it_is_read(tmp_path: Path) -> None:
    """In any value of the file, by the response that has it, and by no other."""
    path = write_step(tmp_path, 1, masked())
    header, whole = read_header(tmp_path, 1), path.read_bytes()
    places = [
        (number, index) for number, group in enumerate(header.groups) for index in range(len(group.responses))
    ]
    for array, (offset, dtype) in header.file.columns.items():
        if array == "header":
            continue
        columns = StepColumns(header)
        columns.open()  # before the damage, which the tail of so small a file would show
        damaged = bytearray(whole)
        damaged[offset + 2 * np.dtype(dtype).itemsize] ^= 0x40  # the third value
        path.write_bytes(damaged)
        for number, index in places:
            # The first prompt has both responses of its group; the third token is of the first response.
            if (number, index) == (0, 0) or (array == "prompt_ids" and number == 0):
                with pytest.raises(
                    FailingDiskError, match=f"response {index} of group 0 has other bytes than rank 0"
                ):
                    columns.read(number, index)
            else:
                columns.read(number, index)
        path.write_bytes(whole)


def test_a_file_that_cannot_be_read_while_it_is_open_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut short, where a memory map would end the process with SIGBUS; and on a disk that is gone."""
    path = write_step(tmp_path, 1, batch())
    columns = opened(tmp_path, 1)
    os.truncate(path, 700)
    with pytest.raises(
        FailingDiskError, match=r"step_000001\.npz on .*: the file ends within .*; it was cut short"
    ):
        columns.read(1, 1)

    def gone(*_: Any) -> int:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(os, "preadv", gone)
    with pytest.raises(FailingDiskError, match="prompt_ids cannot be read: Stale file handle"):
        columns.read(0, 0)


def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_step(tmp_path, 1, batch())
    columns, sound = opened(tmp_path, 1), os.preadv
    monkeypatch.setattr(os, "preadv", lambda descriptor, buffers, at: sound(descriptor, [buffers[0][:3]], at))
    assert columns.read(0, 0)[1].log_probs_R.tobytes() == rollout(10, 0.1).log_probs_R.tobytes()
