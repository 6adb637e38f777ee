"""What a layer costs: the sizes by which its kinds count, and their answers, for one token of a rank.

Activation memory: every entry is a tensor that autograd saves, once for each storage. ``torch`` is the spec
of ``policy/model.py`` on a CPU, which the tests measure. ``te`` is Transformer Engine's, after Korthikanti et
al. 2022, "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198), section 4: no
dropout, flash attention, and the fused RoPE and SwiGLU that ``policy/model.py`` asks for on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from bapo_megatron.config import ParallelConfig

Spec = Literal["te", "torch"]
Recompute = Literal["none", "selective", "full"]
FP32, INT32, INT64 = 4, 4, 8


@dataclass(frozen=True)
class Place:
    """A rank of a layout, and how its passes run."""

    hidden: int
    parallel: ParallelConfig
    element: int
    """Bytes of an activation."""
    spec: Spec
    recompute: Recompute
    imbalance: float = 1.0
    """Copies of tokens that its experts process, over the mean."""
    passes: float = 0.0
    """Forward-only passes of an update."""

    @property
    def split(self) -> int:
        """Ranks that norms and residuals are split over."""
        return self.parallel.tensor if self.parallel.sequence else 1

    @property
    def input(self) -> float:
        """Bytes of a layer's input, or of its normalized input."""
        return self.element * self.hidden / self.split

    @property
    def norm(self) -> float:
        """Bytes that a norm keeps. Fused into the matrix that follows: its input as it came, and a number a
        row. torch's on a CPU: its input and the normalized input in float32, too."""
        return FP32 + (self.input if self.spec == "te" else 2 * FP32 * self.hidden / self.split)

    @property
    def shared_input(self) -> float:
        """The layer's input, a part of what it saves that full recomputation holds already."""
        return self.input if self.spec == "te" or self.element == FP32 else 0.0

    def pair(self, again: bool) -> float:
        """Bytes of TP: two collectives forward, two backward; ``again``: "selective" repeats the former.

        The two are an all-reduce, or under SP an all-gather and a reduce-scatter. Under SP the backward pass
        also gathers the matrices' input again.
        """
        size, full = self.parallel.tensor, self.recompute == "full"
        repeated = full or (again and self.recompute == "selective")
        count = 2 + (3 if self.parallel.sequence else 2) + 2 * repeated + 2 * self.passes
        return self.hidden * self.element * (size - 1) / size * count


@dataclass(frozen=True)
class Cut:
    """A size that the ranks of a kind of parallelism must divide; of "heads" those of TP x CP."""

    axis: Literal["tensor", "heads", "expert", "expert_tensor"]
    title: str
    size: int


@dataclass(frozen=True)
class Flops:
    """FLOPs of a forward pass; a multiply-add is two."""

    linear: float = 0.0
    """Matrices, without those of experts."""
    routed: float = 0.0
    """Routers and experts, of the mean rank."""
    quadratic: float = 0.0
    """Causal attention: of a sequence of n tokens n^2 times as much."""
    selective: float = 0.0
    """The part of ``linear`` that "selective" recomputes."""


@dataclass(frozen=True)
class Saved:
    """Bytes that autograd saves for the backward pass, and what else is there beside them."""

    whole: float
    """All that is saved without recomputation."""
    selective: float
    """What is saved if "selective" recomputes the rest."""
    again: float
    """What that recomputation adds, for one layer at a time."""
    workspace: float = 0.0
    """Estimate of the gradients of its activations, and its gathered input, while its backward pass runs."""
    buffers: float = 0.0
    """Messages between CP ranks."""


@dataclass(frozen=True)
class Decoding:
    """What an engine in bfloat16 keeps of a token, and the heads by which its ranks split that; and what of
    a sequence of any length."""

    per_token: int = 0
    heads: int = 1
    per_sequence: int = 0
