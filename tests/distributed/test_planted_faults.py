"""Faults that megatron-core had, put back one at a time: the suite of layouts sees each; those of
experts on both releases (test_other_megatron.py).

By their number in Megatron-LM: of the pull request that mended it, or of issue 7452, which is open.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from bapo_megatron.data.samples import Sample
from bapo_megatron.policy.delta_net import GatedNorm
from bapo_megatron.policy.layers import ExpertsBuilder
from bapo_megatron.policy.positions import Rotary
from tests.distributed.test_layouts import Answer, answers
from tests.support.models import EXPERTS, HYBRID, save_tiny_model

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def count_one_shard(_builder: Any, layer: Any) -> None:
    """5916: the gradient norm counts an expert's first shard alone."""
    for parameter in layer.mlp.experts.parameters():
        parameter.allreduce, parameter.tensor_model_parallel = False, False


def reduce_over_dense_ranks(_builder: Any, layer: Any) -> None:
    """6080: without EP, experts that TP repeats keep the gradient of their own rank's tokens."""
    for parameter in layer.mlp.experts.parameters():
        parameter.allreduce = True


_TABLE = Rotary.table


def number_own_tokens(rotary: Rotary, position_T: torch.Tensor) -> Any:
    """5243: a rank of CP takes the angles of its own rows, not of the document's positions."""
    return _TABLE(rotary, torch.arange(len(position_T), dtype=position_T.dtype, device=position_T.device))


def leave_own_gradient(norm: GatedNorm, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """7452, its number 11: the norm of Gated DeltaNet keeps the gradient of its own rank's heads."""
    weight = norm.weight
    return (F.rms_norm(x.float(), weight.shape, weight, norm.eps) * F.silu(z.float())).to(x.dtype)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: save_tiny_model(kind, tmp_path_factory.mktemp(kind)) for kind in (EXPERTS, HYBRID, "qwen2")}


@pytest.fixture(scope="module")
def reference(models: dict[str, Path], samples: list[Sample]) -> Callable[[str], Answer]:
    """What one process says of a kind of model, without a fault."""
    return cache(lambda kind: answers("one", models[kind], samples)[0])


def differing(ours: Answer, reference: Answer) -> set[str]:
    """What differs beyond rounding, of the first pass and of the updates."""
    found = set()
    for index, log_prob in ours.log_probs.items():
        if not torch.allclose(log_prob, reference.log_probs[index], rtol=1e-5, atol=2e-6):
            found.add("log-probs")
    if ours.grad_norms != pytest.approx(reference.grad_norms, rel=1e-5):
        found.add("gradient norm")
    pairs = [(ours.weights[name], theirs) for name, theirs in reference.weights.items()]
    if not all(torch.allclose(one, other, rtol=1e-5, atol=2e-6) for one, other in pairs):
        found.add("weights")
    return found


@pytest.mark.parametrize(
    ("kind", "layout", "owner", "name", "fault", "first"),
    [
        (EXPERTS, "tp2-sp-etp2", ExpertsBuilder, "mark", count_one_shard, "gradient norm"),
        (EXPERTS, "tp2-sp", ExpertsBuilder, "mark", reduce_over_dense_ranks, "gradient norm"),
        (HYBRID, "tp2", GatedNorm, "forward", leave_own_gradient, "weights"),
        ("qwen2", "cp2", Rotary, "table", number_own_tokens, "log-probs"),
    ],
    ids=["5916", "6080", "7452 11", "5243"],
)
def test_a_fault_that_is_put_back_is_seen(
    kind: str,
    layout: str,
    owner: type,
    name: str,
    fault: Any,
    first: str,
    models: dict[str, Path],
    reference: Callable[[str], Answer],
    samples: list[Sample],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone = reference(kind)
    monkeypatch.setattr(owner, name, fault)
    found = [differing(ours, alone) for ours in answers(layout, models[kind], samples)]
    assert all(first in one for one in found)
    assert all("log-probs" not in one for one in found) or first == "log-probs"
