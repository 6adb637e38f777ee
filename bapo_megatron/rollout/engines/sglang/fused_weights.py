"""Digests of fused weights: of an SGLang server's tensors, fused and sharded by tensor parallelism.

    Hugging Face              server                rank r of the server has
    q_proj, k_proj, v_proj    qkv_proj              rows: its query, key, and value heads; ranks share
                                                    one of these where there are fewer than ranks
    gate_proj, up_proj        gate_up_proj          rows: its share of each
    o_proj, down_proj         the same              columns: its share; a bias whole
    embed_tokens, lm_head     the same              rows: its share of a vocabulary that is padded with zeros
    norms                     the same              all
    experts.E.gate_proj, up   experts.w13_weight    of each expert in turn, rows: its share of each
    experts.E.down_proj       experts.w2_weight     of each expert in turn, columns: its share
    mlp.gate (router)         the same              all

The trainer computes them while it sends weights; servers must report the same ones. A tied output layer is no
tensor of its own. This holds for Qwen2, Qwen3, Qwen3 MoE and Llama. Used by ``backend.py``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bapo_megatron.rollout.engines.sent_weights import SentDigests, UnknownDigests
from bapo_megatron.rollout.engines.sglang.tensor_hash import HASHES, TensorHash

FUSED_MODELS = ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "LlamaForCausalLM")
_OTHER_LAYOUTS = (
    *("--quantization", "--dtype", "--load-format", "--model-impl", "--torchao", "--modelopt", "--lora"),
    *("--enable-lora", "--dp", "--data-parallel", "--enable-dp", "--tp", "--tensor-parallel", "--pp"),
    *("--pipeline-parallel", "--speculative", "--json-model-override", "--weight-loader", "--cpu-offload"),
    *("--device", "--model-path", "--offload", "--attn-cp", "--attention-context", "--moe"),
    *("--ep", "--expert", "--enable-eplb", "--eplb", "--init-expert", "--elastic-ep"),
)
"""Prefixes of flags that make a server's weight layout differ from the one computed here."""

_LAYER = r"model\.layers\.\d+\."
_PADDED_TO = 64
_PADDED_EXPERTS = 32
"""Rows of an expert on a rank that a CPU server pads to a multiple (SGLang 0.5.23, update_config.py)."""

Cut = Callable[[Tensor, int], list[Tensor]]
"""A sharding function: a tensor and a rank to the rank's piece, as consecutive runs of rows."""


@dataclass(frozen=True)
class Place:
    """The place of a Hugging Face tensor on a server: the fused tensor, the part in it, and the sharding.

    Made by ``FusedLayout`` for ``FusedDigests``.
    """

    name: str
    """Name of the server's tensor."""
    cut: Cut
    part: int = 0
    parts: int = 1
    """Number of Hugging Face tensors that the server's tensor is fused from; ``part``: index of this one."""


@dataclass(frozen=True)
class FusedLayout:
    """The layout of a model's weights on a server: names, fusion and sharding. Arithmetic, without I/O.

    Made by ``fused_digests``.
    """

    kv_heads: int
    tied: bool
    tensor: int
    """Tensor-parallel size."""
    experts: int = 0
    """Experts of a layer; 0 for a dense model."""

    def place(self, name: str) -> Place | None:
        """The place of the tensor ``name``; None if the server has no such tensor. ValueError if unknown."""
        if name == "lm_head.weight" and self.tied:
            return None
        if found := re.fullmatch(rf"({_LAYER}self_attn\.)([qkv])_proj\.(weight|bias)", name):
            part = "qkv".index(found[2])
            cut = self._rows if part == 0 else self._heads
            return Place(f"{found[1]}qkv_proj.{found[3]}", cut, part, 3)
        if found := re.fullmatch(rf"({_LAYER}mlp\.)(gate|up)_proj\.weight", name):
            part = ("gate", "up").index(found[2])
            return Place(f"{found[1]}gate_up_proj.weight", self._rows, part, 2)
        if found := re.fullmatch(rf"({_LAYER}mlp\.experts\.)(\d+)\.(gate|up|down)_proj\.weight", name):
            return self._expert(found[1], int(found[2]), found[3])
        alone: Sequence[tuple[str, Cut]] = (
            (rf"{_LAYER}(self_attn\.o_proj|mlp\.down_proj)\.weight", self._columns),
            (rf"{_LAYER}self_attn\.o_proj\.bias", self._whole),
            (rf"{_LAYER}(input_layernorm|post_attention_layernorm|mlp\.gate)\.weight", self._whole),
            (rf"{_LAYER}self_attn\.[qk]_norm\.weight", self._whole),
            (r"model\.norm\.weight", self._whole),
            (r"(model\.embed_tokens|lm_head)\.weight", self._vocabulary),
        )
        for pattern, own_cut in alone:
            if re.fullmatch(pattern, name):
                return Place(name, own_cut)
        raise ValueError(f"the layout of {name} on a server is unknown")

    def _expert(self, prefix: str, number: int, kind: str) -> Place:
        """The place of an expert's matrix: all experts of a layer are one tensor, expert after expert."""
        if number >= self.experts:
            raise ValueError(f"{prefix}{number}: the model has {self.experts} experts")
        if kind == "down":
            return Place(f"{prefix}w2_weight", self._columns, number, self.experts)
        part = 2 * number + ("gate", "up").index(kind)
        return Place(f"{prefix}w13_weight", self._rows, part, 2 * self.experts)

    def _whole(self, tensor: Tensor, _rank: int) -> list[Tensor]:
        return [tensor]

    def _rows(self, tensor: Tensor, rank: int) -> list[Tensor]:
        return [_share(tensor, 0, rank, self.tensor)]

    def _columns(self, tensor: Tensor, rank: int) -> list[Tensor]:
        return [_share(tensor, 1, rank, self.tensor)]

    def _heads(self, tensor: Tensor, rank: int) -> list[Tensor]:
        """Key or value heads: neighbouring ranks share a head if there are fewer heads than ranks."""
        shares = min(self.kv_heads, self.tensor)
        return [_share(tensor, 0, rank // (self.tensor // shares), shares)]

    def _vocabulary(self, tensor: Tensor, rank: int) -> list[Tensor]:
        """A rank's rows of the padded vocabulary: rows of tokens, then rows of zeros."""
        rows = padded_vocabulary(len(tensor), self.tensor) // self.tensor
        own = tensor[rank * rows : (rank + 1) * rows]
        return [own, own.new_zeros(rows - len(own), *tensor.shape[1:])]


def padded_vocabulary(tokens: int, ranks: int) -> int:
    """The padded vocabulary size: rows of an embedding on all ranks together."""
    to = _PADDED_TO
    if -(-tokens // to) * to % ranks:
        to *= ranks
    return -(-tokens // to) * to


def _share(tensor: Tensor, dim: int, index: int, shares: int) -> Tensor:
    if tensor.shape[dim] % shares:
        raise ValueError(f"{tensor.shape[dim]} rows or columns are not divided by {shares} ranks")
    size = tensor.shape[dim] // shares
    return tensor.narrow(dim, index * size, size)


@dataclass
class _Fused:
    """The unfinished hash of a server's fused tensor: one hash per rank, and parts that came out of order."""

    hashes: list[TensorHash]
    next_part: int = 0
    early: dict[int, tuple[Cut, Tensor]] = field(default_factory=dict)


class FusedDigests:
    """The ``WeightDigester`` (sent_weights.py) of SGLang servers, for one version of the weights.

    A tensor is hashed on its device, chunk by chunk. A part of a fused tensor that comes out of order, such
    as the keys before the queries, is copied until its turn: those of one layer at a time. Made by
    ``fused_digests``, fed by ``DigestingIterator``.
    """

    def __init__(self, layout: FusedLayout, device: str) -> None:
        """``device``: the kind that the servers compute on, ``cpu`` or ``cuda``."""
        self._layout, self._new_hash = layout, HASHES[device]
        self._pending: dict[str, _Fused] = {}
        self._digests: list[dict[str, str]] = [{} for _ in range(layout.tensor)]
        self._hashed_bytes = 0

    @torch.no_grad()
    def add(self, name: str, tensor: Tensor) -> None:
        """Add one whole tensor. ValueError if its layout on servers is unknown."""
        place = self._layout.place(name)
        if place is None:
            return
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
            for digests, one in zip(self._digests, fused.hashes, strict=True):
                digests[place.name] = one.digest()

    def result(self) -> SentDigests:
        """The digests after the last tensor. ValueError if a part of a fused tensor is missing."""
        if self._pending:
            raise ValueError(f"{min(self._pending)} is incomplete")
        return SentDigests(tuple(self._digests), self._hashed_bytes)

    def _hash(self, fused: _Fused, cut: Cut, tensor: Tensor) -> None:
        for rank, one in enumerate(fused.hashes):
            for run in cut(tensor, rank):
                one.add(run)
                self._hashed_bytes += run.nbytes
        fused.next_part += 1


def fused_digests(
    hf_path: Path, tensor: int, device: str, flags: Sequence[str] = ()
) -> FusedDigests | UnknownDigests:
    """The digester for ``hf_path``'s model on servers with ``flags``, or the reason why there is none."""
    config: dict[str, Any] = json.loads((hf_path / "config.json").read_text())
    reason = None
    name, *_ = config.get("architectures") or ["a model without a class"]
    if name not in FUSED_MODELS:
        reason = f"the weight layout of {name} on servers is unknown"
    elif config.get("quantization_config"):
        reason = "the model is quantized"
    elif other := [flag for flag in flags if flag.startswith(_OTHER_LAYOUTS)]:
        reason = f"servers with {other[0].partition('=')[0]} have another weight layout"
    elif device not in HASHES:
        reason = f"the tensor hash of servers on {device} is unknown"
    experts = int(config.get("num_experts") or config.get("num_local_experts") or 0)
    if experts and device == "cpu" and config["moe_intermediate_size"] % (_PADDED_EXPERTS * tensor):
        reason = f"servers on a CPU pad experts to a multiple of {_PADDED_EXPERTS} rows on each rank"
    elif experts and device == "cuda" and reason is None:
        # Some of SGLang's kernels for experts reorder rows after a load: which one is chosen, no flag says.
        reason = "the layout of experts on GPUs depends on the kernel that SGLang chooses"
    if reason:
        return UnknownDigests(reason)
    kv_heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    tied = bool(config.get("tie_word_embeddings"))
    return FusedDigests(FusedLayout(kv_heads, tied, tensor, experts), device)
