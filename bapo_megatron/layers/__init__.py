"""Kinds of layers: base class ``Kind``, whose subclasses are in this folder's modules, without torch.

A ``Kind`` (attention, DeltaNet, MLP, experts) holds a mixer's or MLP's sizes and returns its parameters with
their Hugging Face tensors (``Mapping``), divisibility rules, and cost estimates. Its ``builder`` makes the
megatron-core modules. All shapes are *global*: those of an unsharded model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from typing import ClassVar, Literal

from bapo_megatron.layers.costs import Cut, Decoding, Flops, Place, Saved


@dataclass(frozen=True, slots=True)
class RowSegment:
    """Consecutive rows of one HF tensor, a part of a Megatron parameter that stacks several (QKV)."""

    source: int
    """Index of the HF tensor among the parameter's."""
    row: int
    """First row of the segment in the HF tensor."""
    rows: int


@dataclass(frozen=True)
class Mapping:
    """Mapping of one megatron parameter to its HF tensors: their names and shapes, the row segments that
    stack up to it, the dimension which TP shards, and how servers and checkpoints store it."""

    hf_names: tuple[str, ...]
    """Names of the HF tensors: within a layer from a kind, with ``{layer}`` from the parameter map."""
    hf_shapes: tuple[tuple[int, ...], ...]
    segments: tuple[RowSegment, ...]
    """Segments from the parameter's first row to its last; each row of each HF tensor is in exactly one."""
    tp_dim: int | None
    """Dimension sharded by tensor parallelism; None for a replicated parameter."""
    sections: tuple[int, ...] = ()
    """Rows of the stacked parts that are sharded separately (gate and up); () for a single part."""
    section_keys: tuple[str, ...] = ()
    """Endings of the parts' separate keys in singleton-layout checkpoints."""
    stored_apart: bool = False
    """Whether the parts have separate keys in checkpoints of every layout."""
    expert: int | None = None
    """Expert index: one EP rank has the parameter, and ETP shards it along ``tp_dim``. None: every EP rank
    has the parameter, and TP shards it."""
    served: str | None = None
    """Name of the SGLang tensor that fuses the HF tensors, of all experts; None: not fused."""
    served_each: tuple[str, ...] = ()
    """The same per HF tensor, where servers fuse them into several tensors; () for one."""
    served_in_models_dtype: bool = False
    """Whether servers hold it in the model's dtype, whatever its own ``dtype``."""
    heads: tuple[int, ...] = ()
    """Heads of each HF tensor, shared by servers with more ranks; () if its rows are not heads."""
    dtype: Literal["float32"] | None = None
    """The parameter's dtype in a model of any dtype; None: the model's."""
    layers: tuple[int, ...] | None = None
    """Layers with this parameter, in the parameter map; None for a model-level parameter."""

    @property
    def places(self) -> tuple[int | None, ...]:
        """The layers that have this parameter; (None,) for a model-level one."""
        return (None,) if self.layers is None else self.layers

    @property
    def spans(self) -> list[tuple[int, int]]:
        """First row and row count of each section."""
        rows = self.sections or self.shape[:1]
        return list(zip(accumulate((0, *rows)), rows, strict=False))

    def rows_of(self, begin: int, end: int) -> Iterator[RowSegment]:
        """Yield the parameter's rows ``begin`` to ``end`` as rows of its HF tensors."""
        above = 0
        for segment in self.segments:
            first, last = max(begin, above), min(end, above + segment.rows)
            if first < last:
                yield RowSegment(segment.source, segment.row + first - above, last - first)
            above += segment.rows

    def parts(self) -> Iterator[tuple[str, Mapping]]:
        """Yield each section as a separate parameter, with its key ending."""
        for ending, (first, rows) in zip(self.section_keys, self.spans, strict=True):
            yield (
                ending,
                replace(
                    self,
                    hf_shapes=((rows, *self.shape[1:]),),
                    segments=tuple(self.rows_of(first, first + rows)),
                    sections=(),
                    section_keys=(),
                    stored_apart=False,
                ),
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter."""
        return (sum(shape[0] for shape in self.hf_shapes), *self.hf_shapes[0][1:])


def plain(hf_name: str, hf_shape: tuple[int, ...], tp_dim: int | None = None) -> Mapping:
    """The mapping of a parameter equal to one HF tensor."""
    return Mapping((hf_name,), (hf_shape,), (RowSegment(0, 0, hf_shape[0]),), tp_dim)


MOST = 2**31 - 1
"""Upper limit of a size."""


def size_problems(sizes: dict[str, int], most: int = MOST) -> Iterator[str]:
    """Yield problems with sizes from config.json, by their names in error messages; flags have none."""
    for name, size in sizes.items():
        if not isinstance(size, bool) and not 1 <= size <= most:
            yield f"a model with {name}={str(size)[:20]} cannot be"


class Kind(ABC):
    """Kind of a layer's mixer or MLP, with its sizes: a frozen dataclass of numbers and flags. Subclasses
    define the parameters and their HF mappings, the sizes that a layout must divide, FLOPs, memory and
    traffic."""

    builder: ClassVar[str]
    """Path of the ``policy/layers.Builder`` that builds it from megatron-core's modules."""
    norm_keys: ClassVar[tuple[str, ...]]
    """Checkpoint names, within a layer, of the preceding norm: as written here, then by other writers."""

    @abstractmethod
    def parameters(self, hidden: int) -> dict[str, Mapping]:
        """Parameters by megatron name within a layer, including the preceding norm."""

    def sizes(self) -> dict[str, int]:
        """Sizes that determine tensor names and shapes, by their names in error messages."""
        return asdict(self)  # type: ignore[call-overload, no-any-return]

    def problems(self) -> Iterator[str]:
        """Yield problems with the sizes from config.json."""
        yield from size_problems(self.sizes())

    def arguments(self) -> dict[str, object]:
        """Megatron-LM's arguments for the kind, which a converted checkpoint stores."""
        return {}

    def states(self) -> tuple[str, ...]:
        """Modules, within a layer, with an ``_extra_state`` in Transformer Engine's checkpoints."""
        return ()

    @abstractmethod
    def cuts(self) -> tuple[Cut, ...]:
        """Sizes that a layout must divide."""

    @abstractmethod
    def flops(self, hidden: int) -> Flops:
        """Forward FLOPs of a token, and those that grow with its sequence."""

    @abstractmethod
    def saved(self, at: Place) -> Saved:
        """Activation memory of a token on a rank."""

    @abstractmethod
    def sent(self, at: Place) -> dict[str, float]:
        """Bytes sent by the busiest GPU per token of an update, by kind of parallelism (TP, CP, EP, ETP)."""

    def decoding(self) -> Decoding:
        """An engine's memory for a token or sequence."""
        return Decoding()


@dataclass(frozen=True)
class Block:
    """The kinds of one transformer layer, in execution order: ``mixer`` (attention or DeltaNet), ``mlp``."""

    mixer: Kind
    mlp: Kind

    @property
    def kinds(self) -> tuple[Kind, Kind]:
        return self.mixer, self.mlp

    def keys(self, name: str) -> tuple[str, ...]:
        """Checkpoint names of the layer's parameter ``name``: as written here, then by other writers."""
        norms = {
            "input_layernorm.weight": self.mixer.norm_keys,
            "pre_mlp_layernorm.weight": self.mlp.norm_keys,
        }
        return norms.get(name, (name,))
