"""Layouts in one line of text: how an update is spread over processes, packs and time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bapo_megatron.config import BatchConfig, ParallelConfig

_SIZES = {
    "tp": "tensor",
    "pp": "pipeline",
    "vpp": "virtual",
    "cp": "context",
    "dp": "data",
    "ep": "expert",
    "etp": "expert_tensor",
}


@dataclass(frozen=True)
class Layout:
    """A way to spread the same update over processes, packs and time."""

    parallel: ParallelConfig
    pack_tokens: int = 96
    recompute: str = "none"
    shuffled: bool = False

    @property
    def batch(self) -> BatchConfig:
        return BatchConfig(pack_tokens=self.pack_tokens, recompute=self.recompute, logprob_chunk_tokens=40)


def layout(text: str) -> Layout:
    """``tp2-sp-pp2-vpp2-cp2-dp2 pack200 full shuffled layers1+3`` and parts of it."""
    where, *how = text.split()
    parallel: dict[str, Any] = {}
    for part in where.split("-"):
        if part == "sp":
            parallel["sequence"] = True
        elif part != "one":
            name = part.rstrip("0123456789")
            parallel[_SIZES[name]] = int(part[len(name) :])
    rest: dict[str, Any] = {"shuffled": "shuffled" in how}
    for word in how:
        if word.startswith("pack"):
            rest["pack_tokens"] = int(word[4:])
        elif word.startswith("layers"):
            parallel["pipeline_layers"] = tuple(map(int, word[6:].split("+")))
        elif word in ("selective", "full"):
            rest["recompute"] = word
    return Layout(ParallelConfig(**parallel), **rest)
