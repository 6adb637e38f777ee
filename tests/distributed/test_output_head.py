"""The vocabulary-parallel output layer in bfloat16 against SGLang's formula, on two ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from bapo_megatron.config import ParallelConfig
from bapo_megatron.policy.output_head import OutputHead
from bapo_megatron.tensor_types import MicroBatch, TokenStats
from tests.support.workers import run_layout

pytestmark = pytest.mark.distributed


def states() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(100, 64, generator=generator).bfloat16()
    weight = torch.randn(500, 64, generator=generator).bfloat16()
    return hidden, weight, torch.randint(0, 500, (100,), generator=generator)


def on_a_rank() -> list[torch.Tensor]:
    hidden, weight, labels = states()
    group = parallel_state.get_tensor_model_parallel_group()
    part = weight.chunk(group.size())[group.rank()]
    return [OutputHead(temperature, 32, group).stats(hidden, part, labels).log_prob_T for temperature in T]


T = (0.6, 1.0)


def test_bfloat16_log_probs_of_two_ranks_are_those_of_a_server_of_two() -> None:
    """SGLang 0.5.23 with --enable-fp32-lm-head: float32 logits of each rank, gathered; /= t; softmax; log."""
    hidden, weight, labels = states()
    found = run_layout(on_a_rank, ParallelConfig(tensor=2))
    for number, temperature in enumerate(T):
        logits = torch.cat([hidden.float() @ part.float().T for part in weight.chunk(2)], -1)
        theirs = logits.div_(torch.full((1, 1), temperature)).softmax(-1).log()
        for rank in range(2):
            assert torch.equal(found[rank][number], found[0][number])
            gap = found[rank][number] - theirs.gather(1, labels[:, None])[:, 0]
            # Labels at random: log-probs down to -100, of which float32 keeps eight millionths.
            assert gap.abs().max() < 3e-5


def split_states(vocabulary: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Six tokens whose logits are the columns of the weights, to the bit; entropies of 0.03 to 10 nats."""
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(vocabulary, 6, generator=generator)
    weight = noise * torch.tensor([0.5, 2.0, 3.0, 3.5, 4.5, 6.0]) + torch.linspace(0.0, 30.0, 6)
    return torch.eye(6), weight, torch.multinomial(weight.t().softmax(1), 1, generator=generator)[:, 0]


SPLITS = {49_152: (1, 2, 3, 4), 151_936: (2, 4)}
"""Sizes of real vocabularies, and the TP sizes that divide them."""


def at_each_split() -> dict[tuple[int, int], tuple[TokenStats, torch.Tensor, torch.Tensor]]:
    """The stats and both gradients of this rank's part of the logits, by vocabulary and TP size."""
    found = {}
    for vocabulary, size in EACH:
        hidden, weight, labels = split_states(vocabulary)
        group = dist.new_group(range(size))
        if dist.get_rank() < size:
            part = weight.chunk(size)[dist.get_rank()].clone().requires_grad_()
            head = OutputHead(1.0, 4, group)
            batch = MicroBatch.of((0, 6), label_T=labels, mask_T=torch.ones(6))
            head.sums(hidden, part, batch, lambda stats, _: stats.log_prob_T.sum()[None])[0].backward()
            of_log_probs, part.grad = part.grad, None
            head.sums(hidden, part, batch, lambda stats, _: stats.entropy_T.sum()[None])[0].backward()
            found[vocabulary, size] = (head.stats(hidden, part.detach(), labels), of_log_probs, part.grad)
    return found


EACH = [(vocabulary, size) for vocabulary, sizes in SPLITS.items() for size in sizes]


def test_a_real_vocabulary_is_summed_as_in_float64_at_every_split() -> None:
    ranks = run_layout(at_each_split, ParallelConfig(tensor=4))
    for vocabulary, size in EACH:
        _, weight, labels = split_states(vocabulary)
        log_prob_TV = weight.t().double().log_softmax(1)
        entropy_T = -(log_prob_TV.exp() * log_prob_TV).sum(1)
        gap_VT = torch.nn.functional.one_hot(labels, vocabulary).t() - log_prob_TV.exp().t()
        taken = [found[vocabulary, size] for found in ranks[:size]]
        for stats, *_ in taken:
            expected_T = log_prob_TV.gather(1, labels[:, None])[:, 0]
            torch.testing.assert_close(stats.log_prob_T.double(), expected_T, rtol=2e-6, atol=0)
            torch.testing.assert_close(stats.entropy_T.double(), entropy_T, rtol=2e-6, atol=0)
        gap = torch.cat([grad for _, grad, _ in taken]).double() - gap_VT
        # A step of float32 at log-norms of 32 to 64, whose rounding all probabilities of a token share.
        assert (gap.norm(dim=0) < 2**-18 * gap_VT.norm(dim=0)).all()
        entropy_VT = -(log_prob_TV.exp() * (log_prob_TV + entropy_T[:, None])).t()
        gap = torch.cat([grad for *_, grad in taken]).double() - entropy_VT
        assert (gap.norm(dim=0) < 2**-16 * entropy_VT.norm(dim=0)).all()
