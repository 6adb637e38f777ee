"""Types of a layer's cost estimates: input ``Place``, results ``Flops``, ``Saved``, ``Decoding``, ``Cut``.

Kinds of layers return them (``Kind.flops``, ``saved``, ``decoding``, ``cuts``), mostly for `bapo plan`.
Activation memory counts the tensors saved by autograd, each storage once. Its formulas are for two specs of
``policy/model.py``: ``torch``, on a CPU, which the tests measure; and ``te``, Transformer Engine's on a GPU,
after Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models" (arXiv
2205.05198), section 4: without dropout, with flash attention, fused RoPE and SwiGLU.
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
    """Input of a layer's cost estimates: hidden size, parallel layout, dtype and spec of the layers,
    recomputation, expert imbalance. Its properties are sizes on one rank."""

    hidden: int
    parallel: ParallelConfig
    element: int
    """Bytes per activation element."""
    spec: Spec
    recompute: Recompute
    imbalance: float = 1.0
    """Token copies processed by the busiest rank's experts, relative to the mean."""
    passes: float = 0.0
    """Forward-only passes per update."""

    @property
    def split(self) -> int:
        """Number of ranks that split a token's norms and residuals: TP under SP, otherwise 1."""
        return self.parallel.tensor if self.parallel.sequence else 1

    @property
    def input(self) -> float:
        """Bytes of a layer's input, or of its normalized input."""
        return self.element * self.hidden / self.split

    @property
    def norm(self) -> float:
        """Bytes kept by a norm. Fused into the next matrix: its input, and a number per row. torch's on a
        CPU: its input and normalized input in float32, too."""
        return FP32 + (self.input if self.spec == "te" else 2 * FP32 * self.hidden / self.split)

    @property
    def shared_input(self) -> float:
        """Bytes of the layer's input that full recomputation holds anyway."""
        return self.input if self.spec == "te" or self.element == FP32 else 0.0

    def pair(self, again: bool) -> float:
        """Bytes sent by TP: two collectives forward, two backward; ``again``: "selective" repeats the former.

        The two are an all-reduce, or under SP an all-gather and a reduce-scatter. Under SP the backward pass
        also gathers the matrices' input again.
        """
        size, full = self.parallel.tensor, self.recompute == "full"
        repeated = full or (again and self.recompute == "selective")
        count = 2 + (3 if self.parallel.sequence else 2) + 2 * repeated + 2 * self.passes
        return self.hidden * self.element * (size - 1) / size * count


@dataclass(frozen=True)
class Cut:
    """A size, such as a number of heads, that a parallel degree must divide; for axis "heads", TP x CP."""

    axis: Literal["tensor", "heads", "expert", "expert_tensor"]
    title: str
    size: int


@dataclass(frozen=True)
class Flops:
    """Forward FLOPs of a layer for one token (a multiply-add is two): dense matrices, experts, attention's
    part per sequence length, recomputed part."""

    linear: float = 0.0
    """Matrices, except the experts'."""
    routed: float = 0.0
    """Routers and experts, for the mean rank."""
    quadratic: float = 0.0
    """Causal attention: times n^2 for a sequence of n tokens."""
    selective: float = 0.0
    """The part of ``linear`` recomputed by "selective"."""


@dataclass(frozen=True)
class Saved:
    """Activation memory of a layer, bytes per token on a rank: saved by autograd with and without selective
    recomputation, and temporary memory of the backward pass."""

    whole: float
    """Bytes saved without recomputation."""
    selective: float
    """Bytes saved if "selective" recomputes the rest."""
    again: float
    """Bytes added by that recomputation, for one layer at a time."""
    workspace: float = 0.0
    """Estimate of the activation gradients and gathered input during its backward pass."""
    buffers: float = 0.0
    """Messages between CP ranks."""


@dataclass(frozen=True)
class Decoding:
    """Memory of a layer in a bfloat16 engine, bytes per token (KV cache) and per sequence (state), and the
    number of heads its ranks can split."""

    per_token: int = 0
    heads: int = 1
    per_sequence: int = 0
