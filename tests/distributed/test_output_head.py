"""The vocabulary-parallel output layer in bfloat16 against SGLang's formula, on two ranks."""

from __future__ import annotations

import pytest
import torch
from megatron.core import parallel_state

from bapo_megatron.config import ParallelConfig
from bapo_megatron.policy.output_head import OutputHead
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
