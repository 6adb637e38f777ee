"""``DocumentAttention``, core attention in torch for packed sequences (``thd``), causal within each document.

Layers use it where Transformer Engine is missing or has no kernel; ``DocumentPack`` carries a pack's document
bounds, RoPE and routes to all layers.

Context parallelism: keys and values are all-gathered over the CP ranks (small, with grouped-query heads);
each rank's queries attend to the preceding part of their document. No mask tensor is allocated. Half
precision on a GPU uses ``flash_attention``; float32 and CPUs use padded batches of whole documents, under CP
``prefix_attention`` of chunks.

Flash attention: one call of torch's variable-length kernel for all chunks, from torch 2.11 on. Its causal
mask aligns the last query with the last key (bottom right), which suits a document's chunk: its queries are
the last of its keys.

Padded batches: documents of similar length, right-padded, through SDPA. Under a causal mask no real query
sees the padding behind it, so SDPA needs no mask tensor and can use its fast kernels.

Prefix attention: causal attention of n queries, the last of m keys, m >= n. On a CPU one flash call computes
the prefix, visible to every query, and a second one the last n keys, causally; their log-sum-exps merge the
outputs (Milakov & Gimelshein 2018, arXiv 1805.02867). With the merged output and log-sum-exp each part's
backward gives its exact share of the gradient, as in ring attention (Liu et al. 2023, arXiv 2310.01889).
Where m = n, and on a GPU (float32), it is one SDPA call.

Shapes: ``_THD`` [pack tokens, heads, head_dim], ``_LHD`` the same for the tokens on this rank, ``_LKHD`` with
keys and values in a dimension of 2, ``_PHD`` [rows of all padded batches, heads, head_dim], ``_KHD`` for the
keys of a rank's chunks, end to end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from inspect import signature
from itertools import accumulate, pairwise
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from bapo_megatron.policy.experts import PackLoad, PackRoutes
from bapo_megatron.policy.positions import RotaryTable, document_chunks, gathered_rows, rotate

# Padding limit: a padded batch has at most this many times the tokens of its documents.
_MAX_PADDING = 1.5

# torch's flash kernels for the CPU: the public function does not return the log-sum-exp.
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass
class DocumentPack(PackedSeqParams):  # type: ignore[misc]
    """megatron-core's ``PackedSeqParams`` of a pack, plus what the layers here read: document bounds on the
    host, RoPE table, the experts to replay (routes), and the counter of tokens per expert. ``PolicyModel``
    creates one for each forward pass of a pack."""

    bounds: tuple[int, ...] = ()
    """``cu_seqlens`` on the host: reading it from a GPU would synchronize in every layer."""
    pad_between_seqs: bool = False
    """Whether padding separates documents; a document's own padding is part of it."""
    rotary: RotaryTable | None = None
    """RoPE of this rank's tokens; None if queries and keys are already rotated."""
    routes: PackRoutes | None = None
    """The experts to which the engine sent this rank's tokens; None if unknown or unused."""
    load: PackLoad | None = None
    """Counts tokens per expert in the layers; None: no counting."""

    @classmethod
    def of(
        cls,
        bounds: tuple[int, ...],
        longest: int,
        device: torch.device,
        rotary: RotaryTable | None = None,
        routes: PackRoutes | None = None,
        load: PackLoad | None = None,
    ) -> DocumentPack:
        """The parameters of a pack: documents ``bounds[d]:bounds[d + 1]`` of at most ``longest`` tokens."""
        cu_seqlens = torch.tensor(bounds, dtype=torch.int32).to(device, non_blocking=True)
        return cls(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            cu_seqlens_q_padded=cu_seqlens,
            cu_seqlens_kv_padded=cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            bounds=bounds,
            rotary=rotary,
            routes=routes,
            load=load,
        )


class DocumentAttention(MegatronModule):  # type: ignore[misc]
    """Core attention module: RoPE, then dot-product attention, causal within each document of a pack.
    ``forward`` takes this CP rank's queries, keys and values and returns [tokens, heads * head_dim]; with CP
    it is collective over the CP ranks. megatron-core creates one per layer."""

    def __init__(
        self,
        config: Any,
        *_args: Any,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.size = config.context_parallel_size
        self.group = pg_collection.cp if self.size > 1 else None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: DocumentPack,
        **_kwargs: Any,
    ) -> Tensor:
        """Return the attention of this CP rank's tokens, [tokens, heads * head_dim]. query [tokens, heads,
        head_dim]; key, value [tokens, kv_heads, head_dim]; ``packed_seq_params``: those of the whole pack."""
        bounds = packed_seq_params.bounds
        if packed_seq_params.rotary is not None:
            query, key = (rotate(x_LHD, packed_seq_params.rotary) for x_LHD in (query, key))
        rank = 0
        if self.group is not None:
            rank = self.group.rank()
            key, value = self._whole(torch.stack([key, value], 1), bounds).unbind(1)
        if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
            return flash_attention(query, key, value, bounds, self.size, rank, self.scale).flatten(1)
        if self.size == 1:
            return padded_attention(query, key, value, bounds, self.scale).flatten(1)
        return _by_segment(query, key, value, bounds, self.size, rank, self.scale).flatten(1)

    def _whole(self, x_LKHD: Tensor, bounds: tuple[int, ...]) -> Tensor:
        """All-gather the pack's rows over the CP ranks, in the pack's order; backward: a reduce-scatter."""
        gathered = gather_from_sequence_parallel_region(
            x_LKHD, tensor_parallel_output_grad=True, group=self.group
        )
        return gather_rows(gathered, *rows_on(bounds, self.size, gathered.device))

    def sharded_state_dict(self, *_args: Any, **_kwargs: Any) -> dict[str, Any]:
        """Return an empty state: attention has no parameters."""
        return {}


def flash_attention(
    query_LHD: Tensor,
    key_THD: Tensor,
    value_THD: Tensor,
    bounds: tuple[int, ...],
    size: int,
    rank: int,
    scale: float,
) -> Tensor:
    """Attention [tokens, heads, head_dim] of this rank's queries; documents ``bounds[d]:bounds[d + 1]``."""
    from torch.nn.attention.varlen import varlen_attn  # torch 2.10

    plan = _key_plan(bounds, size, rank, query_LHD.device)
    key_KHD, value_KHD = key_THD, value_THD
    if size > 1:  # two chunks of a document see overlapping keys: (2 x size + 1) chunks instead of 2 x size
        key_KHD, value_KHD = key_THD[plan.key_rows], value_THD[plan.key_rows]
    options: dict[str, Any] = {"scale": scale, "window_size": (-1, 0)}
    groups = query_LHD.size(1) // key_THD.size(1)
    if "enable_gqa" in signature(varlen_attn).parameters:
        options["enable_gqa"] = groups > 1
    else:  # torch 2.11
        key_KHD, value_KHD = (x.repeat_interleave(groups, 1) for x in (key_KHD, value_KHD))
    limits = plan.query_bounds, plan.key_bounds, plan.most_queries, plan.most_keys
    return cast(Tensor, varlen_attn(query_LHD, key_KHD, value_KHD, *limits, **options))


class _KeyPlan:
    """Inputs of the variable-length attention kernel for a rank's document chunks, on the device: rows of the
    keys, cumulative bounds and largest counts of queries and keys."""

    def __init__(self, bounds: tuple[int, ...], size: int, rank: int, device: torch.device) -> None:
        parts = [s for s in document_chunks(bounds, size, rank) if s.queries]
        keys = [part.last_key - part.first_key for part in parts]
        queries = [part.queries for part in parts]
        rows = torch.cat([torch.arange(part.first_key, part.last_key) for part in parts])
        bounds_of = [torch.tensor([0, *accumulate(counts)], dtype=torch.int32) for counts in (queries, keys)]
        self.key_rows, self.query_bounds, self.key_bounds = (
            x.to(device, non_blocking=True) for x in (rows, *bounds_of)
        )
        self.most_queries, self.most_keys = max(queries), max(keys)


_key_plan = lru_cache(maxsize=16)(_KeyPlan)  # every layer of a micro-batch needs the same plan


def _by_segment(
    query_LHD: Tensor,
    key_THD: Tensor,
    value_THD: Tensor,
    bounds: tuple[int, ...],
    size: int,
    rank: int,
    scale: float,
) -> Tensor:
    """Attention [tokens, heads, head_dim] of this rank's queries, chunk by chunk."""
    parts = [s for s in document_chunks(bounds, size, rank) if s.queries]
    outputs = []
    for part, q_LHD in zip(parts, query_LHD.split([part.queries for part in parts]), strict=True):
        k_THD, v_THD = (x_THD[part.first_key : part.last_key] for x_THD in (key_THD, value_THD))
        q, k, v = (x[None].transpose(1, 2) for x in (q_LHD, k_THD, v_THD))
        outputs.append(prefix_attention(q, k, v, scale).transpose(1, 2)[0])
    return torch.cat(outputs)


@lru_cache(maxsize=16)  # shared by all layers of a micro-batch
def rows_on(bounds: tuple[int, ...], size: int, device: torch.device) -> tuple[Tensor, ...]:
    """Return ``gathered_rows`` and their inverse on a device."""
    rows = gathered_rows(bounds, size)
    return tuple(x.to(device, non_blocking=True) for x in (rows, rows.argsort()))


def padded_attention(
    query_THD: Tensor, key_THD: Tensor, value_THD: Tensor, bounds: tuple[int, ...], scale: float
) -> Tensor:
    """Causal attention [tokens, heads, head_dim] within each document ``bounds[d]:bounds[d + 1]``."""
    plan = padding_plan(bounds, query_THD.device)
    if plan.is_identity:
        [(_, _, documents)] = plan.batches
        inputs = [x_THD.unflatten(0, (documents, -1)) for x_THD in (query_THD, key_THD, value_THD)]
        return _attend(inputs, scale)
    token_P, row_T = plan.token_of_row_P, plan.row_of_token_T
    # The gradient of padding rows is zero: no kept output depends on them.
    q_PHD, k_PHD, v_PHD = (gather_rows(x_THD, token_P, row_T) for x_THD in (query_THD, key_THD, value_THD))
    outputs = [
        _attend([x_PHD[start:end].unflatten(0, (documents, -1)) for x_PHD in (q_PHD, k_PHD, v_PHD)], scale)
        for start, end, documents in plan.batches
    ]
    return gather_rows(torch.cat(outputs), row_T, token_P, plan.real_P)


def _attend(inputs: list[Tensor], scale: float) -> Tensor:
    """Attention of a right-padded batch: q, k, v [documents, length, heads, head_dim] to [rows, heads, d]."""
    q, k, v = (x.transpose(1, 2) for x in inputs)
    return prefix_attention(q, k, v, scale).transpose(1, 2).flatten(0, 1)


@dataclass(frozen=True)
class PaddingPlan:
    """Right-padded batches of a pack's documents, by similar length, and index maps on the device between the
    pack's tokens and the batches' rows."""

    batches: tuple[tuple[int, int, int], ...]
    """First row, end row and number of documents of each batch."""
    token_of_row_P: Tensor
    """Index of a row's token in the pack; a padding row repeats its document's last token."""
    real_P: Tensor
    """1 for a token, 0 for padding."""
    row_of_token_T: Tensor
    """Index of a token's row."""

    @property
    def is_identity(self) -> bool:
        """Whether the rows are the tokens in order: one document, or documents of one length."""
        return len(self.batches) == 1 and self.token_of_row_P.numel() == self.row_of_token_T.numel()


@lru_cache(maxsize=16)  # every layer of a micro-batch needs the same plan
def padding_plan(bounds: tuple[int, ...], device: torch.device) -> PaddingPlan:
    """Return the padding plan of a pack with documents ``bounds[d]:bounds[d + 1]``."""
    lengths = [end - start for start, end in pairwise(bounds)]
    batches: list[tuple[int, int, int]] = []
    tokens, real = [], []
    row = 0
    for group in groups_of_like_length(lengths):
        length = torch.tensor([lengths[d] for d in group])[:, None]
        start = torch.tensor([bounds[d] for d in group])[:, None]
        step = torch.arange(int(length.max()))
        tokens.append((start + torch.minimum(step, length - 1)).flatten())
        real.append((step < length).flatten())
        batches.append((row, row + tokens[-1].numel(), len(group)))
        row += tokens[-1].numel()
    token_of_row_P, real_P = torch.cat(tokens), torch.cat(real)
    row_of_token_T = torch.empty(bounds[-1], dtype=torch.int64)
    row_of_token_T[token_of_row_P[real_P]] = torch.arange(row)[real_P]
    maps = (x.to(device, non_blocking=True) for x in (token_of_row_P, real_P, row_of_token_T))
    return PaddingPlan(tuple(batches), *maps)


def groups_of_like_length(lengths: list[int]) -> list[list[int]]:
    """Batches of non-empty documents, as indices, longest first, with padding within ``_MAX_PADDING``."""
    groups: list[list[int]] = []
    tokens = longest = 0
    for document in sorted((d for d, n in enumerate(lengths) if n), key=lambda d: -lengths[d]):
        padded = longest * (len(groups[-1]) + 1) if groups else 0
        if not groups or padded > _MAX_PADDING * (tokens + lengths[document]):
            groups.append([])
            tokens, longest = 0, lengths[document]
        groups[-1].append(document)
        tokens += lengths[document]
    return groups


def gather_rows(x: Tensor, rows: Tensor, back: Tensor, real: Tensor | None = None) -> Tensor:
    """Return rows of ``x`` by index; ``back`` and ``real`` as in ``_Gather``."""
    gathered: Tensor = _Gather.apply(x, rows, back, real)  # type: ignore[no-untyped-call]
    return gathered


class _Gather(torch.autograd.Function):
    """Row gather ``x[rows]`` as an autograd function. Its backward gathers by ``back`` and zeroes rows that
    are 0 in ``real`` (None: keeps all); torch's own would scatter-add."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, back: Tensor, real: Tensor | None) -> Tensor:
        ctx.back, ctx.real = back, real
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        grad = grad.index_select(0, ctx.back)
        return grad if ctx.real is None else grad * ctx.real[:, None, None], None, None, None


def prefix_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Return softmax(scale q k^T) v, where query i of n sees the keys up to ``m - n + i``. q [batch, heads,
    n, head_dim]; k, v [batch, kv_heads, m, head_dim], m >= n."""
    queries, keys = q.size(2), k.size(2)
    if q.is_cuda:
        # Float32 on a GPU: the memory-efficient kernel has no grouped queries.
        k, v = (x.repeat_interleave(q.size(1) // x.size(1), 1) for x in (k, v))
    if queries == keys:
        gqa = q.size(1) != k.size(1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=gqa)
    if q.is_cuda:
        mask: Any = causal_lower_right(queries, keys)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    out: Tensor = _PrefixAttention.apply(q, k, v, scale)  # type: ignore[no-untyped-call]
    return out


class _PrefixAttention(torch.autograd.Function):
    """CPU prefix attention as an autograd function: two flash calls forward, two backward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        prefix = k.size(2) - q.size(2)
        seen, seen_lse = _flash(q, k[:, :, :prefix], v[:, :, :prefix], 0.0, False, scale=scale)
        own, own_lse = _flash(q, k[:, :, prefix:], v[:, :, prefix:], 0.0, True, scale=scale)
        lse = torch.logaddexp(seen_lse, own_lse)
        out: Tensor = seen * (seen_lse - lse).exp()[..., None] + own * (own_lse - lse).exp()[..., None]
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.prefix, ctx.scale = prefix, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        parts = (slice(0, ctx.prefix), False), (slice(ctx.prefix, None), True)
        grads = [
            _flash_backward(grad_out, q, k[:, :, keys], v[:, :, keys], out, lse, 0.0, causal, scale=ctx.scale)
            for keys, causal in parts
        ]
        (seen_q, seen_k, seen_v), (own_q, own_k, own_v) = grads
        return seen_q + own_q, torch.cat([seen_k, own_k], 2), torch.cat([seen_v, own_v], 2), None
