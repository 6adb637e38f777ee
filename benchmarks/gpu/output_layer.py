"""GPU check of the chunked output layer against full logits and Megatron's cross entropy: time, memory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from bapo_megatron.config import BatchConfig
from benchmarks.gpu.rows import Row, Size, peak_gib, seconds
from benchmarks.output_head import chunked, full_logits, fused

TOKENS = 8192
MEGATRON = "Megatron's"


def rows(size: Size, _folder: Path) -> Iterator[Row]:
    tokens = min(TOKENS, size.pack)
    dtype = torch.bfloat16 if size.cuda else torch.float32
    hidden_TH = torch.randn(tokens, size.hidden, device=size.device, dtype=dtype).requires_grad_()
    weight_VH = torch.randn(size.vocab, size.hidden, device=size.device, dtype=dtype) / size.hidden**0.5
    weight_VH.requires_grad_()
    label_T = torch.randint(0, size.vocab, (tokens,), device=size.device)
    times = {}
    in_chunks = partial(chunked, chunk=BatchConfig().chunk_tokens(size.cuda))
    for name, way in {MEGATRON: fused, "full logits": full_logits, "chunked": in_chunks}.items():
        run = partial(way, hidden_TH, weight_VH, label_T)
        times[name] = seconds(run)
        peak = peak_gib(run)
        memory = "" if peak is None else f", {peak:.2f} GiB"
        limit = ""  # reported, not checked
        if name == "chunked" and size.cuda and not size.tiny:
            limit = f"{times[name] / times[MEGATRON]:.2f} of Megatron's, the aim is 1.15"
        title = f"{name}, {tokens:,} x {size.vocab:,}, hidden {size.hidden:,}"
        yield Row(title, f"{times[name] * 1e3:.1f} ms{memory}", limit, None)
