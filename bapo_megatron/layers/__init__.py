"""Kinds of layers: what a layer is made of, each kind taught in one file of this folder, without torch.

All shapes are *global*: those of a model that no parallelism has cut.
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
    """Row segment of a fused Megatron parameter (QKV, gate-up): consecutive rows of one HF tensor."""

    source: int
    """Index of the HF tensor among the parameter's."""
    row: int
    """First row of the segment in the HF tensor."""
    rows: int


@dataclass(frozen=True)
class Mapping:
    """Mapping of one megatron parameter of a layer or the model: HF tensors, row segments, TP cut."""

    hf_names: tuple[str, ...]
    """Names of the HF tensors: a kind gives those within a layer, the parameter map adds ``{layer}``."""
    hf_shapes: tuple[tuple[int, ...], ...]
    segments: tuple[RowSegment, ...]
    """Segments from the parameter's first row to its last. Each row of each HF tensor is in exactly one."""
    tp_dim: int | None
    """Dimension that tensor parallelism cuts; None for a replicated parameter."""
    sections: tuple[int, ...] = ()
    """Rows of the stacked parts that are each cut on their own (gate and up); () for one of all rows."""
    section_keys: tuple[str, ...] = ()
    """Endings of the parts' own keys in checkpoints of the singleton layout."""
    stored_apart: bool = False
    """Whether the parts have keys of their own in checkpoints of every layout."""
    expert: int | None = None
    """Number of the parameter's expert, which one rank of EP has, and ETP cuts along ``tp_dim``. None: every
    rank of EP has the parameter, and TP cuts it."""
    served: str | None = None
    """Name of the tensor in which SGLang's servers fuse the HF tensors, of all experts; None: as they are."""
    served_each: tuple[str, ...] = ()
    """The same for each HF tensor, where servers fuse them in several tensors; () where it is one."""
    served_in_models_dtype: bool = False
    """Whether servers hold it in the model's type, whatever its own ``dtype``."""
    heads: tuple[int, ...] = ()
    """Heads of each HF tensor, which servers of more ranks share; () where its rows are not heads."""
    dtype: Literal["float32"] | None = None
    """Type of the parameter in a model of any dtype; None: the model's."""
    layers: tuple[int, ...] | None = None
    """Layers that have it, in the parameter map; None for a parameter of the model."""

    @property
    def places(self) -> tuple[int | None, ...]:
        """The layer of each parameter of this mapping; (None,) for one of the model."""
        return (None,) if self.layers is None else self.layers

    @property
    def spans(self) -> list[tuple[int, int]]:
        """First row and number of rows of each section."""
        rows = self.sections or self.shape[:1]
        return list(zip(accumulate((0, *rows)), rows, strict=False))

    def rows_of(self, begin: int, end: int) -> Iterator[RowSegment]:
        """The rows ``begin`` to ``end`` of the parameter, as rows of its HF tensors."""
        above = 0
        for segment in self.segments:
            first, last = max(begin, above), min(end, above + segment.rows)
            if first < last:
                yield RowSegment(segment.source, segment.row + first - above, last - first)
            above += segment.rows

    def parts(self) -> Iterator[tuple[str, Mapping]]:
        """Each section as a parameter of its own, with the ending of its key."""
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
    """The mapping of a parameter that is one HF tensor."""
    return Mapping((hf_name,), (hf_shape,), (RowSegment(0, 0, hf_shape[0]),), tp_dim)


MOST = 2**31 - 1
"""The largest number that a size may be."""


class Kind(ABC):
    """Kind of a layer's mixer or MLP, with its sizes: a frozen dataclass of numbers and switches."""

    builder: ClassVar[str]
    """Path of its ``policy/layers.Builder``, which makes it of megatron-core's modules."""
    norm_keys: ClassVar[tuple[str, ...]]
    """Names of the norm before it in checkpoints within a layer: as it is written, then by other writers."""

    @abstractmethod
    def parameters(self, hidden: int) -> dict[str, Mapping]:
        """Its parameters by their megatron names within a layer, the norm before it too."""

    def sizes(self) -> dict[str, int]:
        """What determines names and shapes of its tensors, by the names in messages."""
        return asdict(self)  # type: ignore[call-overload, no-any-return]

    def problems(self) -> Iterator[str]:
        """What is wrong with its sizes, as config.json has them."""
        for name, size in self.sizes().items():
            if not isinstance(size, bool) and not 1 <= size <= MOST:
                yield f"a model with {name}={str(size)[:20]} cannot be"

    def arguments(self) -> dict[str, object]:
        """Megatron-LM's arguments of it."""
        return {}

    def states(self) -> tuple[str, ...]:
        """Its modules that keep a state of their own on Transformer Engine."""
        return ()

    @abstractmethod
    def cuts(self) -> tuple[Cut, ...]:
        """The sizes that a layout must divide."""

    @abstractmethod
    def flops(self, hidden: int) -> Flops:
        """FLOPs of a token, or those that grow with its sequence."""

    @abstractmethod
    def saved(self, at: Place) -> Saved:
        """Activation memory of a token on a rank."""

    @abstractmethod
    def sent(self, at: Place) -> dict[str, float]:
        """Bytes that the busiest GPU sends for a token in an update, by kind of parallelism."""

    def decoding(self) -> Decoding:
        """What an engine keeps of a token."""
        return Decoding()


@dataclass(frozen=True)
class Block:
    """Kinds of one layer, in the order in which it runs them."""

    mixer: Kind
    mlp: Kind

    @property
    def kinds(self) -> tuple[Kind, Kind]:
        return self.mixer, self.mlp

    def keys(self, name: str) -> tuple[str, ...]:
        """Names in checkpoints of the parameter ``name`` of the layer: as written, then by other writers."""
        norms = {
            "input_layernorm.weight": self.mixer.norm_keys,
            "pre_mlp_layernorm.weight": self.mlp.norm_keys,
        }
        return norms.get(name, (name,))
