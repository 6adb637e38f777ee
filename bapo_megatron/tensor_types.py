"""Data types of a run that hold tensors: packs (``MicroBatch``), log-probs (``TokenStats``), losses.

A ``TokenFn`` maps a pack and its log-probs to a vector of sums. Separate from ``types.py``, whose importers
must start without torch. Shapes: ``_T`` tokens of a pack, ``_L`` layers, ``_K`` experts per token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, Any, Literal, NamedTuple, get_origin, get_type_hints

import torch
from torch import Tensor


class TokenStats(NamedTuple):
    """Per-token log-probs and entropies of the policy at the rollout temperature, aligned with the labels. A
    ``TokenFn`` receives them with the ``MicroBatch`` of the same tokens, often only a chunk of a pack."""

    log_prob_T: Tensor
    """log pi(label); differentiable in an update."""
    entropy_T: Tensor
    """Entropy of the next-token distribution, nats; differentiable only for loss terms."""


class Column(NamedTuple):
    """Dtype of a per-token pack column, and its fill value for untrained tokens."""

    dtype: torch.dtype
    fill: int = 0


@dataclass(frozen=True)
class MicroBatch:
    """A pack, or a chunk of it, in the ``thd`` layout of concatenated sequences (documents).

    Except for input id and position, a column stores the value about a token at the position that *predicts*
    that token. Prompts, padding, dummy packs (which even out the ranks' pack counts) and response tokens
    excluded by a loss mask hold fill values except in ``token_T``, ``label_T`` and ``position_T``: they count
    nowhere. A new column needs one annotated field here and one line in ``data.packing.trained_columns``.

    Document ``d`` occupies ``cu_seqlens[d]:cu_seqlens[d + 1]``, including the padding at its end. Padding at
    the end of the pack forms separate documents.
    """

    token_T: Annotated[Tensor, Column(torch.int64)]
    """Input ids."""
    label_T: Annotated[Tensor, Column(torch.int64)]
    """Id of the next token."""
    position_T: Annotated[Tensor, Column(torch.int64)]
    """Position in the document, for RoPE."""
    mask_T: Annotated[Tensor, Column(torch.float32)]
    """Loss mask: 1 if the label is a trained response token, otherwise 0."""
    weight_T: Annotated[Tensor, Column(torch.float32)]
    """Weight of the token in the loss (1 for a mean over tokens), including its importance weight."""
    advantage_T: Annotated[Tensor, Column(torch.float32)]
    """Advantage of the label's response."""
    rollout_log_prob_T: Annotated[Tensor, Column(torch.float32)]
    """log pi_rollout(label), from the engine that sampled it."""
    old_log_prob_T: Annotated[Tensor, Column(torch.float32)]
    """log pi_old(label), the ratio's denominator: pi_rollout, or the trainer's policy at the step's start."""
    reference_log_prob_T: Annotated[Tensor, Column(torch.float32)]
    """log pi_ref(label), from the frozen reference policy; 0 without ``algorithm.reference_kl``."""
    teacher_log_prob_T: Annotated[Tensor, Column(torch.float32)]
    """log pi_teacher(label) at temperature 1; 0 without ``algorithm.distillation``."""
    version_T: Annotated[Tensor, Column(torch.int32)]
    """Policy version that sampled the label."""
    oldest_version_T: Annotated[Tensor, Column(torch.int32)]
    """Oldest policy version that sampled the label or an earlier token of its response."""
    sequence_T: Annotated[Tensor, Column(torch.int64, fill=-1)]
    """Index of the label's sequence among the update's ``sequences``, unique over packs and replicas.

    ``value_T.new_zeros(batch.sequences + 1).index_add_(0, batch.sequence_T + 1, value_T)[1:]`` sums a value
    over each sequence, within this rank's chunk. Under context parallelism a rank holds only some tokens of a
    sequence, and the output layer passes a loss only a chunk at a time. The index is the same everywhere, so
    as elements of a ``TokenFn``'s vector such sums add up to whole-sequence sums.
    """
    cu_seqlens: tuple[int, ...]
    """Cumulative document bounds, [documents + 1]."""
    rows: tuple[tuple[int, int, int], ...]
    """For each real document: sample index in the update, offset in the pack, predicting (unpadded)
    tokens."""
    sequences: int
    """Number of samples in the whole update, over all replicas."""
    sources: tuple[int, ...] = ()
    """Source of each of the ``sequences``: index in ``data.sources``, -1 for none; empty for a single
    file."""
    trained_tokens: tuple[int, ...] = ()
    """Number of trained tokens in each of the ``sequences``; every rank computes the same search groups from
    it (``algo/losses/clip.py``). Filled only by ``pack_samples``."""
    route_TLK: Tensor | None = None
    """Routes, the experts of each token in each layer, as stored (``RouteShape``). Rows of prompt tokens,
    padding and other unknown routes hold the unknown mark. Stays on the host; each model chunk takes its
    layers. None in all packs of an update without routes."""
    replays_routes: bool = True
    """Whether tokens use their stored routes; otherwise these are only compared with the trainer's choice."""

    @classmethod
    def of(
        cls,
        cu_seqlens: tuple[int, ...],
        rows: tuple[tuple[int, int, int], ...] = (),
        sequences: int = 0,
        **columns: Tensor,
    ) -> MicroBatch:
        """Return a pack with these columns; every other column holds its fill value."""
        filled: dict[str, Any] = {
            n: torch.full((cu_seqlens[-1],), c.fill, dtype=c.dtype) for n, c in COLUMNS.items()
        }
        return cls(**filled | columns, cu_seqlens=cu_seqlens, rows=rows, sequences=sequences)

    @property
    def max_seqlen(self) -> int:
        """Length of the longest document."""
        return max(end - start for start, end in pairwise(self.cu_seqlens))

    def take(self, index: slice | Tensor) -> MicroBatch:
        """Return the tokens at ``index`` in every column; the other fields still describe the whole pack."""
        taken = self._each(lambda column_T: column_T[index])
        return taken if self.route_TLK is None else replace(taken, route_TLK=self.route_TLK[index])

    def to(self, device: torch.device) -> MicroBatch:
        """Return a copy with every column except routes on ``device``; copies may still be in progress."""
        return self._each(lambda column_T: column_T.to(device, non_blocking=True))

    def _each(self, change: Callable[[Tensor], Tensor]) -> MicroBatch:
        columns: dict[str, Any] = {name: change(getattr(self, name)) for name in COLUMNS}
        return replace(self, **columns)


COLUMNS: dict[str, Column] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(MicroBatch, include_extras=True).items()
    if get_origin(hint) is Annotated
}
"""Per-token columns: the annotated fields of ``MicroBatch``."""


TokenFn = Callable[[TokenStats, MicroBatch], Tensor]
"""Loss or measurement: maps tokens to a vector that is additive over tokens, packs and ranks. Element 0 of a
loss is minimized; the others are metric sums."""


@dataclass(frozen=True)
class SearchedLoss:
    """Loss with parameters, such as clipping bounds, that are searched on the policy's own log-probs first.
    ``Policy.update`` sums ``measure`` over packs and ranks, passes the sums to ``loss_of``, and minimizes the
    loss function that this returns."""

    measure: TokenFn
    """Sums for the search."""
    loss_of: Callable[[Tensor], TokenFn]
    """Builds the loss from the sums of ``measure``."""
    over: Literal["update", "micro_batch"]
    """Scope of the ``measure`` sums: the update (all activations are kept until the sums are known), or the
    micro-batches that the replicas process simultaneously."""


class UpdateResult(NamedTuple):
    """Result of an optimizer step, equal on every rank: loss sums, gradient norm, learning rate, routing."""

    sums: Tensor
    """float64: the loss function's vector summed over the update; element 0 is the loss sum."""
    grad_norm: float
    learning_rate: float
    routes: Tensor | None = None
    """float64 [7], read by ``route_metrics`` (``trainer/checks.py``); None for an update without routes."""
    experts: Tensor | None = None
    """float64 [layers, experts + 2] for a mixture of experts, per layer: tokens of each expert, tokens, sum
    of router entropies in nats (``policy/experts.py``); otherwise None."""
