"""Log-prob and entropy in chunks against hand-worked numbers and float64 autograd."""

from __future__ import annotations

import math

import pytest
import torch

from bapo_megatron.policy.vocab_parallel import log_prob_and_entropy


def test_by_hand() -> None:
    """Logits (2 ln 3, 0) at temperature 2 are ln 3 and 0: probabilities 3/4 and 1/4."""
    logits = torch.tensor([[2 * math.log(3.0), 0.0]])
    log_prob, entropy = log_prob_and_entropy(logits, torch.tensor([1]), 2.0, 8)
    assert log_prob.item() == pytest.approx(math.log(0.25), abs=1e-6)
    assert entropy.item() == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)), abs=1e-6)


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_agrees_with_float64_and_its_gradient(chunk: int, temperature: float) -> None:
    generator = torch.Generator().manual_seed(chunk)
    logits = 3 * torch.randn(7, 11, generator=generator)
    labels = torch.randint(0, 11, (7,), generator=generator)
    weights = torch.randn(7, generator=generator)

    wide = logits.double().requires_grad_()
    expected = (wide / temperature).log_softmax(-1)
    chosen = expected.gather(1, labels[:, None])[:, 0]
    (chosen * weights).sum().backward()

    ours = logits.clone().requires_grad_()
    log_prob, entropy = log_prob_and_entropy(ours, labels, temperature, chunk)
    (log_prob * weights).sum().backward()
    torch.testing.assert_close(log_prob.double(), chosen, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), -(expected.exp() * expected).sum(-1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.grad.double(), wide.grad, rtol=1e-5, atol=1e-6)


def test_large_logits_stay_finite() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0]], requires_grad=True)
    log_prob, entropy = log_prob_and_entropy(logits, torch.tensor([0]), 1.0, 4)
    log_prob.sum().backward()
    assert log_prob.item() == 0.0
    assert entropy.item() == pytest.approx(0.0, abs=1e-6)
    assert torch.isfinite(logits.grad).all()


def test_bfloat16_logits_give_float32_results_and_bfloat16_gradients() -> None:
    logits = torch.randn(5, 9, dtype=torch.bfloat16, requires_grad=True)
    log_prob, entropy = log_prob_and_entropy(logits, torch.arange(5), 1.0, 2)
    log_prob.sum().backward()
    assert log_prob.dtype == entropy.dtype == torch.float32
    assert logits.grad.dtype == torch.bfloat16
    expected = logits.detach().float().log_softmax(-1)[torch.arange(5), torch.arange(5)]
    torch.testing.assert_close(log_prob, expected)
