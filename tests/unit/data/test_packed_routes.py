"""Routes in packs: at the position that predicts their token, as bytes or int16, read by their rank alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from bapo_megatron.data import samples as samples_module
from bapo_megatron.data.packing import pack_samples
from bapo_megatron.data.routes import write_routes
from bapo_megatron.data.samples import Sample, samples_of
from bapo_megatron.policy.experts import pack_totals, unknown_T
from bapo_megatron.types import Group, PackLayout, Prompt, Rollout, StoredRoutes
from tests.support.batches import in_memory

X = 255
PROMPT = Prompt(0, np.arange(3, dtype=np.int32), "", "")


def sample(prompt: int, response: int, routes: list[list[list[int]]] | None, dtype: str = "u1") -> Sample:
    return Sample(
        np.arange(prompt + response, dtype=np.int32),
        np.zeros(response, np.float32),
        np.zeros(response, np.int32),
        1.0,
        routes_R=None if routes is None else np.array(routes, dtype),
    )


FIRST = [[[1, 2], [3, 4]], [[5, 6], [7, 0]], [[2, 1], [4, 3]]]
SECOND = [[[6, 7], [0, 1]], [[X, X], [X, X]]]


def test_a_row_is_at_the_position_that_predicts_its_token() -> None:
    """By hand: a prompt of 3 and a response of 3, a response of 2 without a prompt, one without routes."""
    samples = [sample(3, 3, FIRST), sample(0, 2, SECOND), sample(1, 1, None)]
    [pack] = pack_samples(samples, 16)
    assert pack.route_TLK is not None
    place = {index: (start, positions) for index, start, positions in pack.rows}
    found = {n: pack.route_TLK[start : start + count].tolist() for n, (start, count) in place.items()}
    none = [[X, X], [X, X]]
    assert found == {0: [none, none, *FIRST], 1: [SECOND[1]], 2: [none]}
    assert pack.route_TLK.dtype == torch.uint8
    assert unknown_T(pack.route_TLK).sum() == pack.token_T.numel() - 3
    assert pack_totals([pack]).tolist() == [5, 3, 4]  # trained, known of them, unknown but padding


def test_numbers_of_many_experts_are_int16() -> None:
    rows = [[[300, 511]], [[0xFFFF, 0xFFFF]]]
    [pack] = pack_samples([sample(1, 2, rows, "u2")], 4)
    assert pack.route_TLK is not None
    assert (pack.route_TLK.dtype, pack.route_TLK.tolist()) == (torch.int16, [[[300, 511]], [[-1, -1]]])
    assert unknown_T(pack.route_TLK).tolist() == [False, True]


def test_packs_without_routes_have_no_column() -> None:
    [pack] = pack_samples([sample(1, 2, None)], 4)
    assert pack.route_TLK is None
    assert pack.take(slice(0, 1)).route_TLK is None


def test_a_part_has_its_tokens_routes() -> None:
    [pack] = pack_samples([sample(3, 3, FIRST)], 8)
    part = pack.take(torch.tensor([4, 0]))
    assert part.route_TLK is not None
    assert part.route_TLK.tolist() == [FIRST[2], [[X, X], [X, X]]]
    assert part.to(torch.device("cpu")).route_TLK is part.route_TLK


def test_a_rank_reads_its_own_samples_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank with a dummy pack reads none, and has the column all the same."""
    parts = [np.array(FIRST, np.uint8), np.array(SECOND, np.uint8)]
    crcs = write_routes(tmp_path / "routes.npy", parts)
    file = tmp_path / "routes.npy"
    stored = [StoredRoutes(file, first, n, 2, 2, "|u1", crc)
              for first, n, crc in ((0, 3, crcs[0]), (3, 2, crcs[1]))]  # fmt: skip
    ids = [np.arange(3, dtype=np.int32), np.arange(2, dtype=np.int32)]
    rollouts = [
        Rollout(one, np.zeros(len(one), np.float32), one, "stop", 1.0, where)
        for one, where in zip(ids, stored, strict=True)
    ]
    [samples] = samples_of(in_memory(Group(PROMPT, tuple(rollouts))), "grpo", (), "replay")
    read: list[int] = []
    plain = samples_module.read_routes
    monkeypatch.setattr(samples_module, "read_routes", lambda one: (read.append(one.first), plain(one))[1])
    packs = [pack_samples(samples, 8, layout=PackLayout(data_rank=rank, data_size=3)) for rank in range(3)]
    assert sorted(read) == [0, 3]
    assert all(pack.route_TLK is not None for [pack] in packs)
    known = sorted(int((~unknown_T(pack.route_TLK)).sum()) for [pack] in packs if pack.route_TLK is not None)
    assert known == [0, 1, 3]


@pytest.mark.parametrize(("asked", "replays"), [("off", None), ("measure", False), ("replay", True)])
def test_what_is_made_of_stored_routes(asked: str, replays: bool | None, tmp_path: Path) -> None:
    stored = StoredRoutes(tmp_path / "routes.npy", 0, 3, 2, 2, "|u1", 0)
    ids = np.arange(3, dtype=np.int32)
    one = Rollout(ids, np.zeros(3, np.float32), ids, "stop", 1.0, stored)
    [[made, _]] = samples_of(in_memory(Group(PROMPT, (one, one))), "grpo", (), asked)  # type: ignore[arg-type]
    assert made.route_row == (None if replays is None else (2, 2, np.dtype(np.uint8)))
    assert made.without_routes().route_row is None
    if replays is not None:
        assert made.replays_routes == replays
