"""The plan's memory against what small policies allocate on a CPU, at several layouts.

Experts are not spread by EP here: what a rank gets would depend on how random routers choose. The rehearsal
is held against such ranks, with routes that are even (``test_expert_rehearsal.py``).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from bapo_megatron.config import ParallelConfig
from tests.support.measured import KINDS, Case, compare, save_model
from tests.support.tiers import slow_but

pytestmark = pytest.mark.distributed

ONE = ParallelConfig()
TP = ParallelConfig(tensor=2)
SP = ParallelConfig(tensor=2, sequence=True)
PP = ParallelConfig(pipeline=2)
INTERLEAVED = ParallelConfig(pipeline=2, virtual=2)
DP = ParallelConfig(data=2)
ALL = ParallelConfig(tensor=2, pipeline=2, data=2, sequence=True)
ETP = ParallelConfig(tensor=2, data=2, sequence=True, expert_tensor=2)

CASES = [
    Case("qwen2", "bfloat16", "none", ONE),
    Case("qwen2", "bfloat16", "selective", ONE),
    Case("qwen2", "bfloat16", "full", ONE),
    Case("qwen2", "float32", "none", TP),
    Case("qwen3", "bfloat16", "none", SP),
    Case("llama", "float32", "full", SP),
    Case("qwen2", "bfloat16", "none", PP),
    Case("llama", "bfloat16", "selective", PP),
    Case("qwen3", "float32", "full", PP),
    Case("qwen2", "bfloat16", "none", INTERLEAVED),
    Case("qwen3", "float32", "none", DP),
    Case("qwen2", "bfloat16", "none", ALL),
    Case("qwen3_moe", "bfloat16", "none", ONE),
    Case("qwen3_moe", "bfloat16", "selective", ONE),
    Case("qwen3_moe", "float32", "none", SP),
    Case("qwen3_moe", "float32", "full", PP),
    Case("qwen3_moe", "bfloat16", "none", ETP),
]


def name_of(case: Case) -> str:
    p = case.parallel
    layout = f"tp{p.tensor}{'sp' * p.sequence}-pp{p.pipeline}x{p.virtual}-dp{p.data or 1}"
    return f"{case.family}-{case.dtype}-{case.recompute}-{layout}"


@pytest.mark.parametrize("case", slow_but(CASES, CASES[4], CASES[9]), ids=name_of)
def test_predicted_memory_is_what_is_allocated(case: Case, tmp_path: Path) -> None:
    folder = save_model(case.family, tmp_path)
    for rank, (predicted, measured) in enumerate(compare(case, folder)):
        for kind in KINDS:
            assert predicted[kind] == pytest.approx(measured[kind], rel=0.1), f"rank {rank}: {kind}"
