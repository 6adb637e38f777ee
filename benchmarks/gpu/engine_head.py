"""GPU check of the output layer in bfloat16 against SGLang's formula, on equal hidden states.

SGLang (``--enable-fp32-lm-head``) multiplies hidden states and weights into float32 logits, divides by the
temperature and takes the log-softmax. Without the flag it first rounds the logits to bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from bapo_megatron.policy.output_head import OutputHead
from benchmarks.gpu.rows import Row, Size

TOKENS = 2048
LIMIT = 1e-3
"""Largest gap in nats: two float32 sums of the same products, in another order."""


def rows(size: Size, _folder: Path) -> Iterator[Row]:
    hidden_TH, weight_VH, label_T = inputs(size)
    for temperature in (1.0, 0.6):
        head = OutputHead(temperature, 1024)
        ours_T = head.stats(hidden_TH, weight_VH, label_T).log_prob_T
        for rounded in (False, True):
            gap_T = (ours_T - sglang(hidden_TH, weight_VH, label_T, temperature, rounded)).abs()
            name = "bfloat16 logits, SGLang's default" if rounded else "float32 logits, the servers' flag"
            said = f"{float(gap_T.mean()):.1e} nats on average, {float(gap_T.max()):.1e} at most"
            ok = None if rounded or not size.cuda else float(gap_T.max()) < LIMIT
            yield Row(f"T {temperature}: {name}", said, "" if rounded else f"{LIMIT}", ok)


def inputs(size: Size) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, weights (both bfloat16) and labels; logits spread over some nats, as after training."""
    generator = torch.Generator(size.device).manual_seed(0)
    tokens = min(TOKENS, size.pack)
    hidden_TH = torch.randn(tokens, size.hidden, generator=generator, device=size.device).bfloat16()
    weight_VH = torch.randn(size.vocab, size.hidden, generator=generator, device=size.device)
    label_T = torch.randint(0, size.vocab, (tokens,), generator=generator, device=size.device)
    return hidden_TH, (weight_VH * 3 / size.hidden**0.5).bfloat16(), label_T


def sglang(
    hidden_TH: Tensor, weight_VH: Tensor, label_T: Tensor, temperature: float, rounded: bool
) -> Tensor:
    """Log-probs of the labels as SGLang computes them, for 256 tokens at a time."""
    log_probs = []
    for part in torch.arange(len(label_T), device=label_T.device).split(256):
        logits = hidden_TH[part].float() @ weight_VH.float().t()
        logits = logits.bfloat16().float() if rounded else logits
        log_probs.append((logits / temperature).log_softmax(-1).gather(1, label_T[part, None])[:, 0])
    return torch.cat(log_probs)
