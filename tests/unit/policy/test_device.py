"""Device checks before a run: attention kernels, Transformer Engine, apex; and the gradient norm on a CPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from bapo_megatron.policy import device


def test_transformer_engine_needs_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "has_cuda", lambda: True)
    monkeypatch.setattr(device, "find_spec", lambda name: object())
    assert device.uses_transformer_engine(torch.bfloat16)
    assert not device.uses_transformer_engine(torch.float32)
    monkeypatch.setattr(device, "find_spec", lambda name: None)
    assert not device.uses_transformer_engine(torch.bfloat16)


@pytest.fixture
def norm_of() -> Callable[[list[torch.Tensor]], float]:
    """The norm by which megatron clips gradients on a CPU."""
    from megatron.core.optimizer import clip_grads

    device.use_torch_optimizer()
    overflow = torch.zeros(1, dtype=torch.int)
    return lambda tensors: float(clip_grads.l2_norm_impl(2048, overflow, [tensors], False)[0])


def test_the_gradient_norm_by_hand(norm_of: Callable[[list[torch.Tensor]], float]) -> None:
    assert norm_of([torch.tensor([[1.0, 2.0], [4.0, 0.0]]), torch.tensor([2.0, 0.0])]) == 5.0


@pytest.mark.integration
def test_the_norm_of_many_gradients_equals_float64(norm_of: Callable[[list[torch.Tensor]], float]) -> None:
    """Whole, and at each split; float32 would make it 0.16 % smaller when whole, and less so when split."""
    noise = torch.randn(30_000_000, generator=torch.Generator().manual_seed(0)).mul_(1e-3)
    expected = math.sqrt(sum(float(part.double().square().sum()) for part in noise.split(1_000_000)))
    for parts in (1, 3, 7):
        found = norm_of(list(noise.chunk(parts)))
        assert found == pytest.approx(expected, rel=2e-7), parts
    ranks = [norm_of([part]) ** 2 for part in noise.chunk(4)]
    assert math.sqrt(sum(ranks)) == pytest.approx(expected, rel=2e-7)


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_rank_makes_no_collective_on_a_cpu(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.distributed import param_and_grad_buffer as buffer

    calls: list[str] = []
    for name in ("reduce_scatter_tensor", "all_gather_into_tensor"):
        monkeypatch.setattr(torch.distributed, name, lambda *_, name=name, **__: calls.append(name))
    for name in ("dist_reduce_scatter_func", "dist_all_gather_func"):
        monkeypatch.setattr(buffer, name, getattr(buffer, name))
    device._skip_lone_collectives()
    group, values = SimpleNamespace(size=lambda: ranks), torch.ones(2)
    buffer.dist_reduce_scatter_func(values, values, op=None, group=group, async_op=False)
    buffer.dist_all_gather_func(values, values, group=group, async_op=False)
    assert calls == ([] if ranks == 1 else ["reduce_scatter_tensor", "all_gather_into_tensor"])
