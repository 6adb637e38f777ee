"""GPU check of variable-length flash attention on context-parallel chunks, against a float64 reference.

Without process groups: the calls of all ranks run in turn, each with all keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from bapo_megatron.policy.attention import flash_attention
from bapo_megatron.policy.positions import document_chunks, positions
from benchmarks.gpu.rows import Row, Size

HEADS, KV_HEADS, WIDTH = 8, 2, 128
BLOCK = 256
LIMIT = 0.02
"""Largest error of a block of tokens, relative to the block. bfloat16 has 8 bits: 2^-8 = 0.004."""


def rows(size: Size, _folder: Path) -> Iterator[Row]:
    if not size.cuda:
        yield Row("variable-length flash attention", "not run: it needs a GPU")
        return
    for context in (1, 2, 4):
        for name, error in errors(size, context).items():
            yield Row(f"CP {context}: {name}", f"{error:.1e} in the worst block", f"{LIMIT}", error < LIMIT)


def errors(size: Size, context: int) -> dict[str, float]:
    """Largest relative error of a block, for the output and each gradient.

    By blocks, since outputs late in a long document are small: averages over many values.
    """
    multiple = 2 * context if context > 1 else 1
    bounds = tuple(accumulate((-(-n // multiple) * multiple for n in size.documents), initial=0))
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(bounds[-1], heads, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    drawn = [torch.randn(shape, generator=generator, device="cuda").bfloat16() for shape in shapes]
    *inputs, grad = drawn
    ours = _ours([x.clone().requires_grad_() for x in inputs], grad, bounds, context)
    wide = _reference([x.double().requires_grad_() for x in inputs], grad.double(), bounds)
    names = ("output", "gradient of queries", "gradient of keys", "gradient of values")
    return {name: _worst_block(a.double() - b, b) for name, a, b in zip(names, ours, wide, strict=True)}


def _worst_block(error_THD: Tensor, reference_THD: Tensor) -> float:
    parts = zip(error_THD.split(BLOCK), reference_THD.split(BLOCK), strict=True)
    return max(float(error.norm() / reference.norm()) for error, reference in parts)


def _ours(inputs: list[Tensor], grad: Tensor, bounds: tuple[int, ...], context: int) -> list[Tensor]:
    q, k, v = inputs
    whole = torch.empty_like(q)
    for rank in range(context):
        own = positions(bounds, context, rank).cuda()
        out = flash_attention(q[own], k, v, bounds, context, rank, WIDTH**-0.5)
        out.backward(grad[own])
        whole[own] = out.detach()
    return [whole, *(x.grad for x in inputs)]  # type: ignore[list-item]


def _reference(inputs: list[Tensor], grad: Tensor, bounds: tuple[int, ...]) -> list[Tensor]:
    """Output and gradients with softmax in float64, for 512 queries at a time."""
    q, k, v = inputs
    whole = torch.empty_like(q)
    for part in document_chunks(bounds, 1, 0):
        for start in range(part.first_key, part.last_key, 512):
            end = min(start + 512, part.last_key)
            keys, values = (x[part.first_key : end].repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q[start:end], keys) * WIDTH**-0.5
            position = torch.arange(part.first_key, end, device="cuda")
            later = position[None] > position[start - part.first_key :, None]
            weights = scores.masked_fill(later, -torch.inf).softmax(-1)
            out = torch.einsum("hqk,khd->qhd", weights, values)
            out.backward(grad[start:end])
            whole[start:end] = out.detach()
    return [whole, *(x.grad for x in inputs)]  # type: ignore[list-item]
