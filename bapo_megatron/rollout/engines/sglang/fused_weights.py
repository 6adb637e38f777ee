"""Expected digests of the weights on SGLang servers, computed from Hugging Face tensors while they are sent.

``fused_digests(hf_path, tensor, device, flags)`` returns a ``WeightDigester`` for servers of ``tensor``
tensor-parallel ranks: ``add(name, tensor)`` each weight, then ``result`` returns, for every rank, the hash of
each tensor of the server, which its `/weights_checker` must report. If the layout is unknown (experts on a
GPU, quantization, architecture, flags) it returns ``UnknownDigests``. Servers fuse and shard the tensors:

    Hugging Face              server                a rank of the server has
    q_proj, k_proj, v_proj    qkv_proj              rows: its query, key, and value heads; if there are fewer
                                                    heads than ranks, several ranks have the same head
    gate_proj, up_proj        gate_up_proj          rows: its share of each
    o_proj, down_proj         the same              columns: its share; a bias in full
    embed_tokens, lm_head     the same              rows: its share of the zero-padded vocabulary
    norms                     the same              all
    experts.E.gate_proj, up   experts.w13_weight    of each expert in turn, rows: its share of each
    experts.E.down_proj       experts.w2_weight     of each expert in turn, columns: its share
    mlp.gate (router)         the same              all
    shared_expert, its gate   as an MLP             as of an MLP; the gate in full
    in_proj_qkv, in_proj_z    in_proj_qkvz          rows: its share of queries, keys, values and gates
    in_proj_b, in_proj_a      in_proj_ba            rows: its share of each
    conv1d                    the same              rows: its share of queries, keys and values
    A_log, dt_bias            the same              its heads

A tied output layer is not a separate tensor. The fused names come from ``Mapping.served``, the supported
architectures from ``FAMILIES``. A tensor's hash streams over its bytes in bounded chunks:

CPU  the first 8 bytes of SHA-256.
GPU  each 32-bit word is mixed with its position and summed by tiles of 8,192 words, in two 32-bit variants;
     tile sums, 16 bytes each, are kept, mixed with the tensor's size, added modulo 2^64, and mixed again. As
     ``sglang/kernels/ops/memory/gpu_tensor_hash.py``, with torch integers on the tensor's device.

Shapes (suffix of a name): ``_B`` bytes; ``_TW`` tiles, words of a tile; ``_W`` words; ``_T`` tiles.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bapo_megatron.hf.config import ModelShape, model_shape
from bapo_megatron.hf.families import FAMILIES
from bapo_megatron.hf.parameter_map import OUTPUT, embedding_name, mapping_table
from bapo_megatron.layers import Mapping
from bapo_megatron.rollout.engines.sent_weights import SentDigests, UnknownDigests

_OTHER_LAYOUTS = (
    *("--quantization", "--dtype", "--load-format", "--model-impl", "--torchao", "--modelopt", "--lora"),
    *("--enable-lora", "--dp", "--data-parallel", "--enable-dp", "--tp", "--tensor-parallel", "--pp"),
    *("--pipeline-parallel", "--speculative", "--json-model-override", "--weight-loader", "--cpu-offload"),
    *("--device", "--model-path", "--offload", "--attn-cp", "--attention-context", "--moe"),
    *("--ep", "--expert", "--enable-eplb", "--eplb", "--init-expert", "--elastic-ep"),
)
"""Prefixes of flags that make a server's weight layout differ from the one computed here."""

_PADDED_TO = 64
_PADDED_EXPERTS = 32
"""Multiple to which a CPU server pads an expert's rows on a rank (SGLang 0.5.23, update_config.py)."""

Cut = Callable[[Tensor, int], list[Tensor]]
"""Sharding function: (tensor, rank) to the rank's piece, as consecutive runs of rows."""


@dataclass(frozen=True)
class Place:
    """Place of a Hugging Face tensor on a server: name of the fused tensor, part of it, and sharding."""

    name: str
    """Name of the server's fused tensor."""
    cut: Cut
    part: int = 0
    parts: int = 1
    """Number of Hugging Face tensors in the fused tensor; ``part`` is the index of this one."""
    in_models_dtype: bool = False
    """Whether the server casts it to the model's dtype."""


class FusedLayout:
    """Weight layout of a model on servers of ``tensor`` ranks: ``place`` maps a name to a ``Place``."""

    def __init__(self, shape: ModelShape, tensor: int) -> None:
        self.tensor = tensor
        self.vocabularies = (embedding_name(shape), OUTPUT)
        self._layer = re.compile(rf"({re.escape(shape.body)}layers\.)(\d+)\.")
        self._places: dict[str, Place] = {}
        for mapping in mapping_table(shape).values():
            names, experts = mapping.hf_names, shape.experts.count if shape.experts else 1
            served = mapping.served_each or [mapping.served or name for name in names]
            for number, (name, fused) in enumerate(zip(names, served, strict=True)):
                parts = served.count(fused)
                self._places[name] = Place(
                    _renamed(fused, shape.family),
                    self._cut(mapping, number),
                    served[:number].count(fused) + (mapping.expert or 0) * parts,
                    parts * (1 if mapping.expert is None else experts),
                    mapping.served_in_models_dtype,
                )

    def place(self, name: str) -> Place:
        """Return the place of tensor ``name``. Raises ValueError if it is unknown."""
        layer = self._layer.match(name)
        place = self._places.get(self._layer.sub(r"\1{layer}.", name))
        if place is None:
            raise ValueError(f"the layout of {name} on a server is unknown")
        return replace(place, name=place.name.format(layer=layer and layer[2]))

    def _cut(self, mapping: Mapping, number: int) -> Cut:
        """Return the sharding of one of the mapping's HF tensors."""
        if mapping.hf_names[0] in self.vocabularies:
            return self._vocabulary
        if mapping.tp_dim is None:
            return lambda tensor, _rank: [tensor]
        dim, ranks = mapping.tp_dim, self.tensor
        shares = min(ranks, mapping.heads[number]) if mapping.heads else ranks
        rows = _parts_cut_apart(mapping, number)

        def cut(tensor: Tensor, rank: int) -> list[Tensor]:
            parts = tensor.split(rows) if dim == 0 else [tensor]
            return [_share(part, dim, rank // (ranks // shares), shares) for part in parts]

        return cut

    def _vocabulary(self, tensor: Tensor, rank: int) -> list[Tensor]:
        """Return a rank's rows of the padded vocabulary: token rows, then zero rows."""
        rows = padded_vocabulary(len(tensor), self.tensor) // self.tensor
        own = tensor[rank * rows : (rank + 1) * rows]
        return [own, own.new_zeros(rows - len(own), *tensor.shape[1:])]


def padded_vocabulary(tokens: int, ranks: int) -> int:
    """Return the padded vocabulary size, the sum of embedding rows over all ranks."""
    to = _PADDED_TO
    if -(-tokens // to) * to % ranks:
        to *= ranks
    return -(-tokens // to) * to


def _renamed(name: str, family: str) -> str:
    for theirs, served in FAMILIES[family].served_names:
        name = name.replace(theirs, served)
    return name


def _parts_cut_apart(mapping: Mapping, number: int) -> list[int]:
    """Return the row counts of the separately sharded parts of one of the mapping's HF tensors."""
    first = sum(shape[0] for shape in mapping.hf_shapes[:number])
    end = first + mapping.hf_shapes[number][0]
    if not mapping.sections:
        return [end - first]
    return [rows for above, rows in mapping.spans if first <= above < end]


def _share(tensor: Tensor, dim: int, index: int, shares: int) -> Tensor:
    if tensor.shape[dim] % shares:
        raise ValueError(f"{tensor.shape[dim]} rows or columns are not divided by {shares} ranks")
    size = tensor.shape[dim] // shares
    return tensor.narrow(dim, index * size, size)


@dataclass
class _Fused:
    """Unfinished hash of a fused tensor: one hash per rank, and tensors that came before their turn."""

    hashes: list[CpuHash | GpuHash]
    next_part: int = 0
    early: dict[int, tuple[Cut, Tensor]] = field(default_factory=dict)


class FusedDigests:
    """``WeightDigester`` of SGLang servers, for one weight version. Tensors are hashed on their device; parts
    of a fused tensor that come out of order, such as keys before queries, are copied until their turn."""

    def __init__(self, layout: FusedLayout, device: str) -> None:
        """``device``: the servers' device type, ``cpu`` or ``cuda``."""
        self._layout, self._new_hash = layout, HASHES[device]
        self._pending: dict[str, _Fused] = {}
        self._dtype: torch.dtype | None = None
        """The model's dtype, from its embedding or output layer."""
        self._rounded: list[tuple[Place, Tensor]] = []
        """Small tensors to cast to ``_dtype`` and hash at the end."""
        self._digests: list[dict[str, str]] = [{} for _ in range(layout.tensor)]
        self._hashed_bytes = 0

    @torch.no_grad()
    def add(self, name: str, tensor: Tensor) -> None:
        place = self._layout.place(name)
        if place.in_models_dtype:
            self._rounded.append((place, tensor.detach().clone()))
            return
        if name in self._layout.vocabularies:
            self._dtype = tensor.dtype
        self._add(place, tensor)

    def _add(self, place: Place, tensor: Tensor) -> None:
        fused = self._pending.get(place.name)
        if fused is None:
            hashes = [self._new_hash() for _ in range(self._layout.tensor)]
            fused = self._pending[place.name] = _Fused(hashes)
        if place.part != fused.next_part:
            fused.early[place.part] = place.cut, tensor.detach().clone()
            return
        self._hash(fused, place.cut, tensor)
        while fused.next_part in fused.early:
            self._hash(fused, *fused.early.pop(fused.next_part))
        if fused.next_part == place.parts:
            del self._pending[place.name]
            for digests, rank_hash in zip(self._digests, fused.hashes, strict=True):
                digests[place.name] = rank_hash.digest()

    def result(self) -> SentDigests:
        """Return the digests after the last tensor. Raises ValueError if a fused tensor lacks a part."""
        for place, tensor in self._rounded:
            self._add(place, tensor.to(self._dtype))
        if self._pending:
            raise ValueError(f"{min(self._pending)} is incomplete")
        return SentDigests(tuple(self._digests), self._hashed_bytes)

    def _hash(self, fused: _Fused, cut: Cut, tensor: Tensor) -> None:
        for rank, rank_hash in enumerate(fused.hashes):
            for run in cut(tensor, rank):
                rank_hash.add(run)
                self._hashed_bytes += run.nbytes
        fused.next_part += 1


def fused_digests(
    hf_path: Path, tensor: int, device: str, flags: Sequence[str] = ()
) -> FusedDigests | UnknownDigests:
    """Return the digester for ``hf_path``'s model on servers with ``flags``; UnknownDigests says why none."""
    config: dict[str, Any] = json.loads((hf_path / "config.json").read_text())
    reason = None
    name, *_ = config.get("architectures") or ["a model without a class"]
    if name not in {family.served for family in FAMILIES.values()}:
        reason = f"the weight layout of {name} on servers is unknown"
    elif config.get("quantization_config"):
        reason = "the model is quantized"
    elif other := [flag for flag in flags if flag.startswith(_OTHER_LAYOUTS)]:
        reason = f"servers with {other[0].partition('=')[0]} have another weight layout"
    if reason:
        return UnknownDigests(reason)
    shape = model_shape(config, str(hf_path))
    widths = [cut.size for cut in shape.experts.cuts() if cut.axis != "expert"] if shape.experts else []
    if device == "cpu" and any(width % (_PADDED_EXPERTS * tensor) for width in widths):
        return UnknownDigests(
            f"servers on a CPU pad experts to a multiple of {_PADDED_EXPERTS} rows on each rank"
        )
    if shape.experts and device == "cuda":
        # Some of SGLang's expert kernels reorder rows after a load, and no flag shows the chosen kernel.
        return UnknownDigests("the layout of experts on GPUs depends on the kernel that SGLang chooses")
    return FusedDigests(FusedLayout(shape, tensor), device)


# --- hashes of tensors ---------------------------------------------------------------------------


TILE_WORDS = 8192
_WORD = 4
_TILE = _WORD * TILE_WORDS
_CHUNK = 256 * _TILE
"""Chunk size in bytes; on a GPU a chunk takes a few times as much memory."""
_PLACES = ((0x27D4EB2D, 15), (0x165667B1, 13))
_SEED = 0x243F6A88
_SEEDS = (_SEED, (_SEED * 0x9E3779B1) ^ 0xDEADBEEF)
_MASK32, _MASK64 = 2**32 - 1, 2**64 - 1


class CpuHash:
    """SGLang's hash of a tensor on a CPU: ``add`` its pieces in order; ``digest`` returns 16 hex digits."""

    def __init__(self) -> None:
        self._sha = hashlib.sha256()

    def add(self, piece: Tensor) -> None:
        for chunk_B in _chunks(piece):
            # A copy: a storage shared with numpy cannot be resized, which the offload does.
            self._sha.update(chunk_B.to("cpu", copy=True).numpy().data)

    def digest(self) -> str:
        return self._sha.hexdigest()[:16]


class GpuHash:
    """SGLang's hash of a tensor on a GPU, here of pieces on any device; methods as in ``CpuHash``."""

    def __init__(self) -> None:
        self._rest_B: Tensor | None = None
        """Bytes after the last complete tile."""
        self._words = 0
        self._sums: list[tuple[Tensor, Tensor]] = []

    def add(self, piece: Tensor) -> None:
        for chunk_B in _chunks(piece):
            run_B = chunk_B if self._rest_B is None else torch.cat([self._rest_B, chunk_B])
            whole = len(run_B) // _TILE * _TILE
            self._rest_B = run_B[whole:].clone() if whole < len(run_B) else None
            if whole:
                self._sum(_words(run_B[:whole]).view(-1, TILE_WORDS))

    def digest(self) -> str:
        if self._rest_B is not None:
            padded_B = torch.nn.functional.pad(self._rest_B, (0, -len(self._rest_B) % _WORD))
            self._sum(_words(padded_B).view(1, -1))
            self._rest_B = None
        if not self._words:
            return f"{0:016x}"
        size = _signed(_WORD * self._words)
        high_T, low_T = (
            _mixed(torch.cat(sums).to(torch.int32) ^ size).long() for sums in zip(*self._sums, strict=True)
        )
        total = int(((high_T << 32) | (low_T & _MASK32)).sum())
        return f"{_mixed64(total & _MASK64):016x}"

    def _sum(self, words_TW: Tensor) -> None:
        first, count = self._words, words_TW.numel()
        places_TW = torch.arange(first, first + count, device=words_TW.device).to(torch.int32)
        places_TW = places_TW.view(words_TW.shape)
        sums = []
        for (factor, turn), seed in zip(_PLACES, _SEEDS, strict=True):
            place_TW = (places_TW * _signed(factor) + _signed(seed)) ^ _rotated(places_TW, turn)
            sums.append(_mixed(words_TW ^ place_TW).sum(dim=1, dtype=torch.int64) & _MASK32)
        self._sums.append((sums[0], sums[1]))
        self._words += count


HASHES: dict[str, type[CpuHash | GpuHash]] = {"cpu": CpuHash, "cuda": GpuHash}
"""Hash by the server's device type: ``add`` pieces in row-major order; ``digest`` returns 16 hex digits."""


def _chunks(piece: Tensor) -> Iterator[Tensor]:
    """Yield a tensor's bytes in order, in bounded chunks; a strided tensor is copied chunk by chunk."""
    piece = piece.detach()
    if not piece.is_contiguous() and piece.dim() > 1:
        rows = max(1, _CHUNK // max(1, piece[0].numel() * piece.itemsize))
        for part in piece.split(rows):
            yield from _chunks(part.contiguous())
        return
    if piece.numel():
        yield from piece.contiguous().view(-1).view(torch.uint8).split(_CHUNK)


def _words(run_B: Tensor) -> Tensor:
    """View bytes as little-endian int32 words, for arithmetic modulo 2^32."""
    if run_B.data_ptr() % _WORD or run_B.storage_offset() % _WORD:
        run_B = run_B.clone()
    return run_B.view(torch.int32)


def _signed(value: int) -> int:
    value &= _MASK32
    return value - 2**32 if value >= 2**31 else value


def _shifted(words: Tensor, by: int) -> Tensor:
    """Logical shift: ``words >> by`` of unsigned words."""
    return (words >> by) & ((1 << (32 - by)) - 1)


def _rotated(words: Tensor, by: int) -> Tensor:
    return (words << by) | _shifted(words, 32 - by)


def _mixed(words: Tensor) -> Tensor:
    """The 32-bit finalizer of MurmurHash3."""
    words = words ^ _shifted(words, 16)
    words = words * _signed(0x85EBCA6B)
    words = words ^ _shifted(words, 13)
    words = words * _signed(0xC2B2AE35)
    return words ^ _shifted(words, 16)


def _mixed64(value: int) -> int:
    """The finalizer of splitmix64."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)
