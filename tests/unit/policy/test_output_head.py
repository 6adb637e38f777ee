"""Log-prob, entropy, loss and gradient from hidden states, by hand and against float64 autograd."""

from __future__ import annotations

import math
import weakref
from dataclasses import replace

import pytest
import torch

from bapo_megatron.policy import output_head
from bapo_megatron.policy.output_head import OutputHead
from bapo_megatron.tensor_types import MicroBatch, TokenFn, TokenStats


def batch_of(labels: torch.Tensor, weights: torch.Tensor) -> MicroBatch:
    fields = {"label_T": labels, "mask_T": torch.ones(labels.numel()), "weight_T": weights}
    return MicroBatch.of((0, labels.numel()), **fields)


def squared(stats: TokenStats, batch: MicroBatch) -> torch.Tensor:
    """A loss that is not linear in the log-probs, a count, and the entropy."""
    loss = (stats.log_prob_T.square() * batch.weight_T).sum()
    return torch.stack([loss, batch.mask_T.sum(), stats.entropy_T.sum()])


def with_entropy(stats: TokenStats, batch: MicroBatch) -> torch.Tensor:
    """``squared``, and a term that is not linear in the entropy."""
    bonus = (stats.entropy_T.square() * (1 - batch.weight_T)).sum()
    return torch.cat([(squared(stats, batch)[0] + bonus)[None], squared(stats, batch)[1:]])


def of_entropy_alone(stats: TokenStats, batch: MicroBatch) -> torch.Tensor:
    return stats.entropy_T.sum()[None]


def test_values_and_gradients_by_hand() -> None:
    """Logits (2 ln 3, 0) at temperature 2 are ln 3 and 0: probabilities 3/4 and 1/4.

    loss = -log pi(1): dz = (pi - onehot) / t = (3/8, -3/8); dh = dz W; dW = dz h. The entropy: dH/dz =
    -pi (ln pi + H) / 2, with H = ln 4 - 3/4 ln 3: ln(3/4) + H = ln 3 / 4, and ln(1/4) + H = -3/4 ln 3: times
    -3/8 and -1/8 they are -+3/32 ln 3.
    """
    hidden = torch.tensor([[2.0]], requires_grad=True)
    weight = torch.tensor([[math.log(3.0)], [0.0]], requires_grad=True)
    batch, head = batch_of(torch.tensor([1]), torch.ones(1)), OutputHead(2.0, 8)
    log_prob, entropy = head.stats(hidden.detach(), weight.detach(), batch.label_T)
    assert log_prob.item() == pytest.approx(math.log(0.25), abs=1e-6)
    assert entropy.item() == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)), abs=1e-6)
    sums = head.sums(hidden, weight, batch, lambda stats, _: -stats.log_prob_T.sum()[None])
    (10 * sums[0]).backward()
    assert sums.tolist() == pytest.approx([math.log(4.0)])
    assert hidden.grad.item() == pytest.approx(10 * 0.375 * math.log(3.0), rel=1e-6)
    assert weight.grad.flatten().tolist() == pytest.approx([10 * 0.375 * 2, -10 * 0.375 * 2], rel=1e-6)
    weight.grad = None
    head.sums(hidden.detach(), weight, batch, of_entropy_alone)[0].backward()
    step = 3 / 32 * math.log(3.0) * 2
    assert weight.grad.flatten().tolist() == pytest.approx([-step, step], rel=1e-5)


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
@pytest.mark.parametrize("loss", [squared, with_entropy, of_entropy_alone])
def test_agrees_with_float64_autograd(
    chunk: int, temperature: float, loss: TokenFn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_head, "_CACHED_LOGITS", 22)  # softmax of two rows of eleven at a time
    generator = torch.Generator().manual_seed(chunk)
    hidden = torch.randn(7, 5, generator=generator)
    weight = 2 * torch.randn(11, 5, generator=generator)
    labels = torch.randint(0, 11, (7,), generator=generator)
    batch = batch_of(labels, torch.randn(7, generator=generator))

    wide_hidden, wide_weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    log_probs = (wide_hidden @ wide_weight.t() / temperature).log_softmax(-1)
    expected = TokenStats(log_probs.gather(1, labels[:, None])[:, 0], -(log_probs.exp() * log_probs).sum(-1))
    loss(expected, batch)[0].backward()

    head = OutputHead(temperature, chunk)
    ours = head.stats(hidden, weight, labels)
    torch.testing.assert_close(ours.log_prob_T.double(), expected.log_prob_T, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.entropy_T.double(), expected.entropy_T, rtol=1e-5, atol=1e-5)

    hidden.requires_grad_()
    weight.requires_grad_()
    sums = head.sums(hidden, weight, batch, loss)
    torch.testing.assert_close(sums.double(), loss(expected, batch).detach(), rtol=1e-5, atol=1e-5)
    sums[0].backward()
    torch.testing.assert_close(hidden.grad.double(), wide_hidden.grad, rtol=5e-5, atol=2e-5)
    torch.testing.assert_close(weight.grad.double(), wide_weight.grad, rtol=5e-5, atol=2e-5)


def test_large_logits_stay_finite() -> None:
    hidden = torch.tensor([[1.0]], requires_grad=True)
    weight = torch.tensor([[1e4], [-1e4], [0.0]])
    batch = batch_of(torch.tensor([0]), torch.ones(1))
    sums = OutputHead(1.0, 4).sums(hidden, weight, batch, squared)
    sums[0].backward()
    assert sums.tolist() == [0.0, 1.0, pytest.approx(0.0, abs=1e-6)]
    assert hidden.grad.item() == 0.0


def test_bfloat16_gives_float32_results_and_bfloat16_gradients() -> None:
    hidden = torch.randn(5, 8, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(9, 8, dtype=torch.bfloat16, requires_grad=True)
    batch = batch_of(torch.arange(5), torch.ones(5))
    head = OutputHead(1.0, 2)
    stats = head.stats(hidden, weight, batch.label_T)
    assert stats.log_prob_T.dtype == stats.entropy_T.dtype == torch.float32
    head.sums(hidden, weight, batch, squared)[0].backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16
    weight.main_grad = torch.zeros(9, 8)
    for _ in range(2):  # packs of an update
        again = hidden.detach().requires_grad_()
        replace(head, adds_in_float32=True).sums(again, weight, batch, squared)[0].backward()
    assert torch.equal(again.grad, hidden.grad)
    weight.main_grad /= 2
    assert torch.equal(
        weight.main_grad.bfloat16(), weight.grad
    )  # autograd got none, or the latter would double
    assert not torch.equal(weight.main_grad, weight.grad.float())


def language_model_like(tokens: int = 200) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """bfloat16 hidden states and weights whose logits have a spread of 8, and labels drawn from them."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, 64, generator=generator).bfloat16()
    weight = torch.randn(500, 64, generator=generator).bfloat16()
    labels = torch.multinomial((hidden.float() @ weight.float().t()).softmax(-1), 1, generator=generator)[
        :, 0
    ]
    return hidden, weight, labels


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_bfloat16_log_probs_equal_sglangs(temperature: float) -> None:
    """SGLang 0.5.23 (_compute_lm_head with --enable-fp32-lm-head, then Sampler.forward), written
    down from its source: equal logits to the bit, log-probs to float32's rounding of logits of up to 107."""
    hidden, weight, labels = language_model_like()
    theirs = torch.matmul(hidden.float(), weight.float().T).div_(torch.full((1, 1), temperature))
    for chunk in (64, 4096):
        head = OutputHead(temperature, chunk)
        logits = torch.cat([part.clone() for _, _, part in head._logits(hidden, weight)])
        assert torch.equal(logits, theirs)
    ours = head.stats(hidden, weight, labels).log_prob_T
    theirs = theirs.softmax(-1).log().gather(1, labels[:, None])[:, 0]
    assert (ours - theirs).abs().max() < 1e-5


def test_temperature_divides_float32_logits() -> None:
    """Not the matmul's factor 1 / t, which rounds otherwise: 3 / 0.6 is 5, and 3 * (1 / 0.6) is not."""
    [(*_, logits)] = OutputHead(0.6, 1)._logits(torch.tensor([[3.0]]), torch.tensor([[1.0]]))
    assert logits.item() == (torch.tensor(3.0) / torch.tensor(0.6)).item()


@pytest.mark.parametrize("chunk", [3, 50])
def test_bfloat16_gradients_are_rounded_once(chunk: int) -> None:
    """Against float64 autograd: within a few roundings of bfloat16 (1/256) of the whole gradient's size."""
    hidden, weight, labels = language_model_like(50)
    batch = batch_of(labels, torch.linspace(0.3, 3.0, 50))
    wide_hidden, wide_weight = (x.double().requires_grad_() for x in (hidden, weight))
    log_probs = (wide_hidden @ wide_weight.t() / 0.6).log_softmax(-1).gather(1, labels[:, None])[:, 0]
    squared(TokenStats(log_probs, torch.zeros(50)), batch)[0].backward()
    hidden.requires_grad_()
    weight.requires_grad_()
    OutputHead(0.6, chunk).sums(hidden, weight, batch, squared)[0].backward()
    for ours, exact in ((hidden.grad, wide_hidden.grad), (weight.grad, wide_weight.grad)):
        assert (ours.double() - exact).norm() < exact.norm() / 256


def test_the_logits_of_a_whole_pack_never_exist() -> None:
    """No tensor of the pass has more rows of the vocabulary than a chunk."""
    seen: list[int] = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            tensors = (
                one for one in (out if isinstance(out, tuple) else [out]) if isinstance(one, torch.Tensor)
            )
            seen.extend(one.size(0) for one in tensors if one.shape[1:] == (50,))
            return out

    hidden, weight = torch.randn(64, 4, requires_grad=True), torch.randn(50, 4, requires_grad=True)
    batch = batch_of(torch.arange(64) % 50, torch.ones(64))
    with Sizes():
        OutputHead(1.0, 8).sums(hidden, weight, batch, squared)[0].backward()
    assert max(seen) == 8


def test_a_chunks_gradient_is_freed_before_the_next_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the size of half the logits, and lay beside the next chunk's softmax and gradient."""
    add_product, stats, gaps = output_head._add_product, OutputHead._stats, []

    def noted(total: torch.Tensor, gap: torch.Tensor, hidden: torch.Tensor) -> None:
        gaps.append(weakref.ref(gap))
        add_product(total, gap, hidden)

    def stats_after(self: OutputHead, *given: torch.Tensor) -> object:
        assert not [gap for gap in gaps if gap() is not None]
        return stats(self, *given)

    monkeypatch.setattr(output_head, "_add_product", noted)
    monkeypatch.setattr(OutputHead, "_stats", stats_after)
    hidden, weight = (torch.randn(rows, 8).bfloat16().requires_grad_() for rows in (6, 9))
    OutputHead(1.0, 2).sums(hidden, weight, batch_of(torch.arange(6), torch.ones(6)), squared)
    assert len(gaps) == 3


@pytest.mark.parametrize("chunk", [2, 50])
def test_selected_rows_equal_a_smaller_pack(chunk: int) -> None:
    """Logits of the named rows alone; the gradient of the others is zero."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.tensor([0, 3, 4, 7, 8])
    every = torch.randn(9, 4, generator=generator, requires_grad=True)
    few = every.detach()[rows].requires_grad_()
    weights = [torch.ones(6, 4).cumsum(0).div(7).requires_grad_() for _ in range(2)]
    batch = batch_of(torch.arange(5), torch.linspace(0.5, 2.0, 5))
    head = OutputHead(0.7, chunk)
    ours = head.sums(every, weights[0], batch, squared, rows)
    theirs = head.sums(few, weights[1], batch, squared)
    for sums in (ours, theirs):
        (3 * sums[0]).backward()
    assert torch.equal(ours, theirs)
    assert torch.equal(weights[0].grad, weights[1].grad)
    assert torch.equal(every.grad[rows], few.grad)
    assert not every.grad[[1, 2, 5, 6]].any()
    for found, expected in zip(
        head.stats(every, weights[0], batch.label_T, rows),
        head.stats(few, weights[1], batch.label_T),
        strict=True,
    ):
        assert torch.equal(found, expected)
