"""Token sampling by inverse CDF, one token per row: independent of the other rows of the batch.

    token = min { v : sum_{u <= v} p_u >= draw },  p = softmax(logits / temperature),  draw in (0, 1]

``Decoding`` calls it once a token.

Shapes: ``_B`` rows of the batch, ``_V`` vocabulary. Used by ``decoding.py``.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from bapo_megatron.types import GenerateRequest


def draws_R(request: GenerateRequest) -> np.ndarray:
    """The request's uniform draws in (0, 1], float64, one for each token that it may sample.

    A seed makes one stream for the whole response, and a later segment skips the draws of its prefix: so a
    response that was cut and continued equals an uncut one. Without a seed the draws are random.
    """
    params = request.params
    uniform = np.random.default_rng(params.seed).random(request.prefix_tokens + params.max_new_tokens)
    return 1.0 - uniform[request.prefix_tokens :]


def sample(logits_BV: Tensor, temperature_B: Tensor, draw_B: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's sampled token (int64) and its log-prob (float32, nats) under softmax(logits / temperature).

    The CDF is float64. Temperature 0 is greedy, and its log-prob is that at temperature 1, as in SGLang.
    FloatingPointError if the logits are not finite.
    """
    greedy_B = temperature_B == 0
    scale_B = torch.where(greedy_B, 1.0, temperature_B)
    log_prob_BV = torch.log_softmax(logits_BV.float() / scale_B[:, None], dim=-1)
    cumulative_BV = log_prob_BV.double().exp_().cumsum(dim=-1)
    total_B1 = cumulative_BV[:, -1:]
    if not bool(torch.isfinite(total_B1).all()):
        raise FloatingPointError("the logits are not finite: the model's weights have overflowed")
    # A draw is above 0 and at most 1, so the token exists and never has probability 0.
    drawn_B = torch.searchsorted(cumulative_BV, draw_B[:, None] * total_B1)[:, 0]
    token_B = torch.where(greedy_B, log_prob_BV.argmax(dim=-1), drawn_B)
    # A CPU's log_softmax sums in float32, one after another: at 49,152 entries its total is off by 1e-5.
    chosen_B = log_prob_BV.gather(1, token_B[:, None])[:, 0] - total_B1[:, 0].log()
    return token_B, chosen_B.float()
