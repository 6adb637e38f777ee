"""The rehearsal against real ranks on gloo: their peaks of memory, phase by phase, and their collectives."""

from __future__ import annotations

from pathlib import Path

import pytest

from bapo_megatron.config import ParallelConfig
from bapo_megatron.rehearsal.processes import rehearse
from bapo_megatron.rehearsal.records import Call, RankRequest
from tests.support.rehearsals import real_ranks, small_run
from tests.support.tiers import slow_but

pytestmark = pytest.mark.distributed

LAYOUTS = {
    "one": (ParallelConfig(), 1),
    "tp2-sp": (ParallelConfig(tensor=2, sequence=True), 1),
    "cp2": (ParallelConfig(context=2), 1),
    "dp2-cp2": (ParallelConfig(data=2, context=2), 1),
    "pp2": (ParallelConfig(pipeline=2), 3),
    "pp2-vpp2": (ParallelConfig(pipeline=2, virtual=2), 4),
    "tp2-sp-pp2": (ParallelConfig(tensor=2, pipeline=2, sequence=True), 3),
}
PHASES = ("build", "bounds search 1", "update 1", "bounds search 2", "update 2", "weight sync", "save")


@pytest.mark.parametrize("name", slow_but(LAYOUTS, "tp2-sp", "pp2"))
def test_peaks_and_collectives_are_those_of_real_ranks(name: str, tmp_path: Path) -> None:
    parallel, packs = LAYOUTS[name]
    config = small_run(tmp_path, parallel, layers=parallel.pipeline * parallel.virtual)
    real = real_ranks(config, packs)
    requests = [RankRequest(config, rank, packs, "cpu") for rank in range(len(real))]
    for result, (peaks, calls) in zip(rehearse(requests), real, strict=True):
        assert result.error is None
        for phase in PHASES:
            assert result.gpu[phase].size == pytest.approx(peaks[phase], rel=0.02), (result.rank, phase)
        rehearsed = [contents(call) for call in result.calls if call.phase != "load"]
        assert rehearsed == [contents(call) for call in calls], result.rank


def contents(call: Call) -> tuple[object, ...]:
    return call.phase, call.op, call.ranks, call.size, call.dtype, call.peer, call.line
