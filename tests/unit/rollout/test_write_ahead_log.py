"""The write-ahead log: round trip, atomic commits, torn ends and damaged records."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bapo_megatron.rollout.sampler.write_ahead_log import Damage, Record, WriteAheadLog, encode, read_records


def record(number: int) -> Record:
    generator = np.random.default_rng(number)
    tokens = generator.integers(0, 99, number * 3).astype(np.int32)
    return Record(
        "segment",
        {"id": f"0-{number}-1", "number": number},
        {"tokens": tokens, "log_probs": -generator.random(number * 3).astype(np.float32)},
    )


RECORDS = [record(number) for number in range(5)]  # the first has empty arrays
ENDS = np.cumsum([len(b"".join(encode(one))) for one in RECORDS]).tolist()


def write(path: Path, together: bool = False) -> bytes:
    log = WriteAheadLog(path)
    for commit in [RECORDS] if together else [[one] for one in RECORDS]:
        log.write(commit)
    log.close()
    return path.read_bytes()


def same(found: Record, expected: Record) -> bool:
    return (
        (found.kind, found.fields) == (expected.kind, expected.fields)
        and found.arrays.keys() == expected.arrays.keys()
        and all(
            found.arrays[name].dtype == array.dtype and np.array_equal(found.arrays[name], array)
            for name, array in expected.arrays.items()
        )
    )


def check_survivors(path: Path, expected: list[Record]) -> list[Damage]:
    found = list(read_records(path))
    whole = [one for one in found if isinstance(one, Record)]
    assert len(whole) == len(expected)
    assert all(same(a, b) for a, b in zip(whole, expected, strict=True))
    return [one for one in found if isinstance(one, Damage)]


@given(size=st.integers(0, ENDS[-1]))
@example(size=ENDS[-1])
@settings(max_examples=150)
def test_of_a_torn_log_the_whole_commits_are_read(
    tmp_path_factory: pytest.TempPathFactory, size: int
) -> None:
    path = tmp_path_factory.mktemp("log") / "log"
    path.write_bytes(write(path)[:size])
    whole = [0, *(end for end in ENDS if end <= size)]
    damage = check_survivors(path, RECORDS[: len(whole) - 1])
    torn = Damage(whole[-1], size - whole[-1], "torn at the end")
    assert damage == ([torn] if torn.size else [])


@pytest.mark.parametrize("size", [0, 1, *(end + more for end in ENDS[:-1] for more in (0, 1)), ENDS[-1] - 1])
def test_a_commit_is_atomic(tmp_path: Path, size: int) -> None:
    path = tmp_path / "log"
    before = b"".join(encode(RECORDS[4]))
    path.write_bytes(before + write(path, together=True)[:size])
    damage = check_survivors(path, [RECORDS[4]])
    assert damage == [Damage(len(before), size, "torn at the end")][:size]


def test_damage_within_a_commit_costs_only_the_damaged_record(tmp_path: Path) -> None:
    path = tmp_path / "log"
    content = bytearray(write(path, together=True))
    content[ENDS[1] + 40] ^= 1
    path.write_bytes(content)
    damage = check_survivors(path, [*RECORDS[:2], *RECORDS[3:]])
    assert damage == [Damage(ENDS[1], ENDS[2] - ENDS[1], "damaged")]


@given(place=st.integers(0, ENDS[-1] - 1), flip=st.integers(1, 255))
@settings(max_examples=300)
def test_a_damaged_byte_costs_one_record(
    tmp_path_factory: pytest.TempPathFactory, place: int, flip: int
) -> None:
    path = tmp_path_factory.mktemp("log") / "log"
    content = bytearray(write(path))
    content[place] ^= flip
    path.write_bytes(content)
    hit = next(number for number, end in enumerate(ENDS) if place < end)
    damage = check_survivors(path, [one for number, one in enumerate(RECORDS) if number != hit])
    start = ENDS[hit - 1] if hit else 0
    why = "torn at the end" if hit == len(RECORDS) - 1 else "damaged"
    assert damage == [Damage(start, ENDS[hit] - start, why)]


def test_a_disk_that_takes_a_commit_in_pieces_gets_every_byte_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of more parts than one call takes."""
    many = Record("many", {}, {f"{n}": np.full(n % 3, n, np.int32) for n in range(3000)})
    pieces, whole = WriteAheadLog(tmp_path / "pieces"), WriteAheadLog(tmp_path / "whole")
    whole.write([many, *RECORDS])
    writev = os.writev

    def some(descriptor: int, buffers: list[memoryview]) -> int:
        """At most 7 bytes a call, so that calls end within parts, and at their ends."""
        first = buffers[0][:7]
        return writev(descriptor, [first, buffers[1][: 7 - len(first)]] if len(buffers) > 1 else [first])

    monkeypatch.setattr(os, "writev", some)
    pieces.write([many, *RECORDS])
    assert pieces.path.read_bytes() == whole.path.read_bytes()
    assert pieces.size == whole.path.stat().st_size
    assert check_survivors(whole.path, [many, *RECORDS]) == []


@pytest.mark.parametrize("call", ["writev", "fsync"])
def test_a_disk_that_fills_up_within_a_commit_leaves_the_commits_before(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network's file system may say so at the end only."""
    log = WriteAheadLog(tmp_path / "log")
    log.write([RECORDS[1]])
    writev, calls = os.writev, iter(range(9))

    def full(descriptor: int, *buffers: list[memoryview]) -> int:
        if next(calls) or not buffers:
            raise OSError(errno.ENOSPC, "No space left on device")
        return writev(descriptor, [buffers[0][0][:5]])

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(os, call, full)
        log.write([RECORDS[2], RECORDS[3]])
    log.write([RECORDS[4]])
    log.close()
    assert check_survivors(tmp_path / "log", [RECORDS[1], RECORDS[4]]) == []
